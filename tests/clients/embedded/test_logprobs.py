"""Log probabilities of an embedded engine, told with the tokens of requests that ask for them."""

from __future__ import annotations

import pytest

from tandem.engine_config import EngineConfig
from tandem_embedded import CoreOptions, EngineError, GenerationParams
from tests.clients.embedded.fake_backend import engine_and_runner
from tests.scheduler_svc.core.fake_executor import made_up_logprobs, made_up_score

TIGHT = EngineConfig(
    block_size=4, max_num_blocks=12, max_batch_size=4, max_model_len=32, max_total_tokens=32,
    memory_threshold=1.0,
)  # fmt: skip


@pytest.mark.parametrize("window", [1, 2, 4])
def test_each_token_has_its_own(window):
    """
    Requests that ask get one entry per token, also when preempted; the others get none.
    """
    engine, _ = engine_and_runner(
        TIGHT, window=window, options=CoreOptions(schedule_conservativeness=0.0)
    )
    asked = [0, None, 3]
    for num_top in asked:
        engine.submit_request([7] * 8, GenerationParams(max_tokens=20, logprobs=num_top))
    completed = sorted(engine.run(), key=lambda request: request.request_id)
    assert sum(request.num_preemptions for request in completed) > 0
    for num_top, request in zip(asked, completed, strict=True):
        expected = [
            made_up_logprobs(8 + offset, token, num_top)
            for offset, token in enumerate(request.output_tokens)
            if num_top is not None
        ]
        found = [
            (one.logprob, list(zip(one.top_token_ids, one.top_logprobs, strict=True)))
            for one in request.logprobs
        ]
        assert expected == found


def test_a_failed_step_tells_no_token_twice():
    """
    Tokens computed again after a failed step are told once.
    """
    engine, runner = engine_and_runner()
    engine.submit_request([5, 6, 7], GenerationParams(max_tokens=6, logprobs=1))
    for _ in range(3):
        engine.step()
    runner.fail_next.append(RuntimeError("once"))
    (request,) = engine.run()
    assert request.success
    assert len(request.output_tokens) == len(request.logprobs) == 6


@pytest.mark.parametrize("window", [1, 2, 4])
def test_each_prompt_token_has_its_score(window):
    """
    Requests that ask get the score of each token of their prompt but the first, once, also when
    they are preempted; with max_tokens 0 they produce nothing else.
    """
    engine, _ = engine_and_runner(
        TIGHT, window=window, options=CoreOptions(schedule_conservativeness=0.0)
    )
    prompt = [7, 9, 8, 7, 5, 6, 7, 8]
    asked = [(0, 20), (2, 20), (None, 20), (1, 0)]
    for num_top, max_tokens in asked:
        params = GenerationParams(max_tokens=max_tokens, prompt_logprobs=num_top)
        engine.submit_request(prompt, params)
    completed = sorted(engine.run(), key=lambda request: request.request_id)
    assert sum(request.num_preemptions for request in completed) > 0
    for (num_top, max_tokens), request in zip(asked, completed, strict=True):
        expected = [
            made_up_score(position, token, num_top)
            for position, token in enumerate(prompt)
            if position and num_top is not None
        ]
        found = [
            (one.rank, one.logprob, list(zip(one.top_token_ids, one.top_logprobs, strict=True)))
            for one in request.prompt_logprobs
        ]
        assert expected == found
        assert max_tokens == len(request.output_tokens)


def test_prompts_are_not_scored_where_only_last_logits_are():
    """
    An engine that materializes the logits of last tokens only refuses to score a prompt.
    """
    options = CoreOptions(materialize_only_last_token_logits=True)
    engine, _ = engine_and_runner(options=options)
    with pytest.raises(EngineError, match="Prompt log probs cannot be calculated"):
        engine.submit_request([5, 6], GenerationParams(max_tokens=1, prompt_logprobs=0))
