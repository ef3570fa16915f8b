"""KV blocks that are found, forked or copied give the same tokens as KV that is computed anew."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tandem_embedded.backend import Backend
from tandem_embedded.loading.runners import RunnerSettings, load_backends
from tests.model_zoo import FAMILIES
from tests.threads import NUM_THREADS
from tests.truth.equality import Comparison
from tests.truth.requests import GREEDY, NEIGHBOURS, OUTPUT_LEN, SEEDED, TARGETS, TruthRequest

NUM_CHOICES = 4
SHARING = CoreOptions(schedule_conservativeness=0.0)
ALONE = CoreOptions(schedule_conservativeness=0.0, prefix_caching=False)
MODELS = [
    "llama_gqa_llama3_rope",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("mistral_window", "qwen2_window", "qwen3")
    ),
]
"""Models to test: sharing ignores the model, so one suffices; slow tests add windows and Qwen3."""


@dataclass
class Output:
    """Tokens of one choice, and the margin by which each won."""

    tokens: list[int]
    margins: list[float]


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
        self._in_flight: deque[StepResult] = deque()
        self._outputs: dict[int, Output] = defaultdict(lambda: Output([], []))
        self._num_steps = 0
        self._num_submitted = 0

    def submit(self, request: TruthRequest, *, choice: int = 0, num_choices: int = 1) -> int:
        """Queue a request; return the handle of its first choice."""
        handle = self._num_submitted
        self._num_submitted += num_choices
        new = NewRequest(
            request_id=str(handle),
            handle=handle,
            prompt=np.array(request.prompt, np.int32),
            sampling=request.row_sampling(choice),
            max_tokens=OUTPUT_LEN,
            stop_token_ids=frozenset(request.stop_token_ids),
            arrival_s=0.0,
            num_choices=num_choices,
        )
        self.core.submit(new, 0.0)
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
        result = self.backend.runner.execute(batch, self._num_steps)
        assert self.core.state_hash == self.backend.runner.state_hash
        return result

    def apply(self, result: StepResult) -> None:
        """Apply one result, and keep tokens and margins of requests that have not ended."""
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
    comparison.check(expected.tokens, found.tokens, expected.margins, what)


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request, tmp_path_factory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def alone(model_dir):
    """
    Return a function: the output of a request, or one choice of it, served alone and sharing
    nothing.
    """
    served = Served(model_dir, ALONE)

    @cache
    def expected(request: TruthRequest, choice: int = 0) -> Output:
        output = served.serve(request, choice=choice)
        assert set(served.cached) == {0}
        return output

    return expected


class TestSharedPrefixes:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("block_size", "prompt_len"),
        [
            (7, 37),
            (16, 32),
            *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 37), (7, 35), (16, 37))),
        ],
    )
    def test_a_cached_prompt_gives_the_same_tokens(self, model_dir, alone, block_size, prompt_len):
        """
        A prompt that is found whole or in part, its last block copied or not, gives the tokens of
        one that is computed, greedy and seeded.
        """
        comparison = Comparison()
        shared = Served(model_dir, SHARING, block_size=block_size, num_blocks=1024 // block_size)
        for name, target in TARGETS.items():
            request = replace(target, prompt=target.prompt[:prompt_len])
            expected = alone(request)
            for time in ("first", "again"):
                compare(comparison, expected, shared.serve(request), f"{name} {time}")
        whole = prompt_len // block_size * block_size
        found = min(whole, prompt_len - 1)
        assert [0, found, found, found] == shared.cached
        assert (3 if whole == prompt_len and block_size > 1 else 0) == shared.num_copies
        comparison.assert_not_vacuous()

    @pytest.mark.slow
    def test_a_conversation_goes_on_from_what_was_generated(self, model_dir, alone):
        """
        A second turn that finds the first one's prompt and answer gives the tokens of one that
        computes both.
        """
        comparison = Comparison()
        shared = Served(model_dir, SHARING)
        for name, target in TARGETS.items():
            answer = shared.serve(target).tokens
            prompt = (*target.prompt, *answer, *NEIGHBOURS[4].prompt)
            following = replace(target, prompt=prompt)
            compare(comparison, alone(following), shared.serve(following), name)
            assert shared.cached[-1] >= len(target.prompt) + len(answer) - 16
        comparison.assert_not_vacuous()

    @pytest.mark.slow
    def test_sharing_while_memory_runs_out_changes_no_token(self, model_dir, alone):
        """
        Requests with common prefixes that preempt each other and evict the cache get the tokens
        that they get alone.
        """
        comparison = Comparison()
        shared = Served(model_dir, SHARING, block_size=7, num_blocks=48)
        requests = [
            replace(target, prompt=target.prompt[:cut] + neighbour.prompt[:9])
            for (cut, target), neighbour in zip(
                itertools.product((35, 21, 14), TARGETS.values()), NEIGHBOURS[2:], strict=True
            )
        ]
        handles = [shared.submit(request) for request in requests]
        found = shared.run()
        for handle, request in zip(handles, requests, strict=True):
            compare(comparison, alone(request), found[handle], f"{handle}")
        stats = shared.core.stats()
        assert stats.preemptions > 0
        assert stats.prefix_cache_hit_tokens > 0
        comparison.assert_not_vacuous()


class TestForks:
    @pytest.mark.slow
    @pytest.mark.parametrize("options", [SHARING, ALONE], ids=["caching", "no-caching"])
    @pytest.mark.parametrize(
        ("block_size", "prompt_len"),
        [
            (7, 37),
            pytest.param(16, 32, marks=pytest.mark.slow),
            pytest.param(16, 33, marks=pytest.mark.slow),
        ],
    )
    def test_every_choice_gives_the_tokens_it_gives_alone(
        self, model_dir, alone, options, block_size, prompt_len
    ):
        """
        Choices that fork one prompt sample the tokens that each samples alone, whatever block the
        prompt ends in.
        """
        comparison = Comparison()
        forked = Served(model_dir, options, block_size=block_size)
        request = replace(SEEDED, prompt=SEEDED.prompt[:prompt_len])
        first = forked.submit(request, num_choices=NUM_CHOICES)
        found = forked.run()
        for choice in range(NUM_CHOICES):
            expected = alone(request, choice)
            compare(comparison, expected, found[first + choice], f"choice {choice}")
        assert [0, *[prompt_len - 1] * (NUM_CHOICES - 1)] == forked.cached
        assert len({tuple(found[first + choice].tokens) for choice in range(NUM_CHOICES)}) > 1
        comparison.assert_not_vacuous()

    def test_preempted_choices_and_neighbours_change_no_token(self, model_dir, alone):
        """
        Choices that lose their slots, among requests that share nothing with them, sample the
        tokens that each samples alone.
        """
        comparison = Comparison()
        forked = Served(model_dir, SHARING, block_size=7)
        first = forked.submit(SEEDED, num_choices=NUM_CHOICES)
        forked.submit(GREEDY)
        for neighbour in NEIGHBOURS[:2]:
            forked.submit(neighbour)
        for _ in range(20):
            forked.step()
        forked.core.preempt(str(first))
        found = forked.run()
        for choice in range(NUM_CHOICES):
            expected = alone(SEEDED, choice)
            compare(comparison, expected, found[first + choice], f"choice {choice}")
        comparison.assert_not_vacuous()
