"""Scheduler's part of a turn, with a sink in place of frontends and made-up results."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.ipc.messages import CoreMessage, encode
from scheduler_svc.service.publisher import Publisher, handle_of
from tandem.engine_config import EngineConfig
from tandem.link.batch import ROW_SAMPLES, Batch, Int32Column
from tandem.link.results import StepResult
from tandem.link.scheduler_end import SchedulerEnd
from tandem.link.session import Attached
from tandem.sampling_params import SamplingParams

BLOCK_SIZE = 16
VOCAB_SIZE = 128_256
EOS_TOKEN_IDS = frozenset({128_001, 128_008, 128_009})
STOP_TOKEN_IDS = frozenset({128_003, 128_010})
NUM_PLAIN_TOKENS = 128_000
"""Number of plain tokens: ids below this are neither EOS nor stop ids."""
USUAL_STEP_S = 0.02
"""Assumed duration of a step: too long for more steps in flight than `window`."""

_BOOT_ID = "bench"
_NUM_DRAWN = 64
_FRONTEND = 1
_DEADLINE_S = 1e6
_SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=0.9, seed=0)

PARTS = ("apply", "plan", "encode", "publish")
"""Parts of a turn, in this order."""


@dataclass(frozen=True, slots=True)
class TurnCost:
    """
    Cost of one turn in microseconds.

    Attributes:
        cpu_us: CPU of the thread.
        wall_us: Wall time.
        parts_us: CPU of each of `PARTS`, by its name; empty where they are not asked for, as asking
            for them makes turns dearer.
    """

    cpu_us: float
    wall_us: float
    parts_us: dict[str, float]


class Sink:
    """Sink for messages to frontends: encodes each as the socket does, and drops it."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def try_send(self, index: int, message: CoreMessage) -> bool:
        """Encode a message and count its bytes."""
        del index
        self.num_bytes += len(encode(message))
        return True


class BenchService:
    """
    Scheduler core between a step link and one frontend, all in this process.

    A turn has the order of the service's loop: apply the result that came, plan and encode the
    batches that may be sent, add events to the frontend's outbox, encode its message. Results are
    made up between turns, which is not measured; their tokens are random and end no request.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        num_blocks: int,
        max_num_seqs: int,
        max_total_tokens: int,
        window: int = 1,
        has_parts: bool = False,
    ) -> None:
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_blocks=num_blocks,
            max_batch_size=num_slots,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_total_tokens=max_total_tokens,
        )
        geometry = ExecutorGeometry(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_slots=num_slots,
            max_batch_size=num_slots,
            max_total_tokens=max_total_tokens,
            max_model_len=max_model_len,
        )
        self.core = Scheduler(config, geometry, CoreOptions(window=window))
        self.sink = Sink()
        self._publisher = Publisher(self.sink)
        self._publisher.open(_FRONTEND)
        self._end = SchedulerEnd()
        self._end.open(_BOOT_ID, 1, window)
        self._end.attach()
        self._end.on_attached(
            Attached(boot_id=_BOOT_ID, last_received_step_id=0, last_completed_step_id=0)
        )
        self._parts = PARTS if has_parts else ()
        self._parts_ns: dict[str, int] = {}
        self._part_began_ns = 0
        self._random = np.random.default_rng(0)
        # Drawn once: drawing costs as much as a turn, and would leave its caches cold.
        self._drawn = self.tokens(_NUM_DRAWN * num_slots).reshape(_NUM_DRAWN, num_slots)
        self._generation = np.zeros(num_slots, np.uint32)
        self._results: deque[StepResult] = deque()
        self._num_submitted = 0
        self._now_s = 1.0

    def request(self, prompt_len: int, max_tokens: int) -> NewRequest:
        """Make a usual request: a prompt of its own, EOS ids, stop ids and a deadline."""
        number = self._num_submitted
        self._num_submitted += 1
        return NewRequest(
            request_id=f"bench-{number}",
            handle=handle_of(_FRONTEND, number),
            prompt=self.tokens(prompt_len),
            sampling=_SAMPLING,
            max_tokens=max_tokens,
            arrival_s=self._now_s,
            eos_token_ids=EOS_TOKEN_IDS,
            stop_token_ids=STOP_TOKEN_IDS,
            deadline_s=_DEADLINE_S + number,
        )

    def tokens(self, count: int) -> Int32Column:
        """Draw random ids that end no request, shape ``[count]``."""
        return self._random.integers(0, NUM_PLAIN_TOKENS, count, np.int32)

    def submit(self, new: NewRequest) -> None:
        """Submit a request to the core."""
        self.core.submit(new, self._now_s)

    def turn(self) -> tuple[Batch | None, TurnCost]:
        """Do one turn; return the last batch that was sent, if any, and the turn's cost."""
        self._now_s += 0.02
        result = self._results.popleft() if self._results else None
        self._parts_ns = dict.fromkeys(self._parts, 0)
        self._part_began_ns = time.thread_time_ns()
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        batches = self._one_turn(result, self._now_s)
        cpu_ns = time.thread_time_ns() - cpu_ns
        wall_ns = time.perf_counter_ns() - wall_ns
        for step_id, batch in batches:
            self._results.append(self._result(batch, step_id))
        parts_us = {name: spent_ns / 1e3 for name, spent_ns in self._parts_ns.items()}
        cost = TurnCost(cpu_ns / 1e3, wall_ns / 1e3, parts_us)
        return batches[-1][1] if batches else None, cost

    def _one_turn(self, result: StepResult | None, now: float) -> list[tuple[int, Batch]]:
        core, end, publisher = self.core, self._end, self._publisher
        is_timed = bool(self._parts)
        if result is not None and end.on_result(result):
            core.apply(result, now)
        if is_timed:
            self._end_part("apply")
        batches = []
        while end.can_send and core.num_inflight < core.lookahead(USUAL_STEP_S):
            batch = core.schedule(now)
            if is_timed:
                self._end_part("plan")
            if batch is None:
                break
            step_id, _ = end.send(batch, core.state_hash)
            if is_timed:
                self._end_part("encode")
            batches.append((step_id, batch))
        events = core.take_events()
        if events:
            publisher.add(events)
        publisher.flush(now)
        if is_timed:
            self._end_part("publish")
        return batches

    def _end_part(self, name: str) -> None:
        """Add the CPU time since the part before to this one."""
        self._parts_ns[name] += time.thread_time_ns() - self._part_began_ns
        self._part_began_ns = time.thread_time_ns()

    def _result(self, batch: Batch, step_id: int) -> StepResult:
        for admission in batch.admits:
            self._generation[admission.slot] = admission.generation
        rows = np.flatnonzero(batch.row_flags == ROW_SAMPLES)
        slot = batch.row_slot[rows]
        return StepResult(
            boot_id=_BOOT_ID,
            step_id=step_id,
            slot=slot,
            generation=self._generation[slot],
            position=batch.row_start[rows] + batch.row_num_tokens[rows],
            token=self._drawn[step_id % len(self._drawn), : len(rows)],
        )
