"""The whole Triton sampler: edits, log probabilities and margins as they are defined."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.sampling import Biases, LogitEdits, reference, triton_sampler
from kernels.sampling.edits.triton_kernel import edited
from kernels.sampling.logprobs import reference as logprobs
from kernels.sampling.logprobs.triton_kernel import log_total
from tests.kernels.sampling.edit_oracle import RowEdits, edits_of, row_edits
from tests.kernels.sampling.rows import random_logits
from tests.kernels.triton.sampling.sampling_scenes import mixed_columns

VOCAB = 11
ATOL = 1e-5
"""
Tolerance of log probabilities and margins: five roundings of float32 numbers under 32, 2e-6 each.
"""

ROWS = {
    1: RowEdits(prompt=(3, 3, 5), output=(7, 7, 7, 5), repetition=1.3, frequency=0.4, presence=0.2),
    2: RowEdits(prompt=(1,), bias=((4, 3.5), (9, -100.0)), banned=(4, 0)),
    4: RowEdits(prompt=(40,), output=(2,), repetition=0.5, frequency=-2.0, banned=(2,)),
}


def on(device, edits):
    """Return edits with their history on the device."""
    if edits.penalties is not None:
        history = edits.penalties.history.to(device)
        object.__setattr__(edits.penalties, "history", history)
    return edits


class TestEdits:
    @settings(max_examples=12, deadline=None)
    @given(rows=st.lists(row_edits(VOCAB), min_size=2, max_size=2), seed=st.integers(0, 99))
    def test_edited_logits_are_the_definitions_to_the_bit(self, device, rows, seed):
        """
        Biases, bans and penalties in any mixture change the same logits by the same amounts.
        """
        logits = random_logits(3, VOCAB, seed=seed)
        edits = edits_of({0: rows[0], 2: rows[1]}, junk=2**31 - 1)
        found = edited(logits.to(device), on(device, edits), torch.tensor([0, 2])).cpu()
        assert torch.equal(reference.edit(logits, edits)[[0, 2]], found)

    def test_overflow_and_masks_stay_what_they_are(self, device):
        """
        Finite logits stay finite and -infinity stays, whatever the penalty.
        """
        logits = torch.tensor([[3e38, -3e38, float("-inf"), 1.0]])
        row = RowEdits(prompt=(0, 1, 2), output=(1, 2), repetition=3.0, frequency=1e38)
        found = edited(logits.to(device), on(device, edits_of({0: row})), torch.tensor([0])).cpu()
        assert torch.equal(reference.edit(logits, edits_of({0: row})), found)
        assert [True, True, False, True] == found.isfinite()[0].tolist()

    def test_edits_of_other_rows_are_left_out(self, device):
        """
        A part of the edited rows can be copied alone.
        """
        logits, edits = random_logits(6, 50), on(device, edits_of(ROWS))
        found = edited(logits.to(device), edits, torch.tensor([2, 4])).cpu()
        assert torch.equal(reference.edit(logits, edits_of(ROWS))[[2, 4]], found)

    def test_biases_without_penalties_are_enough(self, device):
        """
        Either kind of edit may be absent.
        """
        biases = Biases(
            row=torch.tensor([0]), token=torch.tensor([3]), value=torch.tensor([float("-inf")])
        )
        found = edited(torch.zeros(1, 5, device=device), LogitEdits(biases=biases), biases.row)
        assert [0.0, 0.0, 0.0, float("-inf"), 0.0] == found[0].tolist()


class TestSample:
    @pytest.mark.slow
    @pytest.mark.parametrize("min_p", [None, 0.05])
    def test_everything_at_once_is_as_defined(self, device, min_p):
        """
        Tokens, validity, log probabilities and margins of a batch with edits in some rows are the definition's.
        """
        logits, columns = random_logits(6, 50), mixed_columns(6, min_p=min_p)
        asked = torch.tensor([2, -1, 0, 50, 3, 1])
        given = {"num_logprobs": asked, "margin_eps": 0.01}
        expected = reference.sample(logits, columns, edits=edits_of(ROWS), **given)
        found = triton_sampler.sample(
            logits.to(device), columns, edits=on(device, edits_of(ROWS)), **given
        )
        assert torch.equal(expected.token, found.token.cpu())
        assert found.valid.all()
        torch.testing.assert_close(found.margin.cpu(), expected.margin, rtol=0, atol=ATOL)
        assert torch.equal(expected.logprobs.row, found.logprobs.row)
        assert torch.equal(expected.logprobs.top_token, found.logprobs.top_token.cpu())
        for name in ("chosen", "top"):
            torch.testing.assert_close(
                getattr(found.logprobs, name).cpu(),
                getattr(expected.logprobs, name),
                rtol=0,
                atol=ATOL,
            )

    @pytest.mark.slow
    def test_logits_are_not_changed(self, device):
        """
        The caller's logits stay as they were, those of edited rows too.
        """
        logits = random_logits(6, 50).to(device)
        before = logits.clone()
        triton_sampler.sample(logits, mixed_columns(6), edits=on(device, edits_of(ROWS)))
        assert torch.equal(before, logits)

    @pytest.mark.slow
    def test_edited_row_draws_the_same_however_copies_are_cut(self, device, monkeypatch):
        """
        One copy of all edited rows, or one of each, makes no difference.
        """
        logits, columns = random_logits(6, 50).to(device), mixed_columns(6)
        edits = on(device, edits_of(ROWS))
        together = triton_sampler.sample(logits, columns, edits=edits).token
        monkeypatch.setitem(logprobs._COPY_ELEMENTS, device.type, 1)
        assert torch.equal(together, triton_sampler.sample(logits, columns, edits=edits).token)

    def test_cuda_gets_the_triton_sampler(self):
        """
        A CUDA device runs Triton's sampler, whether or not there is such a device now.
        """
        operation = dispatch._operations["sampling"]
        chosen = operation.on(torch.device("cuda"))
        operation.forget()
        assert triton_sampler.sample is chosen


class TestLogTotal:
    def test_sum_is_exact_to_rounding_and_the_same_in_any_batch(self, device):
        """
        Log-sum-exp over several splits agrees with float64, and a row has the same bits alone.
        """
        values = random_logits(3, 9001, spread=5.0)
        values[0, 5000:] = float("-inf")
        found = log_total(values.to(device))
        alone = log_total(values[1:2].to(device))
        exact = values.double().logsumexp(dim=1, keepdim=True).float()
        # A sum of positive terms in parts is a few roundings of 6e-8 off in relation to its size, and
        # its logarithm as much absolutely, besides a rounding of its own size.
        torch.testing.assert_close(found.cpu(), exact, rtol=1e-6, atol=1e-6)
        assert torch.equal(found[1:2], alone)

    def test_a_row_with_a_nan_has_no_sum(self, device):
        """One NaN makes its row's log-sum-exp NaN, as in the definition, and leaves other rows alone."""
        values = random_logits(2, 9001, spread=5.0)
        values[0, 7000] = float("nan")
        found = log_total(values.to(device)).cpu()
        assert found.isnan().tolist() == [[True], [False]]
