"""
The same tokens through client, scheduler process and executor process as from the embedded engine.

24 launches cover every pair of family, block size, chunking and memory pressure, with 1, 2 or 4
steps in flight; each serves the targets alone and everything together.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tandem.link.logprobs import TokenLogprob
from tandem_client import Choice, Client, Delta, GenerateOptions, Started
from tandem_embedded import CompletedRequest
from tests.e2e.cluster import Cluster
from tests.model_zoo import FAMILIES
from tests.truth.equality import Comparison, assert_same_logprobs
from tests.truth.requests import NEIGHBOURS, OUTPUT_LEN, PENALISED, TARGETS, TruthRequest
from tests.truth.served import ALONE, Served
from tests.truth.test_truth_embedded import (
    BLOCK_SIZES,
    CHUNK_TOKENS,
    PREEMPT_AFTER,
    build_engine,
    serve,
)
from tests.waiting import wait_until

FAMILY_NAMES = (
    "llama_mha",
    "llama_gqa_llama3_rope",
    "llama_linear_rope",
    "mistral_window",
    "qwen2",
    "qwen3",
)
ALL_TARGETS = (*TARGETS.values(), *PENALISED.values())
TOGETHER = (*NEIGHBOURS, *ALL_TARGETS)
PLENTY_TOKENS = 2048
TIGHT_TOKENS = 448
"""Number of tokens of a KV cache in which each request fits, but not all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings of one pair of processes."""

    family: str
    block_size: int
    chunked: bool
    tight: bool
    window: int

    def __str__(self) -> str:
        cut = "chunked" if self.chunked else "whole"
        room = "tight" if self.tight else "roomy"
        return f"{self.family}-block{self.block_size}-{cut}-{room}-window{self.window}"


LAUNCHES = [
    Launch(
        family=family,
        block_size=block_size,
        chunked=(row + column) % 2 == 1,
        tight=(row + column // 2) % 2 == 1,
        window=(1, 2, 4)[(row + column) % 3],
    )
    for row, family in enumerate(FAMILY_NAMES)
    for column, block_size in enumerate(BLOCK_SIZES)
]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """
    Return a function: the model directory of a family, and every request served alone and embedded.
    """
    known = {}

    def of(family):
        if family not in known:
            model_dir = FAMILIES[family](tmp_path_factory.mktemp("models") / family)
            engine = build_engine(model_dir, 16, chunked=False)
            known[family] = model_dir, {request: serve(engine, request) for request in TOGETHER}
        return known[family]

    return of


def start(launch: Launch, model_dir, folder) -> Cluster:
    kv_tokens = TIGHT_TOKENS if launch.tight else PLENTY_TOKENS
    limits = [
        f"--block-size={launch.block_size}",
        f"--max-num-blocks={kv_tokens // launch.block_size}",
        "--max-model-len=256",
        "--max-batch-size=10",
        f"--max-total-tokens={CHUNK_TOKENS if launch.chunked else PLENTY_TOKENS}",
    ]
    # In little memory a request that fits now is admitted, or none would be preempted.
    options = [
        "--memory-threshold=1.0",
        f"--window={launch.window}",
        *(["--run-ahead=1"] * (launch.window == 1)),
        *(["--schedule-conservativeness=0"] * launch.tight),
    ]
    cluster = Cluster(model_dir, folder, limits, options)
    cluster.start_executor()
    return cluster


def options_of(request: TruthRequest) -> GenerateOptions:
    """Return the same request for a client."""
    return GenerateOptions(
        token_ids=list(request.prompt),
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        ignore_eos=True,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        min_p=request.min_p,
        min_tokens=request.min_tokens,
        stop_token_ids=list(request.stop_token_ids),
        logit_bias=dict(request.logit_bias),
        logprobs=request.logprobs,
    )


def ask(client: Client, request: TruthRequest) -> Choice:
    """Return one completion of the request."""
    return client.complete(**options_of(request)).choices[0]


def check(expected: CompletedRequest, found: Choice, comparison: Comparison, what: str) -> None:
    """Check that tokens are equal, and the log probabilities of each where they were asked for."""
    comparison.check(expected.output_tokens, found.token_ids, expected.margins, what)
    told = [
        TokenLogprob(one.logprob, [token for token, _ in one.top], [value for _, value in one.top])
        for one in found.logprobs
    ]
    assert len(told) == (len(found.token_ids) if expected.logprobs else 0)
    assert_same_logprobs(expected.logprobs, told, expected.margins)


@pytest.mark.slow
class TestEveryLaunch:
    def test_launches_cover_every_pair(self):
        """
        Any two settings of any two of family, block size, chunking and memory meet in some launch.
        """
        rows = [(at.family, at.block_size, at.chunked, at.tight) for at in LAUNCHES]
        sizes = [len({row[dimension] for row in rows}) for dimension in range(4)]
        for first in range(4):
            for second in range(first):
                pairs = {(row[first], row[second]) for row in rows}
                assert sizes[first] * sizes[second] == len(pairs), (first, second)
        assert 24 >= len(rows)

    @pytest.mark.parametrize("launch", LAUNCHES, ids=str)
    def test_tokens_through_processes_are_those_of_the_embedded_engine(
        self, launch, references, tmp_path
    ):
        """
        Clients get the embedded engine's tokens alone and together, with much or little memory.
        """
        model_dir, reference = references(launch.family)
        comparison = Comparison()
        cluster = start(launch, model_dir, tmp_path)
        try:
            with cluster.client() as client, ThreadPoolExecutor(len(TOGETHER)) as pool:
                served = [(request, ask(client, request)) for request in ALL_TARGETS]
                with cluster.held():
                    together = pool.map(lambda request: ask(client, request), TOGETHER)
                    wait_until(lambda: cluster.num_requests() == len(TOGETHER), "all at once")
                served += zip(TOGETHER, together, strict=True)
            with cluster.admin() as admin:
                wait_until(lambda: admin.stats().used_blocks == 0, "no block in use")
                preemptions = admin.stats().preemptions
        finally:
            cluster.close()
        for request, found in served:
            check(reference[request], found, comparison, str(request))
        comparison.assert_not_vacuous()
        assert launch.tight == (preemptions > 0)


@pytest.mark.slow
@pytest.mark.parametrize("window", [2, 4])
class TestPenaltiesThroughALoss:
    def test_killed_executor_changes_no_token(self, window, references, tmp_path):
        """
        Requests with penalties, bans, several choices and log probabilities that lose their
        executor get the tokens and log probabilities of an undisturbed run, each once.
        """
        family = "llama_gqa_llama3_rope"
        model_dir, reference = references(family)
        launch = Launch(family=family, block_size=7, chunked=True, tight=False, window=window)
        alone, forked = Served(model_dir, ALONE), PENALISED["seeded"]
        choices = [alone.serve(forked, choice=choice) for choice in range(3)]
        cluster = start(launch, model_dir, tmp_path)
        comparison = Comparison()
        try:
            with cluster.client() as client, ThreadPoolExecutor(len(TOGETHER) + 1) as pool:
                with cluster.held():
                    several = pool.submit(client.complete, **options_of(forked), n=3)
                    others = [(request, pool.submit(ask, client, request)) for request in TOGETHER]
                    num_sequences = len(TOGETHER) + 3
                    wait_until(lambda: cluster.num_requests() == num_sequences, "all at once")
                    asked = options_of(PENALISED["greedy"])
                    stream = client.generate(**asked, request_id="streamed", priority=-1)
                    assert isinstance(next(stream), Started)
                    cluster.step_until(
                        lambda: cluster.requests()["streamed"].output_tokens >= PREEMPT_AFTER,
                        "a stream in the middle of its output",
                    )
                    assert cluster.executor is not None
                    cluster.executor.kill()
                cluster.start_executor()
                for request, found in others:
                    check(reference[request], found.result(), comparison, str(request))
                for expected, one in zip(choices, several.result().choices, strict=True):
                    what = f"choice {one.choice}"
                    comparison.check(expected.tokens, one.token_ids, expected.margins, what)
                    assert len(one.token_ids) == len(one.logprobs)
                num_tokens = 0
                for event in stream:
                    if isinstance(event, Delta):
                        assert num_tokens == event.first_token_offset
                        assert len(event.token_ids) == len(event.logprobs)
                        num_tokens += len(event.token_ids)
        finally:
            cluster.close()
        assert OUTPUT_LEN == num_tokens
        comparison.assert_not_vacuous()
