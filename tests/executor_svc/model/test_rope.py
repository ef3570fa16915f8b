"""Rotation tables against hand-made numbers."""

from __future__ import annotations

import math

import torch

from executor_svc.model.rope import Rope, RopeKind, inverse_frequencies, rotation_table


class TestFrequencies:
    def test_plain_frequencies_are_powers_of_theta(self):
        """
        Pair i turns by theta to the power of -2i / head_dim per position.
        """
        found = inverse_frequencies(Rope(theta=100.0), 4)
        assert torch.allclose(torch.tensor([1.0, 0.1]), found)

    def test_linear_divides_all(self):
        """
        Linear stretching slows every pair alike.
        """
        plain = inverse_frequencies(Rope(), 16)
        stretched = inverse_frequencies(Rope(kind=RopeKind.LINEAR, factor=4.0), 16)
        assert torch.allclose(plain / 4, stretched)

    def test_llama3_keeps_fast_divides_slow_and_blends_between(self):
        """
        Pairs with 4 or more turns in the original length stay, those with 1 or fewer are divided, 2.5 is half-way.
        """
        rope = Rope(
            theta=10.0,
            kind=RopeKind.LLAMA3,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=32,
        )
        plain = inverse_frequencies(Rope(theta=10.0), 64).double()
        found = inverse_frequencies(rope, 64).double()
        turns = 32 * plain / (2 * math.pi)
        for before, after, turn in zip(plain, found, turns, strict=True):
            keep = min(1.0, max(0.0, (turn.item() - 1) / 3))
            expected = before.item() * (keep + (1 - keep) / 8)
            # Both ends of the blend and its weight are float32: a few roundings of 2**-24.
            assert math.isclose(expected, after.item(), rel_tol=2**-20)
        assert turns.max() > 4
        assert turns.min() < 1


class TestTable:
    def test_row_is_cosine_and_sine_of_the_position(self):
        """
        Position p, pair i holds cos and sin of p times the pair's frequency.
        """
        table = rotation_table(Rope(theta=100.0), 4, 10)
        assert table.shape == (10, 2, 2)
        assert torch.allclose(torch.tensor([math.cos(7.0), math.sin(7.0)]), table[7, 0])
        assert torch.allclose(torch.tensor([math.cos(0.7), math.sin(0.7)]), table[7, 1])
