"""Ids that a row may draw: top_k, then top_p over its survivors."""

from __future__ import annotations

import pytest
import torch

from kernels.sampling import reference
from kernels.sampling.filters import cut


def kept_ids(probabilities, *, top_k=0, top_p=1.0):
    """Ids that stay, by the definition and by the quick way, which must agree."""
    scaled = torch.tensor([probabilities], dtype=torch.float32).log()
    scaled -= scaled.amax()
    k, p = torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p])
    defined = reference.keep(scaled, k, p).mask[0].nonzero()[:, 0].tolist()
    cut(scaled, k, p)
    assert defined == scaled[0].isfinite().nonzero()[:, 0].tolist()
    return defined


class TestTopP:
    def test_one_token_with_enough_mass_stays_alone(self):
        """
        A token that has top_p of the mass by itself is the whole set.
        """
        assert [1] == kept_ids([0.03, 0.95, 0.02], top_p=0.95)
        assert [1] == kept_ids([0.03, 0.95, 0.02], top_p=0.9)

    def test_sum_that_reaches_top_p_up_to_rounding_is_enough(self):
        """
        0.5 + 0.3 + 0.1 counts as 0.9 although no float32 sum says so.
        """
        assert [0, 1, 2] == kept_ids([0.5, 0.3, 0.1, 0.06, 0.04], top_p=0.9)
        assert [0, 2, 4] == kept_ids([0.3, 0.06, 0.5, 0.04, 0.1], top_p=0.9)

    @pytest.mark.parametrize("top_p", [0.3, 0.6, 0.8])
    def test_top_p_that_float32_rounds_up_counts_as_written(self, top_p):
        """
        float32 holds 0.3, 0.6 and 0.8 a little too large; a token of exactly that mass is enough.
        """
        rest = (1 - top_p) / 4
        assert [0] == kept_ids([top_p, rest, rest, rest, rest], top_p=top_p)

    def test_sum_clearly_below_takes_one_more(self):
        """
        The smallest set with a mass of at least top_p includes the token that crosses it.
        """
        assert [0, 1, 2, 3] == kept_ids([0.5, 0.3, 0.1, 0.06, 0.04], top_p=0.901)

    def test_tiny_top_p_keeps_the_best(self):
        """
        At least one id always stays.
        """
        assert [2] == kept_ids([0.2, 0.3, 0.5], top_p=1e-9)

    def test_ties_at_the_cut_all_stay(self):
        """
        Ids of equal value are in or out together, so order cannot matter.
        """
        assert [0, 1, 2, 3] == kept_ids([0.4, 0.2, 0.2, 0.2], top_p=0.5)
        assert [0, 1, 2, 3] == kept_ids([0.25] * 4, top_p=0.1)

    def test_one_is_off(self):
        """
        top_p = 1 keeps even ids with a mass that rounds to nothing.
        """
        assert [0, 1, 2] == kept_ids([1.0, 1e-30, 1e-20], top_p=1.0)


class TestTopK:
    def test_k_best_stay(self):
        """
        top_k keeps the k largest.
        """
        assert [1, 3] == kept_ids([0.1, 0.4, 0.2, 0.3], top_k=2)

    def test_ties_at_the_kth_value_all_stay(self):
        """
        More than k ids stay where the k-th value is shared.
        """
        assert [0, 1, 2] == kept_ids([0.5, 0.2, 0.2, 0.1], top_k=2)

    @pytest.mark.parametrize("top_k", [0, -1, 4, 5, 2**31 - 1])
    def test_zero_negative_or_large_is_off(self, top_k):
        """
        0, a negative number, and anything from the vocabulary's size up keep all.
        """
        assert [0, 1, 2, 3] == kept_ids([0.1, 0.4, 0.2, 0.3], top_k=top_k)

    def test_masked_ids_never_return(self):
        """
        An id at -infinity stays out even where fewer than k others are left.
        """
        assert [1] == kept_ids([0.0, 1.0, 0.0], top_k=2)
        assert [1] == kept_ids([0.0, 1.0, 0.0], top_p=0.99)


class TestBoth:
    def test_top_p_renormalises_over_the_k_survivors(self):
        """
        The first of 0.4 and 0.3 (k = 2) has 57 % of what survived: top_p 0.57 keeps it alone.
        """
        assert [0] == kept_ids([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.57)
        assert [0, 1] == kept_ids([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.58)
        assert [0, 1] == kept_ids([0.4, 0.3, 0.2, 0.1], top_p=0.58)

    @pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0], ids=lambda s: f"spread{s}")
    def test_quick_cut_equals_definition_on_random_rows(self, spread):
        """
        With prefixes that suffice and prefixes that do not, in mixed batches, both ways keep the same ids.
        """
        generator = torch.Generator().manual_seed(5)
        scaled = torch.randn(24, 1501, generator=generator) * spread
        scaled = scaled.bfloat16().float()  # coarse values bring ties
        scaled -= scaled.amax(dim=1, keepdim=True)
        top_k = torch.tensor([0, 1, 2, 5, 50, 300, 1500, 1501] * 3, dtype=torch.int32)
        top_p = torch.tensor([1.0] * 8 + [0.9] * 8 + [0.05, 0.3, 0.5, 0.8, 0.95, 0.99, 0.999, 1.0])
        expected = reference.keep(scaled, top_k, top_p).mask
        cut(scaled, top_k, top_p)
        assert torch.equal(expected, scaled.isfinite())
