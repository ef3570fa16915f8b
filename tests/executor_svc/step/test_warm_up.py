"""Steps that a runner computes before its first request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.step.warm_up import warm_up_batches
from kernels.paged_attention.triton_prefill_tiles import SHORT_ROWS
from tests.executor_svc.stepping import Bench


@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiles"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 40])
def test_steps_of_a_warm_up_fit_any_room(
    zoo: Callable[[str], Path], max_tokens: int, *, compiles: bool
):
    """
    Every step of the warm-up runs and samples without an error, however few tokens and rows there
    is room for.
    """
    bench = Bench.build(
        zoo("llama_mha"), num_blocks=20, block_size=2, num_slots=3, max_model_len=max_tokens
    )
    batches = warm_up_batches(max_tokens, 2, 3, compiles=compiles)
    results = [bench.runner.execute(each, 0) for each in batches]
    assert [()] * len(batches) == [result.row_errors for result in results]
    sampled = [len(result.token) for result in results]
    one = [1] if max_tokens == 1 else [1, 1]
    assert ([*one, 0, *one, 0, 3, 0] if compiles else one) == sampled


def test_short_prompts_edits_and_log_probabilities_are_among_them_where_kernels_compile():
    """
    The warm-up, where kernels are compiled at their first use, has what they differ by: a short
    prompt beside one that is long for any number of heads per key head, edited logits beside plain
    ones, cuts of both, and log probabilities.
    """
    admits = [each for step in warm_up_batches(100, 16, 1, compiles=True) for each in step.admits]
    long, short, *_ = admits
    assert len(long.token_ids) > SHORT_ROWS
    assert 2 == len(short.token_ids)
    assert not long.sampling.has_penalties
    assert long.sampling.logprobs is None
    assert short.sampling.has_penalties
    assert short.sampling.logit_bias
    assert short.sampling.logprobs is not None
    assert all(0 < each.sampling.top_k and each.sampling.top_p < 1 for each in admits)


@pytest.mark.parametrize(("max_rows", "expected"), [(1, [1]), (40, [17, 40]), (300, [17, 65, 300])])
def test_steps_of_many_rows_are_among_them_where_kernels_compile(
    max_rows: int, expected: list[int]
):
    """
    There is a step for each number of rows from which on tokens are drawn by other kernels, and one of the most rows.
    """
    batches = warm_up_batches(100, 16, max_rows, compiles=True)
    assert expected == [len(step.admits) for step in batches[6:] if step.admits]


@pytest.mark.parametrize(
    ("max_tokens", "num_blocks", "expected"),
    [
        (1, 1, [1]),
        (1, 20, [1, 1, 1]),
        (3, 3, [3, 2]),
        (3, 20, [3, 3, 3]),
        (7, 3, [6]),
        (7, 20, [7, 5]),
    ],
)
def test_step_of_several_prompts_fits_any_room(
    zoo: Callable[[str], Path], max_tokens: int, num_blocks: int, expected: list[int]
):
    """
    A warm-up that is to have a step of more tokens than a sequence may have makes it of several
    prompts, as many as there are slots and blocks for, and each samples.
    """
    bench = Bench.build(
        zoo("llama_mha"), num_blocks=num_blocks, block_size=2, num_slots=3, max_model_len=max_tokens
    )
    room = min(max_tokens, 2 * num_blocks), 2, min(3, num_blocks)
    batches = warm_up_batches(*room, compiles=True, step_tokens=12, num_blocks=num_blocks)
    results = [bench.runner.execute(each, 0) for each in batches]
    assert [()] * len(batches) == [result.row_errors for result in results]
    assert expected == batches[-2].row_num_tokens.tolist()
    assert len(expected) == len(results[-2].token)
