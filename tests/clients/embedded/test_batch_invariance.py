"""The embedded engine with batch_invariant: a request's tokens, exactly."""

from __future__ import annotations

import pytest

from tandem.engine_config import EngineConfig
from tandem_embedded import CoreOptions, GenerationParams, InferenceEngine
from tests.model_zoo import llama_gqa_llama3_rope

PROMPT = "The quick brown fox jumps over the lazy dog, and then it rests a while."
SAMPLED = GenerationParams(max_tokens=64, temperature=1.2, top_p=0.95, seed=7, ignore_eos=True)
GREEDY = GenerationParams(max_tokens=64, temperature=0.0, ignore_eos=True)
NUM_OTHERS = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return llama_gqa_llama3_rope(tmp_path_factory.mktemp("models") / "llama")


def build(model_dir, dtype: str, **changes: int) -> InferenceEngine:
    limits = {
        "block_size": 8, "max_num_blocks": 256, "max_batch_size": 10, "max_model_len": 256,
        "max_total_tokens": 32, "memory_threshold": 1.0,
    }  # fmt: skip
    return InferenceEngine(
        EngineConfig(**(limits | changes)),
        model_dir,
        dtype=dtype,
        num_threads=1,
        batch_invariant=True,
        # No request is kept waiting for what others may need, so that short memory shows.
        options=CoreOptions(schedule_conservativeness=0.0),
    )


def tokens_among_others(engine: InferenceEngine, params: GenerationParams) -> list[int]:
    """Return the tokens of the request, which arrives when four of eight others are under way."""
    for other in range(NUM_OTHERS // 2):
        engine.submit_request("x" * (5 + 17 * other), GREEDY)
    for _ in range(9):
        engine.step()
    wanted = engine.submit_request(PROMPT, params)
    for other in range(NUM_OTHERS // 2, NUM_OTHERS):
        engine.submit_request("y" * (3 + 11 * other), SAMPLED)
    return next(one.output_tokens for one in engine.run() if one.request_id == wanted)


@pytest.mark.parametrize(
    ("dtype", "params"),
    [
        pytest.param("float32", SAMPLED, id="fp32-sampled"),
        pytest.param("float32", GREEDY, id="fp32-greedy", marks=pytest.mark.slow),
        pytest.param("bfloat16", SAMPLED, id="bf16-sampled", marks=pytest.mark.slow),
    ],
)
class TestTokens:
    def test_alone_and_among_others_they_are_the_same(self, model_dir, dtype, params):
        """
        All 64 tokens of a request are those it gets alone, wherever its prompt is cut and whatever
        decodes beside it.
        """
        engine = build(model_dir, dtype, max_total_tokens=128)
        engine.submit_request(PROMPT, params)
        expected = engine.run()[0].output_tokens
        assert 64 == len(expected)
        assert expected == tokens_among_others(build(model_dir, dtype), params)

    def test_preempted_and_computed_again_they_are_the_same(self, model_dir, dtype, params):
        """
        A request that is preempted and recomputed with its outputs in the prompt goes on with the
        same tokens.
        """
        engine = build(model_dir, dtype)
        engine.submit_request(PROMPT, params)
        expected = engine.run()[0].output_tokens
        again = engine.submit_request(PROMPT, params)
        while len(engine.output_tokens(again)) < 30:
            engine.step()
        engine.preempt(again)
        assert expected == engine.run()[0].output_tokens
        assert 1 == engine.get_metrics().preemptions

    @pytest.mark.slow
    def test_short_memory_changes_nothing(self, model_dir, dtype, params):
        """
        Tokens of requests that push each other out of memory are those of a request alone.
        """
        engine = build(model_dir, dtype)
        engine.submit_request(PROMPT, params)
        expected = engine.run()[0].output_tokens
        tight = build(model_dir, dtype, max_num_blocks=60)
        assert expected == tokens_among_others(tight, params)
        assert tight.get_metrics().preemptions > 0
