"""Ranks that share a vocabulary draw what one rank draws from the same logits, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import Sampled, SamplingColumns, reference, sample
from tests.kernels.sampling.edit_oracle import RowEdits, edits_of, row_edits
from tests.kernels.sampling.rows import make_columns, random_logits
from tests.kernels.sampling.sharded.shards import check_same, shared

SIZES = [2, 3, 4]

VALUES = [-math.inf, -40.0, -3.0, -1.0, -0.0, 0.0, 0.5, 2.0, 2.0, 4.0, 4.25]
"""Logits that tie often, some out of reach."""


def alone_and_shared(logits: torch.Tensor, columns: SamplingColumns, size: int, **given) -> Sampled:
    """Sample on one rank, by the torch code of a CPU and by the definition, then on `size`."""
    expected = sample(logits, columns, **given)
    found, _ = shared(logits, size, lambda part, shard: sample(part, columns, shard=shard, **given))
    check_same(expected, found)
    defined = {name: given[name] for name in ("edits", "margin_eps") if name in given}
    assert torch.equal(reference.sample(logits, columns, **defined).token, found.token)
    return found


@st.composite
def scenes(draw: st.DrawFn) -> dict[str, object]:
    """Draw rows of any kind, edits, what they ask to be told, and a number of ranks."""
    num_rows, vocab_size = draw(st.integers(1, 5)), draw(st.integers(4, 23))
    rows, ids = range(num_rows), st.integers(0, vocab_size - 1)

    def each(values: list[float]) -> list:
        return [draw(st.sampled_from(values)) for _ in rows]

    logits = [
        draw(st.lists(st.sampled_from(VALUES), min_size=vocab_size, max_size=vocab_size))
        for _ in rows
    ]
    for row in logits:
        if draw(st.integers(0, 9)) == 0:
            row[draw(ids)] = draw(st.sampled_from([math.nan, math.inf]))
    columns = make_columns(
        num_rows,
        temperature=each([0.0, 0.005, 0.7, 1.0, 3.0]),
        top_k=each([0, 0, 1, 2, 3, vocab_size, vocab_size + 5]),
        top_p=each([1.0, 1.0, 0.9, 0.5, 0.3, 1e-9]),
        min_p=draw(st.sampled_from([None, each([0.0, 0.1, 1.0])])),
        seed=[draw(st.integers(0, 99)) for _ in rows],
    )
    given: dict[str, object] = {}
    if draw(st.booleans()):
        edited = {row: draw(row_edits(vocab_size)) for row in rows if draw(st.booleans())}
        given["edits"] = edits_of(edited, junk=draw(ids)) if edited else None
    if draw(st.booleans()):
        given["num_logprobs"] = torch.tensor(each([-1, 0, 1, 3, vocab_size, vocab_size + 2]))
        if draw(st.booleans()):
            asked = [draw(st.lists(ids, min_size=0, max_size=3)) for _ in rows]
            padded = [(one + [-1] * 3)[:3] for one in asked]
            given["logprob_ids"] = torch.tensor(padded)
    if draw(st.booleans()):
        given["margin_eps"] = draw(st.sampled_from([1e-4, 0.02, 0.3]))
    return {
        "logits": torch.tensor(logits),
        "columns": columns,
        "size": draw(st.sampled_from(SIZES)),
        **given,
    }


class TestSampling:
    @pytest.mark.slow
    @settings(max_examples=250, deadline=None)
    @given(scenes())
    def test_ranks_answer_as_one_does(self, scene):
        """
        Tokens, validity, margins and logprobs of any rows are the same bits on two, three and four
        ranks as on one, ties, NaN, ids out of reach and edits included.
        """
        alone_and_shared(**scene)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("size", SIZES)
    def test_large_vocabularies_agree(self, size: int, dtype: torch.dtype):
        """
        Rows over 30,011 ids, which no number of ranks divides, agree with every parameter set.
        """
        logits = random_logits(24, 30_011, seed=size).to(dtype)
        columns = make_columns(
            24,
            temperature=[0.0, 0.6, 1.0, 1.5] * 6,
            top_k=[0, 50, 4, 0, 200, 29_999] * 4,
            top_p=[1.0] * 6 + [0.95] * 6 + [0.4] * 6 + [0.999] * 6,
            min_p=[0.0] * 20 + [0.05, 0.001, 0.5, 0.01],
            seed=list(range(24)),
        )
        rows = {row: RowEdits(prompt=(5, 29_000), output=(7, 7), presence=0.5) for row in (3, 9)}
        alone_and_shared(
            logits,
            columns,
            size,
            edits=edits_of(rows),
            num_logprobs=torch.tensor([-1, 0, 5, 20] * 6),
            margin_eps=0.02,
        )


class TestShards:
    @pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "noise"])
    @pytest.mark.parametrize("size", SIZES)
    def test_lowest_id_wins_ties_across_shards(self, size: int, temperature: float):
        """
        Of equal best logits on several ranks the lowest id is the greedy token and comes first
        among the likeliest.
        """
        logits = torch.full((2, 12), -math.inf)
        logits[0, [4, 7, 11]] = 3.0
        logits[1, [0, 5]] = torch.tensor([-0.0, 0.0])
        columns = make_columns(2, temperature=temperature)
        found = alone_and_shared(logits, columns, size, num_logprobs=torch.tensor([3, 2]))
        assert [4, 7, 11] == found.logprobs.top_token[0].tolist()
        assert [0, 5] == found.logprobs.top_token[1, :2].tolist()
        if temperature == 0:
            assert [4, 0] == found.token.tolist()

    @pytest.mark.parametrize("size", SIZES)
    def test_nan_on_one_shard_fails_its_row_alone(self, size: int):
        """
        A NaN or +infinity that only one rank sees makes the row not valid on all of them.
        """
        logits = random_logits(4, 13)
        logits[0, 0], logits[1, 12], logits[2, 6] = math.nan, math.nan, math.inf
        for temperature in (0.0, 1.0):
            columns = make_columns(4, temperature=temperature, top_k=5, top_p=0.9)
            found = alone_and_shared(logits, columns, size)
            assert [False, False, False, True] == found.valid.tolist()
            assert [0, 0, 0] == found.token[:3].tolist()

    @pytest.mark.parametrize("size", SIZES)
    def test_shard_without_finite_logits_is_legal(self, size: int):
        """
        A rank whose logits are all -infinity never wins; a row is not valid if no rank has any.
        """
        logits = random_logits(3, 12)
        logits[0, :6] = -math.inf
        logits[1, 3:] = -math.inf
        logits[2] = -math.inf
        for temperature in (0.0, 1.0):
            columns = make_columns(3, temperature=temperature, top_k=20, top_p=0.9)
            found = alone_and_shared(logits, columns, size, num_logprobs=torch.tensor([12, 1, 0]))
            assert [True, True, False] == found.valid.tolist()
            assert int(found.token[0]) >= 6
            assert int(found.token[1]) < 3

    @pytest.mark.parametrize("size", SIZES)
    def test_allowed_ids_may_all_be_on_one_shard(self, size: int):
        """
        Ranks without an allowed id draw nothing, and NaN in an id that is not allowed still fails.
        """
        logits = random_logits(3, 12)
        logits[2, 0] = math.nan
        rows = {row: RowEdits(prompt=(1,), allowed=(9, 11)) for row in range(3)}
        columns = make_columns(3, temperature=[0.0, 1.0, 1.0])
        found = alone_and_shared(logits, columns, size, edits=edits_of(rows))
        assert {9, 11} >= set(found.token[:2].tolist())
        assert [True, True, False] == found.valid.tolist()

    @pytest.mark.parametrize("size", SIZES)
    def test_banned_end_ids_and_penalties_reach_the_shard_that_has_the_id(self, size: int):
        """
        A bias, a ban and a penalty change the one logit that they name, wherever it is.
        """
        logits = torch.zeros(3, 12)
        logits[:, 2], logits[:, 10] = 5.0, 4.0
        rows = {
            0: RowEdits(prompt=(1,), banned=(2,)),
            1: RowEdits(prompt=(2, 2), output=(2,), repetition=2.0),
            2: RowEdits(prompt=(1,), bias=((7, 9.0),)),
        }
        columns = make_columns(3, temperature=0.0)
        found = alone_and_shared(logits, columns, size, edits=edits_of(rows))
        assert [10, 10, 7] == found.token.tolist()

    def test_rank_may_hold_padding_alone(self):
        """
        Five ids on four ranks leave the last one none; it takes part all the same.
        """
        logits = random_logits(6, 5)
        columns = make_columns(6, temperature=[0.0, 1.0] * 3, top_k=3, top_p=0.9)
        alone_and_shared(
            logits, columns, 4, num_logprobs=torch.tensor([5, 7, 0, -1, 1, 2]), margin_eps=0.1
        )


class TestCuts:
    @pytest.mark.parametrize("size", SIZES)
    def test_ties_at_a_cut_all_stay_wherever_they_are(self, size: int):
        """
        Ids that tie with the k-th value, or at the nucleus' end, are drawn from every rank.
        """
        logits = torch.full((400, 12), -9.0)
        logits[:, [1, 5, 8, 11]] = 1.0
        for cut in ({"top_k": 2}, {"top_p": 0.3}, {"top_k": 3, "top_p": 0.6}):
            found = alone_and_shared(logits, make_columns(400, **cut), size)
            assert {1, 5, 8, 11} == set(found.token.tolist())

    @pytest.mark.parametrize("size", SIZES)
    def test_thresholds_may_differ_in_their_last_bit(self, size: int):
        """
        Neighbouring float32 logits are told apart by top_k and top_p, also where their bits begin
        with whole bytes of zeros.
        """
        logits = torch.full((300, 9), -20.0)
        logits[:, 0] = 0.0
        value = torch.tensor(-2.0)
        for place in (3, 8, 5):
            logits[:, place] = value
            value = value.nextafter(torch.tensor(-3.0))
        for cut in ({"top_k": 3}, {"top_p": 0.9}):
            found = alone_and_shared(logits, make_columns(300, **cut), size)
            assert {0, 3, 8} == set(found.token.tolist())


class TestTotals:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_log_sum_exp_has_the_same_bits_on_any_number_of_ranks(self, dtype: torch.dtype):
        """
        Logprobs of tokens, likeliest ids and requested ids over 50,257 ids are equal on one to four
        ranks.
        """
        logits = (random_logits(7, 50_257) * 2).to(dtype)
        columns, asked = make_columns(7), torch.tensor([0, 1, 2, 20, -1, 5, 3])
        ids = torch.randint(0, 50_257, (7, 4), generator=torch.Generator().manual_seed(1))
        for size in (1, *SIZES):
            alone_and_shared(logits, columns, size, num_logprobs=asked, logprob_ids=ids)
