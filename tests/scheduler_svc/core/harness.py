"""A core joined to a fake executor with a delay, on a clock of its own."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from scheduler_svc.core.admission import Acceptance
from scheduler_svc.core.request.events import Ended, Failed, LogLine, Progress, TokenLogprobs
from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions, StepPriority
from scheduler_svc.core.request.request import RequestState
from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.link.batch import Admission, Batch
from tandem.link.results import StepResult
from tandem.sampling_params import SamplingParams
from tests.scheduler_svc.core.batch_rules import BatchRules, LaneRules, RepeatedRows
from tests.scheduler_svc.core.fake_executor import (
    FakeExecutor,
    expected_outputs,
    made_up_logprobs,
    made_up_score,
)
from tests.scheduler_svc.core.killing import Deaths

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def geometry_of(
    config: EngineConfig,
    num_slots: int | None = None,
    num_host_blocks: int = 0,
    num_stages: int = 1,
) -> ExecutorGeometry:
    """Return the geometry of an executor that is exactly as large as a configuration."""
    return ExecutorGeometry(
        num_blocks=config.max_num_blocks,
        block_size=config.block_size,
        num_slots=num_slots or config.max_batch_size,
        max_batch_size=config.max_batch_size,
        max_total_tokens=config.max_total_tokens,
        max_model_len=config.max_model_len,
        num_host_blocks=num_host_blocks,
        num_stages=num_stages,
    )


def small_config(**changes) -> EngineConfig:
    """Return a configuration with which limits are reached by a handful of requests."""
    values = {
        "block_size": 4, "max_num_blocks": 32, "max_batch_size": 4, "max_num_seqs": 64,
        "max_model_len": 64, "max_total_tokens": 16, "memory_threshold": 1.0,
    }  # fmt: skip
    return EngineConfig(**(values | changes))


def new_request(
    handle: int, prompt_len: int, max_tokens: int, arrival_s: float, /, **changes
) -> NewRequest:
    """Return a greedy request with a prompt of its own."""
    values = {
        "request_id": f"r{handle}",
        "handle": handle,
        "prompt": (np.arange(prompt_len, dtype=np.int32) * 7 + handle * 13) % 50,
        "sampling": GREEDY,
        "max_tokens": max_tokens,
        "arrival_s": arrival_s,
    }
    return NewRequest(**(values | changes))


def context_of(batch: Batch) -> int:
    """Return the number of tokens that the rows of a step attend to."""
    return int((batch.row_start + batch.row_num_tokens).sum())


def queue_position(core: Scheduler, handle: int) -> int | None:
    """Return the number of requests ahead of a waiting one; None when it does not wait."""
    order = core.waiting_handles()
    return order.index(handle) if handle in order else None


class Rig:
    """Driver of a core, step by step; results come back `delay` steps after their batch."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        delay: int = 1,
        options: CoreOptions | None = None,
        geometry: ExecutorGeometry | None = None,
        checked: bool = True,
    ) -> None:
        self.config = config or small_config()
        self.geometry = geometry or geometry_of(self.config)
        self.core = Scheduler(self.config, self.geometry, options)
        self.executor = FakeExecutor(self.geometry)
        self._repeated_rows = RepeatedRows()
        self._lane_rules = LaneRules()
        self.delay = delay
        self.usual_step_s: float | None = None
        """Seconds per step, by which the core says how many are in flight; None: `delay` are."""
        self.checked = checked
        self.now = 0.0
        self.pending: deque[StepResult | None] = deque()
        """Results under way; None for steps that a dead executor got."""
        self.deaths = Deaths()
        self.is_dead = False
        self.fits: Callable[[Batch], bool] = lambda _: True
        """Predicate on a step: True when the executor has memory for it."""
        self.ran_out = False
        """True when the executor died for want of memory."""
        self.num_out_of_memory = 0
        self.num_alone: dict[int, int] = defaultdict(int)
        """Number of steps of each handle alone that ran out of memory."""
        self.loses_results = False
        """True when a dying executor loses results under way, and the oldest step is blamed."""
        self.owners: dict[tuple[int, int], int] = {}
        """Handles by slot and generation."""
        self.batches: list[Batch] = []
        self.submitted: dict[int, NewRequest] = {}
        self.num_handles = 0
        self.num_prior = 0
        """Number of output tokens that requests came with."""
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.token_times: dict[int, list[float]] = defaultdict(list)
        self.logprobs: dict[int, list[tuple[float, list[tuple[int, float]]]]] = defaultdict(list)
        """Log probabilities of each output token, by handle, as `made_up_logprobs` tells them."""
        self.scores: dict[int, list[tuple[int, float, list[tuple[int, float]]]]] = defaultdict(list)
        """Scores of the prompt tokens from the second on, by handle, as `made_up_score` has them."""
        self.ended: dict[int, Ended] = {}
        self.failed: dict[int, Failed] = {}
        self.progress: list[Progress] = []
        self.log_lines: list[LogLine] = []
        self.poisons_next = False
        """True when the model is to produce NaN for the next admission, from its first token on."""
        self.poisoned: set[int] = set()
        """Handles for which the model produces NaN, or did."""
        self.sampled: set[tuple[int, int]] = set()
        """(handle, position) of every token the present executor has sampled."""
        self.left_out: dict[tuple[int, int], int] = {}
        """Batches in a row in which a decode had no row, by slot and generation."""
        self.waited: dict[int, float] = defaultdict(float)
        """Seconds each handle has spent in the queue."""

    def submit(self, prompt_len: int = 5, max_tokens: int = 8, **changes) -> int:
        """Submit a request with a prompt of its own; returns the handle of its first choice."""
        handle = self.num_handles
        new = new_request(handle, prompt_len, max_tokens, self.now, **changes)
        new = self._as_taken(new, self.core.submit(new, self.now))
        self.num_handles += new.num_choices
        for choice in new.live_choices:
            own = {"handle": handle + choice, "sampling": replace(new.sampling, choice=choice)}
            self.submitted[handle + choice] = replace(new, **own) if choice else new
            if new.prior_outputs:
                self.outputs[handle + choice] = new.prior_outputs[choice].tolist()
                self.num_prior += len(new.prior_outputs[choice])
        return handle

    def num_prior_of(self, handle: int) -> int:
        """Return the number of output tokens that a request came with."""
        new = self.submitted[handle]
        return len(new.prior_outputs[new.sampling.choice]) if new.prior_outputs else 0

    def _as_taken(self, new: NewRequest, acceptance: Acceptance) -> NewRequest:
        """Return the request as the core runs it: cut where it is too long, else as it is."""
        limits = self.core.limits
        bs, num_blocks = limits.block_size, limits.num_blocks
        longest = min(limits.max_model_len, num_blocks * bs)
        under_threshold = int(limits.memory_threshold * num_blocks + 1e-9) * bs
        prompt_len = len(new.prompt)
        if prompt_len >= longest:
            prompt_len = longest - min(new.max_tokens, longest // 2)
        prompt_len = min(prompt_len, under_threshold)
        max_tokens = min(new.max_tokens, longest - prompt_len)
        assert len(new.prompt) - prompt_len == acceptance.num_truncated_tokens
        assert max_tokens == acceptance.max_tokens
        return replace(new, prompt=new.prompt[-prompt_len:], max_tokens=max_tokens)

    def plan(self) -> Batch | None:
        """Plan and run one batch; its result stays under way."""
        if (command := self.core.take_command()) is not None:
            self.pending.append(None if self.is_dead else self.executor.obey(command))
            return None
        rules = BatchRules(self.core, self.waited)
        batch = self.core.schedule(self.now)
        if batch is not None:
            rules.check(batch)
            self._lane_rules.check(self.core, batch, rules.num_decoding)
            self._repeated_rows.check_batch(batch)
            self._note_left_out(rules, batch)
            self.batches.append(batch)
            salts = {
                admission.slot: self.core._replica.slots.request_of(admission.slot).new.cache_salt
                for admission in batch.admits
            }
            if batch.admits and self.poisons_next:
                self._poison(batch.admits[0])
            self._note_owners(batch)
            self.ran_out = self.ran_out or not (self.is_dead or self.fits(batch))
            self.is_dead = self.is_dead or self.ran_out or self.deaths.is_deadly(self.core, batch)
            if self.is_dead:
                if self.loses_results:
                    self.pending = deque([None] * len(self.pending))
                self.pending.append(None)
            else:
                result = self.executor.execute(batch, self.core.state_hash, salts)
                self.pending.append(result)
                self._note_sampled(result)
        self.collect()
        self.check()
        return batch

    def _note_owners(self, batch: Batch) -> None:
        handles = self.core._replica.slots.admitted.handle
        for admission in batch.admits:
            self.owners[admission.slot, admission.generation] = int(handles[admission.slot])

    def _note_left_out(self, rules: BatchRules, batch: Batch) -> None:
        """Check that no decode is left out for long, except where prompts go first."""
        if rules.options.step_priority is StepPriority.PREFILL_FIRST:
            return
        before, self.left_out = self.left_out, {}
        for key in rules.left_out(batch):
            if self._lane_rules.is_held(self.core._replica.slots, key[0]):
                continue
            self.left_out[key] = before.get(key, 0) + 1
            assert self.left_out[key] <= rules.max_left_out(), "a decode is left out for ever"

    def _poison(self, admission: Admission) -> None:
        self.poisons_next = False
        self.poisoned.add(int(self.core._replica.slots.admitted.handle[admission.slot]))
        self.executor.poisoned.add((admission.slot, admission.generation))

    def deliver(self) -> None:
        """Apply the oldest result, or note that the executor died instead."""
        if self.pending[0] is None:
            self.lose_executor(died_in=0, out_of_memory=self.ran_out)
            return
        result = self.pending.popleft()
        self.core.apply(result, self.now)
        self.collect()
        if result.row_errors:
            self._forget_dropped()
        self.check()

    def step(self) -> Batch | None:
        """Plan, and apply what is due; returns None when there was nothing to plan."""
        for handle, request in self.core._cell.requests._by_handle.items():
            self.waited[handle] += request.state is RequestState.WAITING
        self.now += 1.0
        if self.usual_step_s is not None:
            return self._step_in_depth(self.usual_step_s)
        batch = self.plan()
        is_stuck = batch is None and not self.pending and self.core.num_requests
        assert not is_stuck or self.core.is_suspended, "nothing is done for those in the system"
        while len(self.pending) >= self.delay or (batch is None and self.pending):
            self.deliver()
            if batch is None:
                break
        return batch

    def _step_in_depth(self, usual_step_s: float) -> Batch | None:
        """Plan as many steps as may be in flight, then apply one result."""
        batch = None
        while self.core.num_inflight < self.core.lookahead(usual_step_s):
            num_pending, batch = len(self.pending), self.plan()
            if len(self.pending) == num_pending:
                break
        is_stuck = not self.pending and self.core.num_requests and not self.core.is_suspended
        assert not is_stuck, "nothing is done for those in the system"
        if self.pending:
            self.deliver()
        return batch

    def run(self, limit: int = 5000) -> None:
        """Step until nothing is left."""
        for _ in range(limit):
            if not self.core.has_pending_work():
                break
            self.step()
        assert not self.core.has_pending_work(), "work is left: something starves"
        self.core.check_integrity()
        pool = self.core._replica.kv.pool
        assert pool.num_used == 0, "blocks are lost"
        assert pool.num_available == pool.num_blocks

    def lose_executor(
        self, died_in: int | None = None, *, out_of_memory: bool = False, may_live: str = ""
    ) -> None:
        """
        Let the executor die, perhaps in a step in flight, and an empty one take its place; or let
        it have no memory for that step, which its session ends with; or let it fall silent, perhaps
        alive.
        """
        if out_of_memory:
            self._note_out_of_memory(died_in or 0)
        elif not may_live:
            self.deaths.note(self.core, died_in, self.owners)
        self.pending.clear()
        self.sampled.clear()
        self.owners.clear()
        self.is_dead = self.ran_out = False
        self.core.executor_lost(self.now, died_in, out_of_memory=out_of_memory, may_live=may_live)
        self.executor = FakeExecutor(self.geometry)
        self.collect()
        self.check()

    def _note_out_of_memory(self, failed: int) -> None:
        self.num_out_of_memory += 1
        in_flight = self.core._replica.steps.in_flight
        if failed < len(in_flight) and len(in_flight[failed].slot) == 1:
            rows = in_flight[failed]
            self.num_alone[self.owners[int(rows.slot[0]), int(rows.generation[0])]] += 1

    def use_geometry(self, geometry: ExecutorGeometry) -> None:
        """Let the executor die and one of another size take its place."""
        self.pending.clear()
        self.sampled.clear()
        self.owners.clear()
        self.is_dead = self.ran_out = False
        self.geometry = geometry
        self.core.use_geometry(self.config, geometry, self.now)
        self.executor = FakeExecutor(geometry)
        self.collect()
        self.check()

    def expected(self, handle: int) -> list[int]:
        """Return the outputs that a request must have produced."""
        new = self.submitted[handle]
        ends = new.eos_token_ids | new.stop_token_ids
        return expected_outputs(new.prompt, new.max_tokens, ends, choice=new.sampling.choice)

    def expected_logprobs(self, handle: int) -> list[tuple[float, list[tuple[int, float]]]]:
        """Return the log probabilities of the tokens a request got here; none if it did not ask."""
        new, prior = self.submitted[handle], self.num_prior_of(handle)
        if new.sampling.logprobs is None:
            return []
        first = len(new.prompt) + prior
        return [
            made_up_logprobs(first + place, token, new.sampling.logprobs)
            for place, token in enumerate(self.outputs[handle][prior:])
        ]

    def collect(self) -> None:
        """Take events; check that tokens come once, in order and before their request's end."""
        events = self.core.take_events()
        self._repeated_rows.check_tokens(events)
        columns = zip(events.token_handle, events.token_offset, events.token, strict=True)
        for handle, offset, token in columns:
            assert int(handle) not in self.ended, "a token after the end"
            assert len(self.outputs[int(handle)]) == offset, "a token is missing or twice"
            self.outputs[int(handle)].append(int(token))
            self.token_times[int(handle)].append(self.now)
        for told in events.logprobs:
            self._note_logprobs(told)
        for ended in events.ended:
            assert ended.handle not in self.ended | self.failed, "a request ends twice"
            self.ended[ended.handle] = ended
        for failed in events.failed:
            assert failed.handle not in self.ended | self.failed, "a request ends twice"
            self.failed[failed.handle] = failed
        self.progress += events.progress
        self.log_lines += events.log_lines

    def _note_logprobs(self, told: TokenLogprobs) -> None:
        """Check that log probabilities come once, in order and with their tokens; keep them."""
        if told.rank is not None:
            self._note_scores(told)
            return
        entries = zip(
            told.handle.tolist(), told.offset.tolist(), told.columns.entries(), strict=True
        )
        for handle, offset, (chosen, ids, values, _) in entries:
            before = self.logprobs[handle]
            assert self.num_prior_of(handle) + len(before) == offset, "missing or twice"
            assert offset < len(self.outputs[handle]), "log probabilities before their token"
            before.append((chosen, list(zip(ids, values, strict=True))))

    def _note_scores(self, told: TokenLogprobs) -> None:
        """Check that scores of prompt tokens come once, in order and before outputs; keep them."""
        entries = zip(
            told.handle.tolist(),
            told.offset.tolist(),
            told.rank.tolist(),
            told.columns.entries(),
            strict=True,
        )
        for handle, offset, rank, (chosen, ids, values, _) in entries:
            before = self.scores[handle]
            position = len(self.submitted[handle].prompt) + offset
            assert 1 + len(before) == position, "missing or twice"
            before.append((rank, chosen, list(zip(ids, values, strict=True))))

    def expected_scores(self, handle: int) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """Return the scores of a request's prompt, told with its first live choice."""
        new = self.submitted[handle]
        num_top = new.sampling.prompt_logprobs
        if num_top is None or new.sampling.choice != new.live_choices[0]:
            return []
        prompt = new.prompt.tolist()
        return [made_up_score(at, prompt[at], num_top) for at in range(1, len(prompt))]

    def _note_sampled(self, result: StepResult) -> None:
        handles = self.core._replica.slots.admitted.handle[result.slot].tolist()
        for key in zip(handles, result.position.tolist(), strict=True):
            assert key not in self.sampled, "a token is sampled again that is under way or known"
            self.sampled.add(key)

    def _forget_dropped(self) -> None:
        """Forget samples under way of requests that shared KV with a bad row and start over."""
        known = {
            handle: request.num_known
            for handle, request in self.core._cell.requests._by_handle.items()
            if request.state is RequestState.WAITING
        }
        self.sampled = {
            (handle, position)
            for handle, position in self.sampled
            if position < known.get(handle, position + 1)
        }

    def check(self) -> None:
        """Check that everything the core keeps is consistent."""
        if self.checked:
            self.core.check_integrity()
            self.deaths.check_forgiven(self.core)
            stats = self.core.stats()
            num_live = len(self.core._cell.requests._by_handle)
            assert num_live == stats.running_requests + stats.waiting_requests
            num_blocks = stats.used_blocks + stats.cached_blocks + stats.free_blocks
            assert stats.total_blocks == num_blocks
            held = [copy.blocks for copy in self.core._replica.kv.host._copies.values()]
            assert sum(map(len, held)) == stats.used_host_blocks
