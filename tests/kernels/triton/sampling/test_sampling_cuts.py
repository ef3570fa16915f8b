"""The search for thresholds keeps exactly the ids that sorting keeps."""

from __future__ import annotations

import pytest
import torch

from kernels.sampling import reference, triton_search
from kernels.sampling.triton_kernel import Needs, thresholds
from kernels.sampling.tuning import Cut, SamplingTiles
from tests.kernels.sampling.rows import make_columns, random_logits


def kept(logits, columns, device, cut=None):
    """
    Return masks of the ids above the threshold found, and of those that the definition keeps.
    """
    best = logits.amax(dim=1)
    cut = cut or Cut.of(*logits.shape)
    there = (logits.to(device), columns.to(device), best.to(device))
    found = thresholds(*there, Needs(), cut).cpu()
    scaled = reference.scale(logits.float(), columns.temperature)
    mask = (scaled >= found[:, None]) & scaled.isfinite()
    return mask, reference.keep(scaled, columns.top_k, columns.top_p, columns.min_p).mask


def coarse(logits):
    """Return values with many ties."""
    return (logits * 4).round() / 4


class TestCuts:
    @pytest.mark.slow
    @pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0, 40.0])
    def test_kept_ids_are_those_of_a_sort(self, device, spread):
        """
        Ids kept by top_k, top_p and both are those of a sort, with ties at the cut, on flat rows,
        peaked rows and rows wider than float's exp.
        """
        top_k = [0, 2, 5, 50, 119, 120, 0, 0, 0, 0, 3, 60]
        top_p = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.05, 0.5, 0.9, 0.999, 0.7, 0.95]
        logits = torch.cat([random_logits(12, 120, spread=spread)] * 2)
        logits[12:] = coarse(logits[12:])
        found, expected = kept(logits, make_columns(24, top_k=top_k * 2, top_p=top_p * 2), device)
        assert torch.equal(expected, found)

    @pytest.mark.slow
    def test_keys_beyond_one_tile_are_searched_in_rounds(self, device):
        """
        Keys between the fixed ones are narrowed in place when a program cannot hold them all.
        """
        cut = Cut.into(SamplingTiles(tile=32, split=64), 300)
        logits = torch.cat([random_logits(3, 300, spread=0.2), random_logits(3, 300)])
        logits[2] = 1.0
        columns = make_columns(6, top_k=[0, 40, 8, 0, 100, 7], top_p=[0.5, 1, 0.9, 0.9, 0.8, 1])
        found, expected = kept(logits, columns, device, cut)
        assert torch.equal(expected, found)
        assert expected[2].all()

    @pytest.mark.slow
    def test_rows_beyond_one_launch_are_cut_too(self, device, monkeypatch):
        """
        A batch with more rows than keys are kept for is cut in parts.
        """
        monkeypatch.setattr(triton_search, "ROWS_PER_SEARCH", 2)
        columns = make_columns(5, top_k=[3, 0, 9, 4, 5], top_p=[0.5, 0.9, 1.0, 0.8, 0.3])
        found, expected = kept(random_logits(5, 70), columns, device)
        assert torch.equal(expected, found)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("probabilities", "top_k", "top_p"),
        [
            ([0.03, 0.95, 0.02], 0, 0.95),
            ([0.5, 0.3, 0.1, 0.06, 0.04], 0, 0.9),
            ([0.5, 0.3, 0.1, 0.06, 0.04], 0, 0.901),
            ([0.3, 0.175, 0.175, 0.175, 0.175], 0, 0.3),
            ([0.2, 0.3, 0.5], 0, 1e-9),
            ([0.25] * 4, 0, 0.1),
            ([0.0, 1.0, 0.0], 2, 1.0),
            ([0.0, 1.0, 0.0], 0, 0.99),
            ([0.4, 0.3, 0.2, 0.1], 2, 0.57),
            ([0.4, 0.3, 0.2, 0.1], 2, 0.58),
            ([1.0, 1e-30, 1e-20], 2, 1.0),
        ],
    )
    def test_masses_at_the_cut_count_as_defined(self, device, probabilities, top_k, top_p):
        """
        Sums that reach top_p up to rounding are enough, and at least one id stays.
        """
        logits = torch.tensor([probabilities]).log()
        found, expected = kept(logits, make_columns(1, top_k=top_k, top_p=top_p), device)
        assert torch.equal(expected, found)

    @pytest.mark.slow
    def test_min_p_is_the_lowest_threshold_there_is(self, device):
        """
        min_p cuts alone, and the other cuts count what it leaves.
        """
        columns = make_columns(
            6,
            top_k=[0, 0, 90, 5, 0, 60],
            top_p=[1.0, 0.9, 1.0, 0.9, 0.99, 0.8],
            min_p=[0.1, 0.05, 0.2, 0.01, 1.0, 0.0],
        )
        found, expected = kept(random_logits(6, 100), columns, device)
        assert torch.equal(expected, found)
