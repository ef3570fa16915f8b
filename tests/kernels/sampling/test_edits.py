"""Penalties, biases and bans change what is drawn exactly as they are defined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import LogitEdits, reference, sample
from kernels.sampling.logprobs import reference as logprobs
from tests.kernels.sampling.edit_oracle import RowEdits, edited_row, edits_of, row_edits
from tests.kernels.sampling.rows import chi_square, chi_square_limit, make_columns, random_logits

each_way = pytest.mark.usefixtures("each_way")

VOCAB = 11
FLOAT32_STEPS = {"rtol": 1e-5, "atol": 1e-5}
"""A few roundings of float32 against none of float64."""


def logits_of(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def greedy(logits: torch.Tensor, row: RowEdits) -> int:
    """Token of one greedy row with edits."""
    columns = make_columns(1, temperature=0.0)
    return int(sample(logits, columns, edits=edits_of({0: row})).token)


class TestDefinition:
    @pytest.mark.slow
    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def test_edited_logits_are_those_of_the_formula(self, data):
        """
        Allowed ids, bans, biases, the repetition penalty on prompt and output and the other two on the output give what the
        formula gives, id by id, in the definition and in the quick way alike.
        """
        rows = data.draw(st.dictionaries(st.integers(0, 4), row_edits(VOCAB), min_size=1))
        logits = random_logits(5, VOCAB, seed=data.draw(st.integers(0, 99)))
        columns = edits_of(rows, junk=data.draw(st.integers(0, VOCAB - 1)))
        defined = reference.edit(logits, columns)
        quick = logits.clone()
        columns.apply(quick, torch.arange(5))
        for place in range(5):
            expected = logits[place].double().numpy()
            if place in rows:
                expected = edited_row(expected, rows[place])
            np.testing.assert_allclose(defined[place].numpy(), expected, **FLOAT32_STEPS)
        assert torch.equal(defined, quick)

    @each_way
    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_quick_way_draws_the_tokens_of_the_definition(self, data):
        """
        With any edits, cuts and temperatures beside rows without any, the quick way draws what the definition does.
        """
        vocab_size = data.draw(st.sampled_from([VOCAB, 700]))
        rows = data.draw(st.dictionaries(st.integers(0, 5), row_edits(VOCAB), min_size=1))
        logits = random_logits(6, vocab_size, seed=data.draw(st.integers(0, 99)))
        columns = make_columns(
            6,
            temperature=[0.0, 1.0, 0.6, 1.4, 1.0, 0.0],
            top_k=[0, 0, 7, 0, 3, 0],
            top_p=[1.0, 0.9, 1.0, 0.8, 1.0, 1.0],
            min_p=[0.0, 0.1, 0.05, 0.0, 0.3, 0.5],
        )
        found = sample(logits, columns, edits=edits_of(rows))
        defined = reference.sample(logits, columns, edits=edits_of(rows))
        assert torch.equal(defined.token, found.token)
        assert found.valid.all()

    def test_neutral_values_change_no_bit(self):
        """
        A repetition penalty of 1 and others of 0 leave logits bit-identical.
        """
        logits = random_logits(1, VOCAB)
        row = RowEdits(prompt=(1, 2), output=(3, 3))
        assert torch.equal(logits, reference.edit(logits, edits_of({0: row})))


@each_way
class TestRepetition:
    def test_negative_logits_become_more_negative(self):
        """
        A penalty over 1 divides positive logits and multiplies negative ones, so both fall.
        """
        logits = logits_of([[2.0, -2.0, 1.0]])
        row = RowEdits(prompt=(0,), output=(1,), repetition=2.0)
        assert [1.0, -4.0, 1.0] == reference.edit(logits, edits_of({0: row}))[0].tolist()

    def test_prompt_tokens_are_penalised_once(self):
        """
        A token of the prompt counts, and how often it stands there does not.
        """
        logits = logits_of([[3.0, 2.0, 1.0]])
        assert 1 == greedy(logits, RowEdits(prompt=(0, 0, 0), repetition=1.6))
        assert 0 == greedy(logits, RowEdits(prompt=(0, 0, 0), repetition=1.4))

    @pytest.mark.parametrize("penalty", [1e-30, 1e30])
    def test_absurd_penalties_leave_the_row_valid(self, penalty):
        """
        Finite logits stay finite whatever the penalty, so that no row fails for it.
        """
        logits = logits_of([[2e10, -2e10, 1.0]])
        row = RowEdits(prompt=(0, 1), repetition=penalty)
        columns = make_columns(1, temperature=0.7, top_p=0.9)
        assert [True] == sample(logits, columns, edits=edits_of({0: row})).valid.tolist()


@each_way
class TestFrequencyAndPresence:
    def test_frequency_counts_output_tokens_alone(self):
        """
        Three times in the output cost three times the penalty; the prompt costs nothing.
        """
        logits = logits_of([[2.0, 1.0, 0.6]])
        row = RowEdits(prompt=(0, 0, 1, 2), output=(0, 0, 0, 1), frequency=0.5)
        edited = reference.edit(logits, edits_of({0: row}))[0]
        assert [0.5, 0.5, 0.6] == pytest.approx(edited.tolist())

    def test_presence_counts_once(self):
        """
        A token of the output costs the presence penalty once, however often it stands there.
        """
        logits = logits_of([[2.0, 1.0, 0.6]])
        row = RowEdits(prompt=(1,), output=(0, 0, 0), presence=0.75)
        edited = reference.edit(logits, edits_of({0: row}))[0]
        assert [1.25, 1.0, 0.6] == pytest.approx(edited.tolist())

    def test_negative_penalties_attract(self):
        """
        Negative penalties make what was said more likely.
        """
        logits = logits_of([[1.0, 0.9, 0.0]])
        assert 1 == greedy(logits, RowEdits(prompt=(0,), output=(1,), frequency=-0.2))


@each_way
class TestBans:
    def test_banned_ids_are_never_drawn(self):
        """
        An id with a bias of -infinity is not drawn, greedy or not, even with a bias of its own.
        """
        logits = logits_of([[9.0, 1.0, 0.0]]).expand(64, -1)
        rows = {
            place: RowEdits(prompt=(1,), banned=(0,), bias=((0, 100.0),)) for place in range(64)
        }
        for temperature in (0.0, 2.0):
            columns = make_columns(64, temperature=temperature)
            tokens = sample(logits, columns, edits=edits_of(rows)).token
            assert 0 not in tokens.tolist()

    def test_row_with_everything_banned_fails_alone(self):
        """
        A row with nothing left to draw is not valid; its neighbours are.
        """
        logits = random_logits(3, 4)
        rows = {1: RowEdits(prompt=(0,), banned=(0, 1, 2, 3))}
        result = sample(logits, make_columns(3), edits=edits_of(rows))
        assert [True, False, True] == result.valid.tolist()
        assert 0 == int(result.token[1])


@each_way
class TestAllowed:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("top_k", [0, 3, 8])
    def test_they_draw_as_if_all_others_were_masked(self, temperature, top_k):
        """
        Rows confined to some ids draw what they draw of logits that a mask confined, bit by bit.
        """
        logits = random_logits(64, 5000)
        ids = [7, 8, 123, 2047, 4999]
        columns = make_columns(64, temperature=temperature, top_k=top_k, top_p=0.9)
        rows = {place: RowEdits(prompt=(1,), allowed=tuple(ids)) for place in range(0, 64, 2)}
        masked = logits.clone()
        masked[::2] = -torch.inf
        masked[::2, ids] = logits[::2, ids]
        expected = reference.sample(masked, columns)
        found = sample(logits, columns, edits=edits_of(rows))
        assert torch.equal(expected.token, found.token)
        assert found.valid.all()

    @pytest.mark.slow
    def test_they_are_drawn_by_the_confined_softmax(self):
        """
        Ids are drawn as often as the softmax over the allowed ones says.
        """
        ids = [1, 4, 6, 9]
        num_rows = 20_000
        logits = random_logits(1, VOCAB, spread=1.0)
        rows = {place: RowEdits(prompt=(1,), allowed=tuple(ids)) for place in range(num_rows)}
        drawn = sample(
            logits.expand(num_rows, -1), make_columns(num_rows), edits=edits_of(rows)
        ).token
        expected = logits[0, ids].softmax(dim=0) * num_rows
        observed = torch.bincount(drawn, minlength=VOCAB)
        assert num_rows == int(observed[ids].sum())
        assert chi_square(observed[ids], expected) < chi_square_limit(len(ids) - 1)

    def test_no_bias_brings_another_id_back(self):
        """
        A bias moves only ids that are allowed.
        """
        row = RowEdits(prompt=(0,), allowed=(1, 2), bias=((0, 100.0), (2, 50.0)))
        assert 2 == greedy(logits_of([[9.0, 1.0, 0.0]]), row)

    @pytest.mark.parametrize("broken", [float("nan"), float("inf")])
    def test_broken_logits_of_other_ids_fail_the_row(self, broken):
        """
        A row whose logits are not finite is not valid, wherever in it they are.
        """
        rows = {place: RowEdits(prompt=(0,), allowed=(1, 2)) for place in range(2)}
        logits = logits_of([[broken, 1.0, 0.0], [-torch.inf, 1.0, 0.0]])
        found = sample(logits, make_columns(2), edits=edits_of(rows))
        assert [False, True] == found.valid.tolist()


@each_way
class TestNeighbours:
    def test_rows_without_edits_draw_what_they_draw_alone(self):
        """
        Edits of some rows change neither the others' tokens nor the logits they were given.
        """
        logits = random_logits(40, 300)
        before = logits.clone()
        columns = make_columns(40, temperature=[0.0, 0.9] * 20, top_p=0.95)
        plain = sample(logits, columns).token
        rows = {
            place: RowEdits(prompt=(place,), output=(7, 7), frequency=2.0, presence=2.0)
            for place in range(0, 40, 3)
        }
        mixed = sample(logits, columns, edits=edits_of(rows)).token
        others = [place for place in range(40) if place not in rows]
        assert torch.equal(plain[others], mixed[others])
        assert torch.equal(before, logits)

    def test_edited_row_draws_the_same_alone_and_in_any_batch(self, monkeypatch):
        """
        A row with penalties draws the same alone, beside others, and however counting is cut.
        """
        logits = random_logits(9, 500)
        columns = make_columns(9, temperature=0.8, seed=list(range(9)))
        generator = np.random.default_rng(5)
        rows = {
            place: RowEdits(
                prompt=tuple(generator.integers(0, 500, 20 + place).tolist()),
                output=tuple(generator.integers(0, 40, 30).tolist()),
                repetition=1.2,
                frequency=0.4,
            )
            for place in range(9)
        }
        together = sample(logits, columns, edits=edits_of(rows)).token
        monkeypatch.setitem(logprobs._COPY_ELEMENTS, "cpu", 1)
        cut = sample(logits, columns, edits=edits_of(rows)).token
        alone = [
            sample(
                logits[place : place + 1],
                columns.select(torch.tensor([place])),
                edits=edits_of({0: rows[place]}),
            ).token
            for place in range(9)
        ]
        assert torch.equal(together, cut)
        assert torch.equal(together, torch.cat(alone))

    def test_no_edits_are_no_edits(self):
        """
        Edits of no row change nothing.
        """
        logits, columns = random_logits(4, 30), make_columns(4)
        found = sample(logits, columns, edits=LogitEdits()).token
        assert torch.equal(sample(logits, columns).token, found)


class TestMargin:
    def test_margin_is_that_of_the_penalised_scores(self):
        """
        The lead of a greedy row is measured after its penalties.
        """
        logits = logits_of([[5.0, 4.0, 1.0]])
        columns = make_columns(1, temperature=0.0)
        row = RowEdits(prompt=(2,), output=(0,), presence=1.25)
        result = sample(logits, columns, edits=edits_of({0: row}), margin_eps=0.01)
        assert [1] == result.token.tolist()
        assert [0.25] == pytest.approx(result.margin.tolist())

    @pytest.mark.parametrize("repetition", [2.0, 0.5])
    def test_repetition_penalty_widens_noise(self, repetition):
        """
        A repetition penalty can double differences between logits, so margins count half.
        """
        logits = logits_of([[5.0, 4.0, 1.0]])
        columns = make_columns(1, temperature=0.0)
        row = RowEdits(prompt=(2,), repetition=repetition)
        result = sample(logits, columns, edits=edits_of({0: row}), margin_eps=0.01)
        assert [0.5] == pytest.approx(result.margin.tolist())
