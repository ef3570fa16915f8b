"""Sampling in C++ draws the tokens of the definition, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import sampling
from kernels.cpu_extension import load_library
from kernels.sampling import cpu_extension, fixed_point, reference, sampler
from kernels.sampling.noise.reference import gumbel, row_words, uniform
from tests.kernels.sampling.edit_oracle import RowEdits, edits_of
from tests.kernels.sampling.rows import make_columns

pytestmark = pytest.mark.compiler

CPU = torch.device("cpu")
SCORE_ERROR = 1e-5
"""Error that noise in float32 and its sum with a logit may have: kScoreError of logits.h."""
MASS_ERROR = 1e-6
"""
Error of masses, a fifth of kError of sampling.cpp; its own exponentials and sums have the rest.
"""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
NEVER = float("-inf")


@pytest.fixture
def redrawn(monkeypatch):
    """Numbers of rows that were left to PyTorch's arithmetic."""
    found = []
    plain = sampler.sample

    def sample(logits, columns, **given):
        found.append(len(logits))
        return plain(logits, columns, **given)

    monkeypatch.setattr(sampler, "sample", sample)
    return found


def same(logits, columns, threads=1):
    """
    Sample in C++ and check that tokens, and the rows that are valid, are those of the definition.
    """
    defined = reference.sample(logits, columns)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = cpu_extension.sample(logits, columns)
    finally:
        torch.set_num_threads(before)
    assert defined.valid.tolist() == found.valid.tolist()
    assert defined.token.tolist() == found.token.tolist()
    return found.token


@st.composite
def batches(draw):
    """Logits with ties, masks and poison, and rows that each ask for something else."""
    vocab_size = draw(st.sampled_from([1, 2, 15, 16, 17, 33, 100, 1023, 1025, 3001]))
    num_rows = draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    logits *= draw(st.sampled_from([0.0, 0.01, 0.5, 4.0, 20.0, 1e30]))
    if draw(st.booleans()):
        logits = logits.round()
    logits = logits.to(draw(st.sampled_from(TYPES)))
    masked = draw(st.sampled_from([0.0, 0.0, 0.5, 0.99, 1.0]))
    logits[torch.rand(logits.shape, generator=generator) < masked] = NEVER
    if draw(st.booleans()):
        place = draw(st.integers(0, num_rows - 1)), draw(st.integers(0, vocab_size - 1))
        logits[place] = draw(st.sampled_from([float("nan"), float("inf"), NEVER, 3e38, -3e38]))

    def column(values):
        return draw(st.lists(st.sampled_from(values), min_size=num_rows, max_size=num_rows))

    return logits, make_columns(
        num_rows,
        temperature=column([0.0, 1e-4, 0.5, 0.8, 1.0, 1.3, 30.0]),
        top_k=column([-1, 0, 0, 1, 2, 7, 50, 999, vocab_size - 1, vocab_size, vocab_size + 1]),
        top_p=column([1.0, 1.0, 0.999, 0.95, 0.9, 0.5, 0.1, 1e-9]),
        min_p=draw(st.none() | st.just(column([0.0, 0.0, 0.05, 0.3, 1.0]))),
        seed=column([0, 1, -5, 2**63 - 1]),
        first_position=draw(st.integers(0, 2**32 - 9)),
        choice=draw(st.integers(0, 2**32 - 1)),
    )


class TestTokens:
    @settings(max_examples=50, deadline=None)
    @given(batches())
    def test_any_batch_draws_what_is_defined(self, batch):
        """
        Tokens and validity are the definition's, whatever lengths, types, ties, masks, poison,
        temperatures and cuts meet.
        """
        same(*batch)

    @pytest.mark.parametrize(
        ("dtype", "spread"),
        [(torch.float32, 0.5), (torch.bfloat16, 4.0), (torch.float16, 1.0)],
        ids=str,
    )
    def test_long_rows_draw_what_is_defined_on_any_number_of_threads(self, dtype, spread):
        """
        Rows as long as vocabularies are, flat as of random weights or peaked as of a trained model, draw the same.
        """
        generator = torch.Generator().manual_seed(9)
        logits = (torch.randn(12, 7001, generator=generator) * spread).to(dtype)
        columns = make_columns(
            12,
            temperature=[0.0, 0.8, 0.8, 0.8, 0.8, 1.5] * 2,
            top_k=[0, 0, 50, 0, 300, 5000] * 2,
            top_p=[1.0, 1.0, 1.0, 0.9, 0.8, 0.5] * 2,
            min_p=[0.0] * 11 + [0.02],
            seed=list(range(12)),
        )
        first = same(logits, columns, threads=1)
        for threads in (2, 5):
            assert torch.equal(first, same(logits, columns, threads=threads))

    def test_row_draws_the_same_alone(self):
        """
        A row's token does not depend on its neighbours.
        """
        logits = torch.randn(9, 5001, generator=torch.Generator().manual_seed(3))
        columns = make_columns(9, temperature=0.8, top_p=[1.0, 0.9, 0.5] * 3, top_k=[0, 0, 40] * 3)
        together = same(logits, columns)
        for row in range(9):
            part = slice(row, row + 1)
            assert together[row] == cpu_extension.sample(logits[part], columns.select(part)).token

    @pytest.mark.parametrize("layout", ["rows apart", "one row", "columns apart", "float64"])
    def test_logits_lie_as_they_like(self, layout):
        """
        Rows with gaps between them, one row given many times, strided columns and float64 are read right.
        """
        logits = torch.randn(6, 3 * 2050, generator=torch.Generator().manual_seed(4))
        given = {
            "rows apart": logits[:, :2049],
            "one row": logits[:1, :2049].expand(6, -1),
            "columns apart": logits[:, ::3],
            "float64": logits[:, :2049].double(),
        }[layout]
        same(given, make_columns(6, temperature=0.9, top_p=0.9))


class TestEdits:
    def test_edited_logits_are_the_definitions_to_the_last_bit(self):
        """
        An id that penalties bring down to its neighbour's logit, in float32's roundings, ties with it and is drawn.
        """
        generator = torch.Generator().manual_seed(8)
        logits = torch.randn(400, 2, generator=generator) * 3
        edits = edits_of(
            {
                row: RowEdits(
                    prompt=(0,) * (row % 3 + 1),
                    output=(0,) * (row % 7),
                    repetition=1.1 + row / 300,
                    frequency=0.1 + row / 700,
                    presence=0.3 - row / 900,
                    bias=((0, row / 130),),
                )
                for row in range(400)
            }
        )
        logits[:, 1] = reference.edit(logits, edits)[:, 0]
        found = cpu_extension.sample(logits, make_columns(400, temperature=0.0), edits=edits)
        assert not found.token.any()

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_edited_rows_among_others_draw_what_is_defined(self, dtype):
        """
        Rows with and without edits, on several threads, all have the definition's tokens.
        """
        logits = torch.randn(60, 2001, generator=torch.Generator().manual_seed(7)).to(dtype)
        logits[:, 0] = 5.0
        rows = {
            row: RowEdits(
                prompt=(0, row),
                output=(0, 5, 5, row),
                repetition=1.3,
                frequency=0.2,
                bias=((0, 2.0), (2000, 1.0)) if row % 4 else (),
                banned=tuple(range(10, 1900, 3)),
            )
            for row in range(0, 60, 2)
        }
        columns = make_columns(60, temperature=0.8, top_p=0.9, top_k=[0, 0, 40] * 20)
        given = edits_of(rows)
        defined = reference.sample(logits, columns, edits=given)
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            found = cpu_extension.sample(logits, columns, edits=given)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(defined.token, found.token)
        assert defined.token.unique().numel() > 10

    def test_row_that_is_drawn_again_is_edited_again(self, redrawn):
        """
        A row that only float32 can decide is decided with its edits.
        """
        logits = torch.tensor([9.0, 0.4, 0.2, 0.2, 0.1, 0.1]).log().expand(100, -1)
        rows = {row: RowEdits(prompt=(1,), banned=(0,)) for row in range(100)}
        columns = make_columns(100, top_p=0.8)
        defined = reference.sample(logits, columns, edits=edits_of(rows))
        found = cpu_extension.sample(logits, columns, edits=edits_of(rows))
        assert torch.equal(defined.token, found.token)
        assert sum(redrawn) > 5

    @pytest.mark.parametrize("edit", [{"prompt": (7,)}, {"prompt": (1,), "bias": ((-1, 1.0),)}])
    def test_token_that_has_no_logit_is_an_error(self, edit):
        """
        An edit of an id outside the vocabulary is refused, naming the row, and touches no memory.
        """
        edits = edits_of({2: RowEdits(**edit)})
        with pytest.raises(IndexError, match="an edit of row 2 names a token outside the 7"):
            cpu_extension.sample(torch.zeros(4, 7), make_columns(4), edits=edits)

    @pytest.mark.parametrize(
        ("part", "changed"),
        [
            ("biases", {"row": [4]}),
            ("biases", {"row": [-1]}),
            ("penalties", {"history_len": [3]}),
            ("penalties", {"prompt_len": [3]}),
            ("penalties", {"prompt_len": [-1]}),
        ],
        ids=str,
    )
    def test_row_or_history_that_there_is_not_is_an_error(self, part, changed):
        """
        A bias of a row past the last, and lengths that a history does not have, are refused and touch no memory.
        """
        edits = edits_of({2: RowEdits(prompt=(1,), output=(1,), bias=((0, 1.0),))}, padding=0)
        of = {name: torch.tensor(values) for name, values in changed.items()}
        edits = replace(edits, **{part: replace(getattr(edits, part), **of)})
        with pytest.raises(
            IndexError, match=r"biases of rows|an edit of row 2 names .* its history"
        ):
            cpu_extension.sample(torch.zeros(4, 7), make_columns(4), edits=edits)


class TestUndecided:
    def test_row_that_rounding_could_decide_is_left_to_the_definitions_arithmetic(self, redrawn):
        """
        Ids with exactly top_p as the share of the mass above them are in or out as float32 says.
        """
        logits = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1]).log().expand(300, -1)
        for top_p in (0.4, 0.8):
            same(logits, make_columns(300, top_p=top_p))
        assert 20 < sum(redrawn) < 400

    def test_scores_that_differ_by_less_than_float32_holds_are_left_to_it(self, redrawn):
        """
        Rows with two ids of nearly the same score are left to float32: the last bit of their noise
        decides.
        """
        columns = make_columns(200, temperature=1.0)
        words = row_words(columns.seed, columns.position, columns.choice)
        noise = gumbel(words[:, :, None], torch.arange(2, dtype=torch.int32))
        steps = (torch.arange(200) - 100) * 1e-7
        logits = torch.stack((noise[:, 1] - noise[:, 0] + steps, torch.zeros(200)), dim=1)
        tokens = same(logits, columns)
        assert [0, 1] == tokens.unique().tolist()
        assert 150 < sum(redrawn)

    def test_ties_are_decided_in_cpp(self, redrawn):
        """
        Ids that tie in logit and noise tie in any arithmetic: the lowest is drawn, nothing is drawn again.
        """
        columns, vocab_size = make_columns(10), 30_000
        words = row_words(columns.seed, columns.position, columns.choice)
        u = uniform(words[:, :, None], torch.arange(vocab_size, dtype=torch.int32))
        ordered, order = u.sort(dim=1, stable=True)
        first = (ordered[:, 1:] == ordered[:, :-1]).int().argmax(dim=1, keepdim=True)
        tied = order.gather(1, torch.cat((first, first + 1), dim=1))
        assert torch.equal(*u.gather(1, tied).unbind(1))
        logits = torch.full((10, vocab_size), NEVER).scatter(1, tied, 3.0)
        assert torch.equal(tied[:, 0], same(logits, columns))
        assert [] == redrawn

    def test_few_rows_are_drawn_twice(self, redrawn):
        """
        Hardly any of hundreds of rows that ask for all cuts is left to PyTorch.
        """
        logits = torch.randn(400, 1000, generator=torch.Generator().manual_seed(6))
        same(logits, make_columns(400, temperature=0.8, top_p=0.9, top_k=500, min_p=0.01))
        assert 5 > sum(redrawn)


class TestArithmetic:
    def test_noise_is_as_near_as_is_taken_for_granted(self):
        """
        The definition's noise is within half of what is allowed for, for each of the 2^23 numbers.
        """
        for first in range(0, 2**23, 2**20):
            u = (np.arange(first, first + 2**20) + 0.5) * 2.0**-23
            exact = -np.log(-np.log(u))
            noise = torch.from_numpy(u).float().log_().neg_().log_().neg_()
            assert np.abs(noise.double().numpy() - exact).max() < SCORE_ERROR / 2

    def test_masses_are_as_near_as_is_taken_for_granted(self):
        """
        The definition's masses are within what is allowed for, of all scaled logits that have any.
        """
        scaled = torch.linspace(-29, 0, 200_001)
        exact = torch.exp(scaled.double()) * fixed_point.MASS_SCALE
        error = (fixed_point.mass(scaled).double() - exact).abs()
        assert bool((error <= exact * MASS_ERROR + 1).all())


class TestChoosing:
    def test_extension_is_chosen_and_taken_back(self):
        """
        The operation runs in C++ once that is chosen, and is given back to PyTorch.
        """
        load_library()
        for wanted, name in ((True, "cpu_extension"), (False, "sampler")):
            sampling.use_cpu_extension(wanted=wanted)
            assert f"kernels.sampling.{name}" == sampling._operation.on(CPU).__module__

    def test_no_rows_give_no_tokens(self):
        """
        An empty batch is not an error.
        """
        assert [] == cpu_extension.sample(torch.empty(0, 10), make_columns(0)).token.tolist()

    def test_rows_with_margins_are_the_definitions(self):
        """
        Rows with margins are drawn by the definition, which alone has margins.
        """
        logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(2))
        columns = make_columns(20)
        found = cpu_extension.sample(logits, columns, margin_eps=0.1)
        defined = reference.sample(logits, columns, margin_eps=0.1)
        assert torch.equal(defined.margin, found.margin)
