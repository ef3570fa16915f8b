"""Collectives by which ranks that share a vocabulary sample and score."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import Needs, draw, sample, token_scores
from tests.kernels.sampling.edit_oracle import RowEdits, edits_of
from tests.kernels.sampling.rows import make_columns, random_logits
from tests.kernels.sampling.sharded.shards import shared

GREEDY = {"temperature": 0.0}


class TestCollectives:
    @pytest.mark.parametrize(
        ("params", "expected"),
        [
            (GREEDY, ["max"]),
            ({"top_k": 1}, ["max"]),
            ({}, ["max", "max"]),
            ({"min_p": 0.1}, ["max", "max"]),
            ({"top_k": 5}, ["max", *["sum"] * 4, "max"]),
            ({"top_p": 0.9}, ["max", *["sum"] * 4, "max"]),
            ({"top_k": 5, "top_p": 0.9, "min_p": 0.1}, ["max", *["sum"] * 8, "max"]),
        ],
        ids=["greedy", "top_k1", "plain", "min_p", "top_k", "top_p", "all"],
    )
    @pytest.mark.parametrize("num_rows", [1, 300])
    def test_number_follows_from_the_parameters(self, params, expected, num_rows: int):
        """
        Greedy rows take one collective, plain ones two, top_k or top_p six and both ten, for any
        number of rows and any logits.
        """
        columns = make_columns(num_rows, **params)
        for logits in (random_logits(num_rows, 40), torch.full((num_rows, 40), math.nan)):
            _, ranks = shared(logits, 2, lambda part, shard: sample(part, columns, shard=shard))
            assert expected == [name for name, _ in ranks.calls]

    def test_edits_take_none_and_logprobs_one(self):
        """
        Edited rows take no more; logprobs take one gather, and, with edits, the best logit before
        them travels with the best one after.
        """
        logits, columns = random_logits(3, 40), make_columns(3)
        edits = edits_of({1: RowEdits(prompt=(1, 39), presence=1.0, allowed=(3, 4))})
        asked = torch.tensor([-1, 6, 0])
        for asking, expected in (
            ({"edits": edits}, [("max", (3, 1)), ("max", (3,))]),
            ({"num_logprobs": torch.tensor([-1, -1, -1])}, [("max", (3, 1)), ("max", (3,))]),
            (
                {"edits": edits, "num_logprobs": asked},
                [("max", (3, 2)), ("max", (3,)), ("gather", (2, 8))],
            ),
        ):
            _, ranks = shared(
                logits,
                2,
                lambda part, shard, asking=asking: sample(part, columns, shard=shard, **asking),
            )
            assert expected == ranks.calls

    def test_margins_take_seven_more(self):
        """
        Margins take sums of masses, a search for two thresholds together, and two maxima.
        """
        logits, columns = random_logits(3, 40), make_columns(3, top_k=5, top_p=0.9)
        _, ranks = shared(
            logits, 2, lambda part, shard: sample(part, columns, shard=shard, margin_eps=0.02)
        )
        assert ["sum"] * 5 + ["max"] * 2 == [name for name, _ in ranks.calls][10:]

    def test_no_size_follows_from_the_vocabulary(self):
        """
        A rank sends the same for a row of a hundred times as many ids: with both cuts 12,304 bytes.
        """
        columns = make_columns(4, top_k=30, top_p=0.9)
        sent = []
        for vocab_size in (1_000, 100_000):
            _, ranks = shared(
                random_logits(4, vocab_size),
                2,
                lambda part, shard: sample(part, columns, shard=shard),
            )
            sent.append(ranks.sent_bytes / 4)
        assert [4 * 256 * (4 + 8) + 16] * 2 == sent

    def test_captured_step_launches_by_needs_alone(self):
        """
        `draw` draws as `sample` does, with the collectives of what may be needed.
        """
        logits, columns = random_logits(5, 41), make_columns(5, top_k=3)
        expected = sample(logits, columns)
        for needs, count in ((Needs(), 10), (Needs(top_p=False), 6)):
            (token, valid), ranks = shared(
                logits,
                3,
                lambda part, shard, needs=needs: draw(part, columns, needs, shard=shard),
            )
            assert torch.equal(expected.token, token)
            assert torch.equal(expected.valid, valid)
            assert count == len(ranks.calls)


class TestScores:
    @pytest.mark.slow
    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def test_given_tokens_are_scored_as_on_one_rank(self, data):
        """
        Logprob, rank and likeliest ids of given tokens have the same bits on several ranks, by two
        collectives.
        """
        vocab_size = data.draw(st.integers(3, 15))
        value = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.0, 1.0, 3.0])
        row = st.lists(value, min_size=vocab_size, max_size=vocab_size)
        logits = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
        if data.draw(st.booleans()):
            logits[0, data.draw(st.integers(0, vocab_size - 1))] = math.nan
        ids = st.integers(0, vocab_size - 1)
        token = torch.tensor([data.draw(ids) for _ in logits])
        num_top = data.draw(st.integers(0, vocab_size + 2))
        expected = token_scores(logits, token, num_top)
        found, ranks = shared(
            logits,
            data.draw(st.sampled_from([2, 3, 4])),
            lambda part, shard: token_scores(part, token, num_top, shard=shard),
        )
        assert ["max", "gather"] == [name for name, _ in ranks.calls]
        assert torch.equal(expected.valid, found.valid)
        for name in ("chosen", "rank", "top_token", "top"):
            one, other = getattr(expected, name), getattr(found, name)
            assert torch.equal(one[expected.valid], other[expected.valid]), name
