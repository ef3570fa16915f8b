"""Log probabilities are those of the model's own logits, whatever changes what is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import reference, sample
from kernels.sampling.logprobs import reference as logprobs
from tests.kernels.sampling.edit_oracle import RowEdits, edits_of
from tests.kernels.sampling.rows import make_columns, random_logits

each_way = pytest.mark.usefixtures("each_way")

FLOAT32_STEPS = {"rtol": 1e-5, "atol": 1e-5}
"""Rounding of sums in float32."""


def by_numpy(logits: np.ndarray) -> np.ndarray:
    """Log-softmax in float64."""
    wide = logits.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


@each_way
@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0, 4.0]), min_size=3, max_size=9),
    num_top=st.integers(0, 12),
    temperature=st.sampled_from([0.0, 0.5, 2.0]),
)  # fmt: skip
def test_row_tells_its_token_and_the_likeliest(values, num_top, temperature):
    """
    A row that asks gets its token's log probability and those of the likeliest ids, best first and
    the lower id first on ties, in the quick way and in the definition.
    """
    logits = torch.tensor([values])
    columns = make_columns(1, temperature=temperature)
    expected = by_numpy(np.array(values))
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    for way in (sample, reference.sample):
        result = way(logits, columns, num_logprobs=torch.tensor([num_top]))
        told = result.logprobs
        assert order[:num_top] == told.top_token[0].tolist()
        assert [min(num_top, len(values))] == told.num_top.tolist()
        np.testing.assert_allclose(told.top[0].numpy(), expected[order[:num_top]], **FLOAT32_STEPS)
        chosen = expected[int(result.token)]
        np.testing.assert_allclose(told.chosen.numpy(), [chosen], **FLOAT32_STEPS)


@each_way
def test_only_rows_that_ask_are_told():
    """
    Rows are named in order; the widest asks for as many columns as there are.
    """
    logits = torch.arange(20.0).reshape(4, 5)
    result = sample(logits, make_columns(4), num_logprobs=torch.tensor([-1, 2, -1, 0]))
    assert [1, 3] == result.logprobs.row.tolist()
    assert [2, 0] == result.logprobs.num_top.tolist()
    assert (2, 2) == result.logprobs.top.shape


@each_way
def test_nothing_is_told_where_nobody_asks():
    """
    Without a row that asks there are no columns.
    """
    logits = torch.zeros(2, 5)
    assert sample(logits, make_columns(2)).logprobs is None
    assert sample(logits, make_columns(2), num_logprobs=torch.tensor([-1, -1])).logprobs is None


@each_way
@pytest.mark.parametrize("margin_eps", [None, 0.01])
def test_edits_and_temperature_do_not_change_them(margin_eps):
    """
    Penalties, bans and the temperature change which token is drawn and not what the model thinks of
    it.
    """
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    row = RowEdits(prompt=(1,), output=(1,), banned=(0,), frequency=2.0, repetition=1.5)
    result = sample(
        logits,
        make_columns(2, temperature=0.0),
        edits=edits_of({0: row}),
        num_logprobs=torch.tensor([1, 1]),
        margin_eps=margin_eps,
    )
    expected = by_numpy(np.array([3.0, 2.0, 1.0]))
    assert [2, 0] == result.token.tolist()
    np.testing.assert_allclose(result.logprobs.chosen.numpy(), expected[[2, 0]], **FLOAT32_STEPS)
    assert [[0], [0]] == result.logprobs.top_token.tolist()


@each_way
def test_masked_ids_have_no_probability():
    """
    An id that the model rules out has a log probability of -infinity and comes last.
    """
    logits = torch.tensor([[float("-inf"), 1.0, float("-inf"), 0.0]])
    told = sample(logits, make_columns(1), num_logprobs=torch.tensor([4])).logprobs
    assert [1, 3, 0, 2] == told.top_token[0].tolist()
    assert [True, True, False, False] == told.top[0].isfinite().tolist()


@each_way
def test_half_precision_is_widened_first():
    """
    bfloat16 logits, which often tie, are told as their exact float32 values are.
    """
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(2)).bfloat16()
    columns, asked = make_columns(5), torch.full((5,), 20)
    wide = sample(logits.float(), columns, num_logprobs=asked).logprobs
    narrow = sample(logits, columns, num_logprobs=asked).logprobs
    assert torch.equal(wide.top_token, narrow.top_token)
    assert torch.equal(wide.top, narrow.top)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(0, 12), st.integers(1, 5))
def test_ids_without_a_look_at_values_are_the_same(seed, count, spread):
    """
    The way of devices, which never waits to see whether values tie, finds the same ids.
    """
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(6, 12, generator=generator) * spread).round()
    found = logprobs._best_by_key(values, count)
    expected = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(expected, found)
    assert torch.equal(expected, logprobs.best_ids(values, count))


def test_totals_are_the_same_alone_and_among_others_whatever_threads_share():
    """
    Twenty rows over 50,257 ids have the total, bit for bit, that each has alone.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        values = torch.randn(20, 50257, generator=torch.Generator().manual_seed(4))
        alone = [torch.cat(logprobs.totals(row[None])) for row in values]
        assert torch.equal(torch.stack(alone, dim=1), torch.stack(logprobs.totals(values)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("each_way")
class TestRequested:
    def test_requested_ids_have_those_of_the_softmax(self):
        """
        Rows that request ids get their log-softmax, drawn or not, edited or not; how many top ids
        are told stays as asked, and other rows are as before.
        """
        logits = random_logits(4, 3000)
        logits[0, 5] = -torch.inf
        count = torch.tensor([0, 2, -1, 3])
        ids = torch.tensor([[5, 7, 2999], [7, 7, -1], [-1, -1, -1], [-1, -1, -1]])
        columns = make_columns(4)
        edits = edits_of({0: RowEdits(prompt=(1,), allowed=(3, 4)), 1: RowEdits(prompt=(1,))})
        told = sample(logits, columns, edits=edits, num_logprobs=count, logprob_ids=ids).logprobs
        plain = sample(logits, columns, edits=edits, num_logprobs=count).logprobs
        expected = logits.double().log_softmax(dim=1)
        torch.testing.assert_close(told.requested[0].double(), expected[0, ids[0]], **FLOAT32_STEPS)
        torch.testing.assert_close(
            told.requested[1, :2].double(), expected[1, ids[1, :2]], **FLOAT32_STEPS
        )
        assert torch.equal(ids[[0, 1, 3]], told.requested_ids)
        assert torch.equal(plain.num_top, told.num_top)
        assert torch.equal(plain.chosen, told.chosen)
        assert torch.equal(plain.top_token, told.top_token)

    def test_they_are_the_same_alone(self):
        """
        A row's requested log probabilities have the same bits alone and among others.
        """
        logits = random_logits(8, 3000)
        ids = torch.arange(8)[:, None].expand(8, 4)
        count = torch.zeros(8, dtype=torch.int64)
        many = sample(logits, make_columns(8), num_logprobs=count, logprob_ids=ids).logprobs
        for row in range(8):
            one = slice(row, row + 1)
            alone = sample(
                logits[one],
                make_columns(8).select(one),
                num_logprobs=count[one],
                logprob_ids=ids[one],
            ).logprobs
            assert torch.equal(many.requested[one], alone.requested)
