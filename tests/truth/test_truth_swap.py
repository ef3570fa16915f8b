"""
Preemption by swapping on a real model: the tokens are those of a run that was never short of
memory.
"""

from __future__ import annotations

from collections import Counter

import pytest

from executor_svc.memory.host_blocks import HostBlocks
from tandem.engine_config import EngineConfig
from tandem_embedded import CoreOptions, GenerationParams, InferenceEngine, PreemptionMode
from tests.model_zoo import llama_gqa_llama3_rope
from tests.threads import NUM_THREADS
from tests.truth.equality import Comparison

PROMPTS = [f"The quick brown fox {number} jumps over" for number in range(4)]
BLOCK_BYTES = 2 * 8 * 2 * 16 * 2 * 4
"""
Bytes of one block: layers x tokens x KV heads x head size x (keys, values) x bytes per number.
"""

SEEDED = GenerationParams(max_tokens=64, temperature=0.8, top_k=40, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return llama_gqa_llama3_rope(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def moved(monkeypatch):
    """Return the number of blocks moved by each kind of transfer."""
    counts: Counter[str] = Counter()
    for name in ("write", "read"):
        method = getattr(HostBlocks, name)

        def counted(self, first, second, name=name, method=method):
            counts[name] += len(first)
            method(self, first, second)

        monkeypatch.setattr(HostBlocks, name, counted)
    return counts


def serve(model_dir, *, num_blocks: int, swap_space_gb: float = 0.0, window: int = 1, **options):
    engine = InferenceEngine(
        EngineConfig(
            block_size=8,
            max_num_blocks=num_blocks,
            max_batch_size=8,
            max_model_len=128,
            max_total_tokens=64,
            memory_threshold=1.0,
        ),
        model_dir,
        dtype="float32",
        num_threads=NUM_THREADS,
        collect_margins=True,
        window=window,
        swap_space_gb=swap_space_gb,
        # No request waits for blocks that others may need later, so that memory runs short.
        options=CoreOptions(schedule_conservativeness=0.0, **options),
    )
    for prompt in PROMPTS:
        engine.submit_request(prompt, SEEDED)
    return engine, sorted(engine.run(), key=lambda request: request.request_id)


@pytest.fixture(scope="module")
def unlimited(model_dir):
    return serve(model_dir, num_blocks=128)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_host_blocks", "how"),
    [
        (64, {"window": 1, "prefix_caching": False}),
        (64, {"window": 3, "prefix_caching": True}),
        (8, {"window": 3, "prefix_caching": False}),
        (8, {"window": 1, "prefix_caching": True}),
    ],
    ids=["all-swap", "all-swap-ahead-with-prefix-cache", "some-swap-ahead", "some-swap-with-cache"],
)
def test_swapped_requests_get_their_tokens(model_dir, unlimited, moved, num_host_blocks, how):
    """
    Requests that are swapped out and in, some recomputed for lack of host blocks, get the tokens of
    a run without preemption, and every block is free in the end.
    """
    engine, completed = serve(
        model_dir,
        num_blocks=20,
        swap_space_gb=num_host_blocks * BLOCK_BYTES / 2**30,
        preemption_mode=PreemptionMode.SWAP,
        **how,
    )
    comparison = Comparison()
    for expected, found in zip(unlimited, completed, strict=True):
        comparison.check(expected.output_tokens, found.output_tokens, expected.margins, "swap")
    comparison.assert_not_vacuous()
    assert engine.get_metrics().preemptions > 0
    assert moved["write"] > 0
    if num_host_blocks == 64 and not how["prefix_caching"]:
        assert moved["write"] == moved["read"]
    assert 0 == engine.get_memory_stats().used_blocks
