"""The sampler draws from the exact distribution, purely from its arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.sampling import SamplingColumns, reference, sample
from kernels.sampling import sampler as sampler_module
from tandem import sampling_params
from tests.kernels.sampling.edit_oracle import RowEdits, edits_of
from tests.kernels.sampling.rows import (
    chi_square,
    chi_square_limit,
    make_columns,
    random_logits,
)

pytestmark = pytest.mark.usefixtures("each_way")

NUM_DRAWS = 10_000


class TestDistribution:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    @pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (6, 0.7)], ids=str)
    def test_frequencies_match_exact_probabilities(self, temperature, top_k, top_p):
        """
        Over many positions the tokens pass a chi-square test against softmax over the kept set, and none lies outside it.
        """
        logits = random_logits(1, 12, spread=1.5)
        columns = make_columns(NUM_DRAWS, temperature=temperature, top_k=top_k, top_p=top_p)
        tokens = sample(logits.expand(NUM_DRAWS, -1), columns).token
        ordered = (logits[0].double() / temperature).softmax(0).sort(descending=True)
        weights = ordered.values[: top_k or None]
        below = weights.cumsum(0) / weights.sum() < top_p
        size = min(int(below.sum()) + 1, len(weights))
        expected = weights[:size] / weights[:size].sum() * NUM_DRAWS
        observed = torch.bincount(tokens, minlength=12).double()[ordered.indices]
        assert 0 == observed[size:].sum()
        assert chi_square_limit(size - 1) > chi_square(observed[:size], expected)

    def test_check_would_see_a_wrong_temperature(self):
        """
        Draws at T = 1.1 fail the chi-square test of T = 1: the test above has the power it needs.
        """
        logits = random_logits(1, 12, spread=1.5)
        columns = make_columns(NUM_DRAWS, temperature=1.1)
        tokens = sample(logits.expand(NUM_DRAWS, -1), columns).token
        expected = logits[0].double().softmax(0) * NUM_DRAWS
        observed = torch.bincount(tokens, minlength=12).double()
        assert chi_square_limit(11) < chi_square(observed, expected)

    def test_seeds_draw_like_positions(self):
        """
        Many seeds at one position have the same distribution as many positions of one seed.
        """
        logits = random_logits(1, 12, spread=1.5)
        columns = make_columns(NUM_DRAWS, seed=list(range(NUM_DRAWS)))
        columns = SamplingColumns(
            temperature=columns.temperature,
            top_k=columns.top_k,
            top_p=columns.top_p,
            seed=columns.seed,
            position=torch.full((NUM_DRAWS,), 40),
            choice=columns.choice,
        )
        tokens = sample(logits.expand(NUM_DRAWS, -1), columns).token
        expected = logits[0].double().softmax(0) * NUM_DRAWS
        observed = torch.bincount(tokens, minlength=12).double()
        assert chi_square_limit(11) > chi_square(observed, expected)

    @pytest.mark.parametrize("coordinate", ["seed", "position", "choice"])
    def test_every_coordinate_of_the_noise_changes_the_draw(self, coordinate):
        """
        A flat row's token depends on seed, on position and on choice.
        """
        columns = make_columns(64)
        values = {
            name: getattr(columns, name).clone()
            for name in ("temperature", "top_k", "top_p", "seed", "position", "choice")
        }
        values["position"][:] = 3
        values[coordinate] += torch.arange(64)
        tokens = sample(torch.zeros(64, 1000), SamplingColumns(**values)).token
        assert 55 < tokens.unique().numel()


class TestGreedy:
    def test_zero_temperature_takes_the_best_whatever_the_seed(self):
        """
        Greedy rows have no noise.
        """
        logits = random_logits(9, 50)
        first = sample(logits, make_columns(9, temperature=0.0, seed=1)).token
        second = sample(logits, make_columns(9, temperature=0.0, seed=2, top_p=0.5)).token
        assert torch.equal(logits.argmax(1), first)
        assert torch.equal(logits.argmax(1), second)

    @pytest.mark.parametrize("vocab_size", [5, 64, 4099])
    def test_ties_go_to_the_lowest_id(self, vocab_size):
        """
        The lowest id wins among equal best logits, at any width.
        """
        logits = torch.zeros(3, vocab_size)
        logits[1, 2:] = 1.0
        logits[2, [3, vocab_size - 1]] = 5.0
        assert [0, 2, 3] == sample(logits, make_columns(3, temperature=0.0)).token.tolist()

    @pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
    def test_top_k_one_equals_argmax_at_any_temperature(self, temperature):
        """
        top_k = 1 is greedy, ties included.
        """
        logits = random_logits(40, 30).round()
        columns = make_columns(40, temperature=temperature, top_k=1)
        assert torch.equal(logits.argmax(1), sample(logits, columns).token)

    def test_kernels_and_requests_have_one_smallest_temperature(self):
        """
        The number stands in two packages that do not import each other, and is the same.
        """
        assert sampling_params.MIN_TEMPERATURE == reference.MIN_TEMPERATURE

    def test_low_temperatures_count_as_one_hundredth(self):
        """
        Temperatures between 0 and 0.01 draw exactly as 0.01 does.
        """
        logits = random_logits(200, 30, spread=0.02)
        low = sample(logits, make_columns(200, temperature=1e-6)).token
        assert torch.equal(sample(logits, make_columns(200, temperature=0.01)).token, low)
        assert not torch.equal(logits.argmax(1), low)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("vocab_size", [1023, 2048, 2049, 5000])
    def test_long_rows_are_searched_to_their_last_id(self, vocab_size, dtype):
        """
        The best id is found wherever it stands, the lowest among equals, and NaN is not overlooked.
        """
        places = [0, 1, vocab_size // 2, vocab_size - 2, vocab_size - 1]
        logits = random_logits(len(places) + 2, vocab_size).to(dtype)
        for row, place in enumerate(places):
            logits[row, place] = 40.0
        logits[-2, places] = 40.0
        logits[-1, vocab_size // 2 :: 700] = float("nan")
        found = sample(logits, make_columns(len(logits), temperature=0.0))
        assert [*places, 0, 0] == found.token.tolist()
        assert [True] * (len(places) + 1) + [False] == found.valid.tolist()
        logits[:-1, places] = -5.0
        truth = logits[:-1].float().argmax(dim=1).tolist()
        assert truth == sample(logits[:-1], make_columns(6, temperature=0.0)).token.tolist()


class TestPurity:
    def mixed(self, num_rows):
        kinds = [(1.0, 0, 1.0), (0.0, 0, 1.0), (0.7, 40, 0.9), (1.3, 0, 0.95), (2.0, 7, 1.0)]
        rows = [kinds[r % len(kinds)] for r in range(num_rows)]
        return make_columns(
            num_rows,
            temperature=[r[0] for r in rows],
            top_k=[r[1] for r in rows],
            top_p=[r[2] for r in rows],
            seed=[1000 + 17 * r for r in range(num_rows)],
            first_position=90,
        )

    @pytest.mark.parametrize("vocab_size", [37, 9001])
    def test_row_draws_the_same_alone_and_in_any_batch(self, vocab_size):
        """
        A row's token does not depend on its neighbours or its place among them.
        """
        logits, columns = random_logits(10, vocab_size), self.mixed(10)
        together = sample(logits, columns).token
        alone = [
            sample(logits[r : r + 1], columns.select(torch.tensor([r]))).token for r in range(10)
        ]
        order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
        shuffled = sample(logits[order], columns.select(order)).token
        assert torch.equal(together, torch.cat(alone))
        assert torch.equal(together[order], shuffled)

    @pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
    @pytest.mark.parametrize("vocab_size", [11, 3001])
    def test_quick_way_equals_the_definition(self, vocab_size, spread):
        """
        Skipping hopeless ids, prefixes instead of sorts and tiles change no token.
        """
        logits, columns = random_logits(60, vocab_size, spread=spread), self.mixed(60)
        logits[:, vocab_size // 2] = float("-inf")
        assert torch.equal(reference.sample(logits, columns).token, sample(logits, columns).token)

    def test_both_ways_of_adding_noise_are_taken_and_agree(self, monkeypatch):
        """
        Noise for the few ids that can win, and noise for all, give the same tokens.
        """
        logits, columns = random_logits(40, 800, spread=10.0), make_columns(40, seed=5)
        monkeypatch.setattr(sampler_module, "_SPARSE_SHARE", 0)  # every tile counts as sparse
        few = sampler_module.sample(logits, columns).token
        monkeypatch.setattr(sampler_module, "_SPARSE_SHARE", 10**9)  # none does
        assert torch.equal(few, sampler_module.sample(logits, columns).token)

    def test_logits_are_not_changed(self):
        """
        The caller's logits stay as they were.
        """
        logits = random_logits(6, 100)
        before = logits.clone()
        sample(logits, self.mixed(6))
        assert torch.equal(before, logits)

    def test_half_precision_draws_as_its_float32_copy(self):
        """
        bfloat16 logits are widened first, so they draw what their exact float32 values draw.
        """
        logits = random_logits(30, 500).bfloat16()
        columns = self.mixed(30)
        assert torch.equal(sample(logits.float(), columns).token, sample(logits, columns).token)


class TestInvalidRows:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("filters", [(0, 1.0), (3, 1.0), (0, 0.9), (3, 0.9)], ids=str)
    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    def test_poisoned_row_fails_alone(self, temperature, filters, poison):
        """
        NaN or +infinity makes its row invalid with token 0; the other rows draw what they would without it.
        """
        logits = random_logits(4, 300)
        columns = make_columns(4, temperature=temperature, top_k=filters[0], top_p=filters[1])
        clean = sample(logits, columns).token
        poisoned = logits.clone()
        poisoned[2, 17] = poison
        result = sample(poisoned, columns)
        assert [True, True, False, True] == result.valid.tolist()
        assert [*clean[:2].tolist(), 0, int(clean[3])] == result.token.tolist()
        assert result.valid.equal(reference.sample(poisoned, columns).valid)

    def test_fully_masked_row_is_invalid_and_partly_masked_is_not(self):
        """
        -infinity is a legal mask as long as one id is left.
        """
        logits = torch.full((2, 40), float("-inf"))
        logits[1, 9] = -3.0
        for temperature in (0.0, 1.0):
            result = sample(logits, make_columns(2, temperature=temperature, top_p=0.9))
            assert [False, True] == result.valid.tolist()
            assert [0, 9] == result.token.tolist()

    def test_huge_logits_do_not_overflow(self):
        """
        Logits near float32's limits divided by a small temperature stay comparable.
        """
        logits = torch.tensor([[3e38, -3e38, 3.0e38]])
        result = sample(logits, make_columns(1, temperature=0.01))
        assert [True] == result.valid.tolist()
        assert result.token.tolist() in ([0], [2])


class TestArguments:
    def test_no_rows_give_no_tokens(self):
        """
        An empty batch is not an error.
        """
        assert [] == sample(torch.empty(0, 10), make_columns(0)).token.tolist()

    def test_wrong_shape_or_type_is_named(self):
        """
        The error says which argument is wrong and what it should be.
        """
        with pytest.raises(ValueError, match=r"logits must be floating of shape \[R, V\]"):
            sample(torch.zeros(4), make_columns(4))
        with pytest.raises(ValueError, match=r"temperature must be torch.float32 of shape \[2\]"):
            sample(torch.zeros(2, 5), make_columns(3))

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (
                {"min_p": torch.zeros(3, dtype=torch.float64)},
                "min_p must be torch.float32 of shape",
            ),
            (
                {"num_logprobs": torch.zeros(2, dtype=torch.int64)},
                r"num_logprobs .* of shape \[3\]",
            ),
            ({"biases": {"value": [1.0, 2.0]}}, r"value must be torch.float32 of shape \[1\]"),
            ({"penalties": {"presence": [1]}}, r"presence must be torch.float32 of shape \[1\]"),
            ({"penalties": {"history": [[1.0, 2.0]]}}, r"history must be torch.int32 of shape"),
        ],
        ids=lambda given: "-".join(given) if isinstance(given, dict) else None,
    )
    def test_what_edits_and_questions_do_not_have_is_named(self, given, words):
        """
        Edits and questions that are not of the rows there are, or not of their types, are refused before anything reads them.
        """
        edits = edits_of({1: RowEdits(prompt=(0,), output=(1,), bias=((2, 1.0),))}, padding=0)
        made = {
            name: replace(
                getattr(edits, name), **{key: torch.tensor(of) for key, of in given[name].items()}
            )
            for name in ("biases", "penalties")
            if name in given
        }
        columns = replace(make_columns(3), min_p=given.get("min_p"))
        with pytest.raises(ValueError, match=words):
            sample(
                torch.zeros(3, 7),
                columns,
                edits=replace(edits, **made),
                num_logprobs=given.get("num_logprobs"),
            )
