"""A core and a runner in one process, and the outputs of the requests that they serve."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from scheduler_svc.core.request.events import CoreEvents
from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.link.batch import Batch
from tandem.link.logprobs import TokenLogprob
from tandem.link.results import StepResult
from tandem_embedded.backend import Backend
from tandem_embedded.loading.runners import RunnerSettings, load_backends
from tests.threads import NUM_THREADS
from tests.truth.equality import Comparison, assert_same_logprobs
from tests.truth.requests import TruthRequest

SHARING = CoreOptions(schedule_conservativeness=0.0)
ALONE = CoreOptions(schedule_conservativeness=0.0, prefix_caching=False)


@dataclass
class Output:
    """Tokens of one choice, the margin by which each won, and log probabilities if asked for."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


def add_logprobs(outputs: dict[int, Output], events: CoreEvents) -> None:
    """Add the log probabilities of a core's events to the outputs of their handles."""
    for told in events.logprobs:
        for handle, entry in zip(told.handle.tolist(), told.columns.entries(), strict=True):
            outputs[handle].logprobs.append(entry)


class Served:
    """A core and a runner on one tiny model, driven until no request is left."""

    def __init__(
        self,
        model_dir: Path,
        options: CoreOptions,
        *,
        block_size: int = 16,
        num_blocks: int = 80,
        num_stages: int = 1,
    ) -> None:
        config = EngineConfig(
            block_size=block_size,
            max_num_blocks=num_blocks,
            max_batch_size=8,
            max_model_len=256,
            max_total_tokens=64,
            memory_threshold=1.0,
        )
        settings = RunnerSettings(dtype="float32", num_threads=NUM_THREADS, collect_margins=True)
        config, (self.backend,) = load_backends(config, model_dir, settings)
        geometry = replace(_geometry(config, self.backend), num_stages=num_stages)
        self.core = Scheduler(config, geometry, options)
        self.cached: list[int] = []
        """Number of cached tokens of every admission."""
        self.num_copies = 0
        self.batches: list[Batch] = []
        """Batches of steps in depth."""
        self.most_paused_blocks = 0
        self._in_flight: deque[StepResult] = deque()
        self._outputs: dict[int, Output] = defaultdict(Output)
        self._num_steps = 0
        self._num_submitted = 0

    def submit(self, request: TruthRequest, *, choice: int = 0, num_choices: int = 1) -> int:
        """Queue a request; return the handle of its first choice."""
        handle = self._num_submitted
        self._num_submitted += num_choices
        self.core.submit(request.new_request(handle, choice=choice, num_choices=num_choices), 0.0)
        return handle

    def step(self) -> None:
        """Plan, compute and apply one batch."""
        batch = self.core.schedule(0.0)
        if batch is not None:
            self.apply(self.compute(batch))

    def compute(self, batch: Batch) -> StepResult:
        """Compute one batch; return its result."""
        self._num_steps += 1
        self.cached += [admission.num_cached_tokens for admission in batch.admits]
        self.num_copies += len(batch.copy_source)
        self.most_paused_blocks = max(self.most_paused_blocks, self.core.num_paused_blocks)
        result = self.backend.runner.execute(batch, self._num_steps)
        assert self.core.state_hash == self.backend.runner.state_hash
        return result

    def apply(self, result: StepResult) -> None:
        """Apply one result, and keep what it brings to requests that have not ended."""
        owners = [
            self.core.row_owner(slot, generation)
            for slot, generation in zip(
                result.slot.tolist(), result.generation.tolist(), strict=True
            )
        ]
        self.core.apply(result, 0.0)
        events = self.core.take_events()
        assert not events.failed
        rows = zip(owners, result.token.tolist(), result.margin.tolist(), strict=True)
        live = [row for row in rows if row[0] is not None]
        assert len(events.token) == len(live)
        for owner, token, margin in live:
            self._outputs[owner].tokens.append(token)
            self._outputs[owner].margins.append(margin)
        add_logprobs(self._outputs, events)

    def step_in_depth(self) -> None:
        """Plan and compute as many batches as may be in flight; apply the oldest result."""
        while len(self._in_flight) < self.core.lookahead(1.0):
            batch = self.core.schedule(0.0)
            if batch is None:
                break
            self.batches.append(batch)
            self._in_flight.append(self.compute(batch))
        self.apply(self._in_flight.popleft())

    def run(self, *, in_depth: bool = False) -> dict[int, Output]:
        """Step until no request is left; return the output of each handle."""
        while self.core.has_pending_work():
            if in_depth:
                self.step_in_depth()
            else:
                self.step()
        self.core.check_integrity()
        assert 0 == self.core.stats().used_blocks
        return self._outputs

    def serve(self, request: TruthRequest, *, choice: int = 0) -> Output:
        """Serve one request from its submission to its end; return its output."""
        handle = self.submit(request, choice=choice)
        return self.run()[handle]


def _geometry(config: EngineConfig, backend: Backend) -> ExecutorGeometry:
    return ExecutorGeometry(
        num_blocks=config.max_num_blocks,
        block_size=config.block_size,
        num_slots=backend.num_slots,
        max_batch_size=config.max_batch_size,
        max_total_tokens=config.max_total_tokens,
        max_model_len=config.max_model_len,
    )


def compare(comparison: Comparison, expected: Output, found: Output, what: str) -> None:
    """Check that a choice has the tokens and log probabilities that it has alone."""
    comparison.check(expected.tokens, found.tokens, expected.margins, what)
    assert_same_logprobs(expected.logprobs, found.logprobs, expected.margins)


def served_alone(model_dir: Path) -> Callable[..., Output]:
    """
    Return a function that remembers its results: the output of a request, or one choice of it,
    served alone and sharing nothing.
    """
    served = Served(model_dir, ALONE)

    @cache
    def expected(request: TruthRequest, choice: int = 0) -> Output:
        output = served.serve(request, choice=choice)
        assert set(served.cached) == {0}
        return output

    return expected
