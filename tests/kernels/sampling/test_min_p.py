"""
min_p keeps ids that are likely enough beside the best, after the temperature and before the other
cuts.
"""

from __future__ import annotations

import pytest
import torch

from kernels.sampling import filters, reference, sample
from tests.kernels.sampling.rows import make_columns

pytestmark = pytest.mark.usefixtures("each_way")


def kept_ids(probabilities, *, min_p, top_k=0, top_p=1.0, temperature=1.0):
    """Ids that the definition and the quick way keep, which must agree."""
    logits = torch.tensor([probabilities]).log()
    columns = make_columns(1, min_p=min_p, top_k=top_k, top_p=top_p)
    scaled = reference.scale(logits, torch.tensor([temperature]))
    cuts = columns.top_k, columns.top_p, columns.min_p
    defined = reference.keep(scaled, *cuts).mask[0].nonzero()[:, 0].tolist()
    filters.cut(scaled, *cuts)
    assert defined == scaled[0].isfinite().nonzero()[:, 0].tolist()
    return defined


@pytest.mark.parametrize(
    ("min_p", "expected"),
    [(0.0, [0, 1, 2, 3]), (0.15, [0, 1, 2]), (0.3, [0, 1]), (0.9, [0]), (1.0, [0])],
)
def test_ids_as_likely_as_asked_stay(min_p, expected):
    """
    An id stays if it is at least min_p times as likely as the best one; 0 keeps all, 1 the best.
    """
    assert expected == kept_ids([0.5, 0.3, 0.14, 0.06], min_p=min_p)


def test_all_that_tie_with_the_best_stay():
    """
    min_p = 1 keeps every id that is as likely as the best.
    """
    assert [1, 3] == kept_ids([0.1, 0.4, 0.1, 0.4], min_p=1.0)


def test_temperature_comes_first():
    """
    A temperature of 2 takes the root of every ratio, so that more ids are likely enough.
    """
    assert [0, 1] == kept_ids([0.5, 0.3, 0.14, 0.06], min_p=0.4)
    assert [0, 1, 2] == kept_ids([0.5, 0.3, 0.14, 0.06], min_p=0.4, temperature=2.0)


def test_top_p_shares_out_what_min_p_leaves():
    """
    top_p is a share of the survivors' mass: 0.62 of {0.5, 0.3} is reached by one id, of all four by two.
    """
    assert [0, 1] == kept_ids([0.5, 0.3, 0.14, 0.06], min_p=0.3, top_p=0.7)
    assert [0] == kept_ids([0.5, 0.3, 0.14, 0.06], min_p=0.3, top_p=0.62)
    assert [0, 1] == kept_ids([0.5, 0.3, 0.14, 0.06], min_p=0.0, top_p=0.62)


def test_top_k_cuts_what_min_p_leaves():
    """
    The smaller of the two sets wins.
    """
    assert [0, 1] == kept_ids([0.5, 0.3, 0.14, 0.06], min_p=0.1, top_k=2)
    assert [0, 1] == kept_ids([0.5, 0.3, 0.14, 0.06], min_p=0.3, top_k=3)


def test_dropped_ids_are_never_drawn():
    """
    Many draws bring no id that is not likely enough, and each other id at least once.
    """
    logits = torch.tensor([0.5, 0.3, 0.14, 0.06]).log().expand(4000, -1)
    tokens = sample(logits, make_columns(4000, min_p=0.2)).token
    assert [0, 1, 2] == tokens.unique().tolist()


def test_greedy_rows_ignore_it():
    """
    A greedy row takes its best id with any min_p.
    """
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert [1] == sample(logits, make_columns(1, temperature=0.0, min_p=1.0)).token.tolist()


@pytest.mark.parametrize(("offset", "is_shaky"), [(0.001, True), (-0.001, True), (0.1, False)])
def test_margin_knows_the_cut(offset, is_shaky):
    """
    A winner within eps of what min_p asks for may be dropped by rounding: its margin is 0.
    """
    # Two ids far below the best at the cut: one row among these draws the second.
    ratio = 0.5 * 2.718281828**offset
    logits = torch.tensor([1.0, ratio, 1e-6]).log().expand(200, -1)
    result = sample(logits, make_columns(200, min_p=0.5), margin_eps=0.02)
    drawn = result.margin[result.token == 1]
    if offset > 0:
        assert len(drawn) > 0
    assert not is_shaky or not drawn.any()
    assert is_shaky or (drawn > 0).all()
