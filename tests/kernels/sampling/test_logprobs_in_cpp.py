"""Log probabilities told in C++ are those of the definition, and a row's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.sampling import cpu_extension, reference
from kernels.sampling.logprobs import reference as logprobs
from tests.kernels.sampling.rows import make_columns

pytestmark = pytest.mark.compiler

TYPES = (torch.float32, torch.bfloat16, torch.float16)
NEVER = float("-inf")
FLOAT32_STEPS = {"rtol": 1e-6, "atol": 2e-6}
"""A few roundings of numbers up to 16."""


def told(logits, asked, threads=1):
    """
    Return log probabilities from C++ for rows that ask for so many ids, on so many threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        columns = make_columns(len(logits), temperature=0.8)
        return cpu_extension.sample(logits, columns, num_logprobs=torch.tensor(asked)).logprobs
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("vocab_size", "top"), [(33, 33), (5001, 20), (5001, 700)])
def test_long_rows_are_told_as_defined(dtype, vocab_size, top):
    """
    The likeliest ids of a row of any length, in types with many ties, are those of a whole sort,
    and all values are its log-softmax.
    """
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(2)) * 3
    logits = logits.to(dtype)
    asked = [0, -1, 5, top, 1, top]
    found = told(logits, asked)
    token = cpu_extension.sample(logits, make_columns(6, temperature=0.8)).token
    expected = reference.logprobs(logits.float(), token, torch.tensor(asked))
    assert expected.row.tolist() == found.row.tolist()
    assert torch.equal(expected.num_top, found.num_top)
    assert torch.equal(expected.top_token, found.top_token)
    np.testing.assert_allclose(found.top.numpy(), expected.top.numpy(), **FLOAT32_STEPS)
    np.testing.assert_allclose(found.chosen.numpy(), expected.chosen.numpy(), **FLOAT32_STEPS)


def test_row_is_told_the_same_alone_and_on_any_number_of_threads():
    """
    Every bit of a row's log probabilities depends on the row alone.
    """
    logits = torch.randn(20, 5003, generator=torch.Generator().manual_seed(4))
    together = told(logits, [9] * 20, threads=3)
    for row in range(20):
        alone = told(logits[row : row + 1], [9])
        assert torch.equal(together.top[row], alone.top[0])
        assert torch.equal(together.top_token[row], alone.top_token[0])


def test_ids_that_are_ruled_out_come_last():
    """
    Ids that the row cannot draw follow in order, with -infinity, when more are asked for.
    """
    logits = torch.full((1, 300), float("-inf"))
    logits[0, [290, 7]] = torch.tensor([2.0, 1.0])
    found = told(logits, [6])
    assert [290, 7, 0, 1, 2, 3] == found.top_token[0].tolist()
    assert [True] * 2 + [False] * 4 == found.top[0].isfinite().tolist()


def test_distance_past_float32_is_no_probability():
    """
    An id so far below the best that float32 does not hold by how much has log probability -infinity, and the best its own.
    """
    logits = torch.tensor([[-3e38, 3e38, -3e38, 3e38]])
    found = told(logits, [4])
    expected = reference.logprobs(logits, torch.tensor([1]), torch.tensor([4]))
    assert [1, 3, 0, 2] == found.top_token[0].tolist()
    assert [NEVER] * 2 == found.top[0, 2:].tolist()
    np.testing.assert_allclose(found.top[0, :2], expected.top[0, :2], **FLOAT32_STEPS)
    np.testing.assert_allclose(found.chosen, expected.chosen, **FLOAT32_STEPS)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_row_that_is_not_valid_has_no_probabilities(poison):
    """
    A poisoned row is told NaN, and the others are told what they would be without it.
    """
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    clean = told(logits, [4, 4, 4])
    logits[1, 5] = poison
    found = told(logits, [4, 4, 4])
    assert found.top[1].isnan().all()
    assert found.chosen[1].isnan()
    assert torch.equal(clean.top[[0, 2]], found.top[[0, 2]])


def test_totals_are_those_of_pytorch():
    """
    C++ and PyTorch's quick way tell the same up to rounding.
    """
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(6)) * 8
    token, asked = torch.tensor([0, 1, 2, 3]), torch.full((4,), 30)
    quick, found = (
        tell(logits, token, asked) for tell in (logprobs.logprobs, cpu_extension.logprobs)
    )
    np.testing.assert_allclose(found.top.numpy(), quick.top.numpy(), **FLOAT32_STEPS)
    np.testing.assert_allclose(found.chosen.numpy(), quick.chosen.numpy(), **FLOAT32_STEPS)
