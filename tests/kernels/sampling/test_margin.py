"""A margin says how safely a token won."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.sampling import reference, sample
from kernels.sampling.noise.reference import gumbel, row_words
from tests.kernels.sampling.rows import make_columns

EPS = 0.02


def margin_by_hand(logits, *, temperature, top_k, top_p, seed, position):
    """The definition for one row, id by id, in Python floats."""
    size = len(logits)
    if temperature == 0 or top_k == 1:
        best, second = sorted(logits, reverse=True)[:2]
        return best - second
    best = max(logits)
    scaled = [(x - best) / temperature for x in logits]
    words = row_words(torch.tensor([seed]), torch.tensor([position]), torch.tensor([0]))
    noise = gumbel(words, torch.arange(size, dtype=torch.int32)).tolist()
    scores = [x + g for x, g in zip(scaled, noise, strict=True)]
    k_value = sorted(scaled, reverse=True)[min(top_k or size, size) - 1]
    alive = [x >= k_value for x in scaled]
    total = sum(math.exp(x) for x, a in zip(scaled, alive, strict=True) if a)
    above = [
        sum(math.exp(y) for y, a in zip(scaled, alive, strict=True) if a and y > x) / total
        for x in scaled
    ]
    kept = [
        a and (c == 0 or c < top_p - 1e-6 or top_p == 1) for a, c in zip(alive, above, strict=True)
    ]
    worst_kept = min(x for x, inside in zip(scaled, kept, strict=True) if inside)
    best_dropped = max(
        (x for x, inside in zip(scaled, kept, strict=True) if not inside), default=-math.inf
    )
    at_mass_cut = [
        a and top_p < 1 and c > 0 and abs(c - top_p) < EPS
        for a, c in zip(alive, above, strict=True)
    ]
    winner = max((s, -i) for i, s in enumerate(scores) if kept[i])[1] * -1
    if at_mass_cut[winner] or scaled[winner] < best_dropped + EPS:
        return 0.0
    rivals = [
        scores[i]
        for i in range(size)
        if i != winner and (kept[i] or at_mass_cut[i] or scaled[i] > worst_kept - EPS)
    ]
    return max(0.0, scores[winner] - max(rivals, default=-math.inf))


class TestMargin:
    @pytest.mark.parametrize(
        ("temperature", "top_k", "top_p"),
        [(0.0, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 0, 0.8), (1.0, 9, 0.6)],
        ids=str,
    )
    def test_margins_match_the_definition_id_by_id(self, temperature, top_k, top_p):
        """
        Vectorised margins equal the definition written out for one row.
        """
        logits = torch.randn(150, 24, generator=torch.Generator().manual_seed(2))
        columns = make_columns(150, temperature=temperature, top_k=top_k, top_p=top_p, seed=77)
        got = sample(logits, columns, margin_eps=EPS).margin
        expected = [
            margin_by_hand(
                logits[r].tolist(),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=77,
                position=r,
            )
            for r in range(150)
        ]
        # Up to ten roundings of float32 numbers under 32, 2e-6 each.
        assert expected == pytest.approx(got.tolist(), abs=2e-5)

    def test_margins_do_not_change_tokens(self):
        """
        Asking for margins draws the same tokens.
        """
        logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(4)) * 3
        columns = make_columns(50, top_p=0.9)
        plain, with_margin = sample(logits, columns), sample(logits, columns, margin_eps=EPS)
        assert plain.margin is None
        assert torch.equal(plain.token, with_margin.token)

    def test_perturbation_below_half_the_margin_never_changes_the_token(self):
        """
        Logits that are moved by less than eps / 2 draw the same token where the margin is over eps.
        """
        generator = torch.Generator().manual_seed(6)
        logits = torch.randn(1000, 40, generator=generator)
        columns = make_columns(1000, top_k=12, top_p=0.8)
        first = sample(logits, columns, margin_eps=EPS)
        moved = logits + (torch.rand(logits.shape, generator=generator) - 0.5) * (EPS * 0.9)
        second = sample(moved, columns)
        safe = first.margin > EPS
        assert 850 < int(safe.sum())
        assert torch.equal(first.token[safe], second.token[safe])
        assert not torch.equal(first.token, second.token)

    def test_only_candidate_wins_without_limit_and_an_invalid_row_has_none(self):
        """
        Without a rival the margin is infinite; an invalid row's is 0.
        """
        logits = torch.full((2, 5), float("-inf"))
        logits[0, 3] = 1.0
        logits[1, 1] = float("nan")
        margin = reference.sample(logits, make_columns(2), margin_eps=EPS).margin
        assert [math.inf, 0.0] == margin.tolist()
