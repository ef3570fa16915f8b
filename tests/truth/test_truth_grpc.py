"""
The same tokens through client, scheduler process and executor process as from the embedded engine.

24 launches cover every pair of family, block size, chunking and memory pressure; each serves the
targets alone and everything together.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tandem_client import Client
from tests.e2e.cluster import Cluster, wait_until
from tests.model_zoo import FAMILIES
from tests.truth.equality import Comparison
from tests.truth.requests import NEIGHBOURS, OUTPUT_LEN, TARGETS, TruthRequest
from tests.truth.test_truth_embedded import BLOCK_SIZES, CHUNK_TOKENS, build_engine, serve

FAMILY_NAMES = (
    "llama_mha",
    "llama_gqa_llama3_rope",
    "llama_linear_rope",
    "mistral_window",
    "qwen2",
    "qwen3",
)
TOGETHER = (*NEIGHBOURS, *TARGETS.values())
PLENTY_TOKENS = 2048
TIGHT_TOKENS = 448
"""KV room in which each request fits and all of them do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One pair of processes."""

    family: str
    block_size: int
    chunked: bool
    tight: bool

    def __str__(self) -> str:
        cut = "chunked" if self.chunked else "whole"
        return f"{self.family}-block{self.block_size}-{cut}-{'tight' if self.tight else 'roomy'}"


LAUNCHES = [
    Launch(
        family=family,
        block_size=block_size,
        chunked=(row + column) % 2 == 1,
        tight=(row + column // 2) % 2 == 1,
    )
    for row, family in enumerate(FAMILY_NAMES)
    for column, block_size in enumerate(BLOCK_SIZES)
]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Gives a function: model directory and every request of a family served alone, embedded."""
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
    # In little memory whoever fits now is admitted, or nobody would be preempted.
    options = ["--memory-threshold=1.0", *(["--schedule-conservativeness=0"] * launch.tight)]
    cluster = Cluster(model_dir, folder, limits, options)
    cluster.start_executor()
    return cluster


def tokens_of(client: Client, request: TruthRequest) -> list[int]:
    completion = client.complete(
        token_ids=list(request.prompt),
        max_tokens=OUTPUT_LEN,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        ignore_eos=True,
    )
    return list(completion.token_ids)


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
        Alone and together, in much or little memory, clients get the embedded engine's tokens.
        """
        model_dir, reference = references(launch.family)
        comparison = Comparison()
        cluster = start(launch, model_dir, tmp_path)
        try:
            with cluster.client() as client, ThreadPoolExecutor(len(TOGETHER)) as pool:
                served = [(request, tokens_of(client, request)) for request in TARGETS.values()]
                together = pool.map(lambda request: tokens_of(client, request), TOGETHER)
                served += zip(TOGETHER, together, strict=True)
            with cluster.admin() as admin:
                wait_until(lambda: admin.stats().used_blocks == 0, "no block in use")
                preemptions = admin.stats().preemptions
        finally:
            cluster.close()
        for request, found in served:
            expected = reference[request]
            comparison.check(expected.output_tokens, found, expected.margins, str(request))
        comparison.assert_not_vacuous()
        assert launch.tight == (preemptions > 0)
