"""What a runner computes before its first request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.warm_up import warm_up_batches
from tests.executor_svc.stepping import Bench


@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiles"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 40])
def test_steps_of_a_warm_up_fit_any_room(
    zoo: Callable[[str], Path], max_tokens: int, *, compiles: bool
):
    """
    However few tokens there is room for, every step of the warm-up runs and samples without an error.
    """
    bench = Bench.build(zoo("llama_mha"), num_blocks=20, block_size=2, max_model_len=max_tokens)
    batches = warm_up_batches(max_tokens, 2, compiles=compiles)
    results = [bench.runner.execute(each, 0) for each in batches]
    assert [()] * len(batches) == [result.row_errors for result in results]
    sampled = [len(result.token) for result in results]
    one = [1] if max_tokens == 1 else [1, 1]
    assert ([*one, 0, *one] if compiles else one) == sampled


def test_short_prompts_edits_and_log_probabilities_are_among_them_where_kernels_compile():
    """
    Where kernels are compiled at their first use, the warm-up has what they differ by: a short prompt beside a longer one,
    edited logits beside plain ones, and log probabilities.
    """
    admits = [each for step in warm_up_batches(100, 16, compiles=True) for each in step.admits]
    long, short = admits
    assert [32, 2] == [len(long.token_ids), len(short.token_ids)]
    assert not long.sampling.has_penalties
    assert long.sampling.logprobs is None
    assert short.sampling.has_penalties
    assert short.sampling.logit_bias
    assert short.sampling.logprobs is not None
