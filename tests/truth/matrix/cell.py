"""A scheduler core over executors whose ranks are processes, driven until no request is left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from executor_svc.memory.kv_memory import kv_bytes_per_block
from executor_svc.model.config import read_model_config
from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.request.options import CoreOptions, PreemptionMode
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client.description import read_description
from tandem.engine_config import EngineConfig
from tandem.link.codec.wire import encode_step
from tandem.link.commands import Step
from tandem.link.results import StepTimings
from tandem.wording import GIB
from tests.truth.matrix.cases import Case
from tests.truth.matrix.rank_processes import RankedExecutor, RankProcesses
from tests.truth.requests import TruthRequest
from tests.truth.served import Output, add_logprobs

LIMITS = EngineConfig(
    block_size=7,
    max_num_blocks=40,
    max_batch_size=8,
    max_model_len=256,
    max_total_tokens=64,
    memory_threshold=1.0,
)
"""
Limits of all executors together: long prompts are cut, blocks are shared in part, and there are too
few of them.
"""
NUM_HOST_BLOCKS = 16
"""Host blocks of an executor: enough for some of the requests that lose their blocks."""
OPTIONS = CoreOptions(schedule_conservativeness=0.0, preemption_mode=PreemptionMode.SWAP)
TURN_S = 0.01
"""Seconds by which the core's clock moves in a turn, and that a step is said to take."""


class Executor:
    """An executor of the core, with its steps in flight."""

    def __init__(self, port: ExecutorPort, ranks: RankedExecutor) -> None:
        self.num_steps = 0
        self.most_in_flight = 0
        self._port = port
        self._ranks = ranks

    def plan(self, now: float) -> None:
        """Plan and send as many steps as may be in flight."""
        while self._port.num_inflight < self._port.lookahead(1.0):
            batch = self._port.schedule(now)
            if batch is None:
                return
            self.num_steps += 1
            step = Step(
                session_epoch=1,
                step_id=self.num_steps,
                acked_step_id=0,
                state_hash=self._port.state_hash,
                command=batch,
            )
            self._ranks.send(encode_step(step))
            self.most_in_flight = max(self.most_in_flight, self._port.num_inflight)

    def apply(self, now: float) -> None:
        """Wait for the oldest result in flight, if there is one, and apply it."""
        if self._port.num_inflight:
            result = self._ranks.collect()
            assert not result.row_errors
            result.timings = StepTimings(total_ns=int(TURN_S * 1e9))  # routing reads them
            self._port.apply(result, now)

    def end(self) -> None:
        """Check that the core holds nothing here any more, and give the ranks back."""
        assert 0 == self._port.num_used_blocks == self._port.num_slots_in_use
        self._ranks.end()


class Cell:
    """The core and the executors of a case."""

    def __init__(self, model_dir: Path, case: Case, processes: RankProcesses) -> None:
        limits = replace(LIMITS, max_num_blocks=LIMITS.max_num_blocks // case.dp)
        flags = executor_flags(model_dir, case, limits)
        ranked = [processes.executor(case.tp, case.pp, flags) for _ in range(case.dp)]
        first, *others = (read_description(one.describe()).geometry for one in ranked)
        self.core = Scheduler(limits, first, OPTIONS)
        ports = [self.core, *(self.core.attach(limits, geometry) for geometry in others)]
        self.executors = [Executor(*pair) for pair in zip(ports, ranked, strict=True)]
        self._outputs: dict[int, Output] = defaultdict(Output)
        self._num_submitted = 0
        self._now = 0.0

    def submit(self, request: TruthRequest, num_choices: int) -> range:
        """Queue a request; return the handles of its choices."""
        first = self._num_submitted
        self._num_submitted += num_choices
        new = request.new_request(first, arrival_s=self._now, num_choices=num_choices)
        self.core.submit(new, self._now)
        return range(first, self._num_submitted)

    def run(self) -> dict[int, Output]:
        """Compute until no request is left; return the output of each handle."""
        while self.core.has_pending_work():
            for executor in self.executors:
                executor.plan(self._now)
            for executor in self.executors:
                executor.apply(self._now)
            self._take_events()
            self._now += TURN_S
        self.core.check_integrity()
        return self._outputs

    def end(self) -> None:
        """Give all ranks back."""
        for executor in self.executors:
            executor.end()

    def _take_events(self) -> None:
        events = self.core.take_events()
        assert not events.failed
        columns = (events.token_handle, events.token_offset, events.token)
        for handle, offset, token in zip(*(one.tolist() for one in columns), strict=True):
            tokens = self._outputs[handle].tokens
            assert len(tokens) == offset
            tokens.append(token)
        add_logprobs(self._outputs, events)


def executor_flags(model_dir: Path, case: Case, limits: EngineConfig) -> Sequence[str]:
    """Return the flags of each rank of a case's executors."""
    config = read_model_config(model_dir)
    whole = kv_bytes_per_block(config, limits.block_size, torch.float32)
    share = whole / min(case.tp, config.num_kv_heads) / case.pp
    return (
        f"--model={model_dir}",
        "--device=cpu",
        "--dtype=float32",
        "--num-threads=1",
        "--cpu-extension=off",
        f"--block-size={limits.block_size}",
        f"--max-num-blocks={limits.max_num_blocks}",
        f"--max-batch-size={limits.max_batch_size}",
        f"--max-model-len={limits.max_model_len}",
        f"--max-total-tokens={limits.max_total_tokens}",
        f"--swap-space-gb={(NUM_HOST_BLOCKS + 0.5) * share / GIB:.9f}",
    )
