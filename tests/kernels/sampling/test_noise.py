"""The noise is Philox, spread over ids; uniform; and independent along every coordinate."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.sampling.noise.reference import (
    MAX_SPREAD,
    gumbel,
    mix32,
    philox4x32,
    row_words,
    uniform,
)
from tests.kernels.sampling.rows import chi_square, chi_square_limit, correlation

NUM_ROWS = 256
NUM_IDS = 1024
NO_CORRELATION = 4.5 / math.sqrt(
    NUM_ROWS * NUM_IDS
)  # 4.5 standard deviations of independent samples


def words_of(*, seed=0, position=0, choice=0, num_rows=NUM_ROWS, step=None):
    """Words of rows that differ in the coordinate named `step` alone."""
    columns = {"seed": seed, "position": position, "choice": choice}
    tensors = {name: torch.full((num_rows,), value) for name, value in columns.items()}
    if step is not None:
        tensors[step] += torch.arange(num_rows)
    return row_words(tensors["seed"], tensors["position"], tensors["choice"])


def numbers(words, num_ids=NUM_IDS):
    """Uniform numbers of each row over the first ids, [R, N]."""
    return uniform(words[:, :, None], torch.arange(num_ids, dtype=torch.int32))


def mix32_in_python(words, i):
    """`mix32`'s formula word by word in unbounded integers."""
    word = 0xFFFFFFFF
    w0, w1, w2, w3 = words
    x = (i * 0x9E3779B1 + w0) & word
    x = ((x ^ x >> 16) * 0x7FEB352D & word) ^ w1
    x = ((x ^ x >> 15) * 0x846CA68B + w2) & word
    return x ^ x >> 16 ^ w3


class TestPhilox:
    @pytest.mark.parametrize(
        ("counter", "key", "expected"),
        [
            ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
            (
                [0xFFFFFFFF] * 4,
                [0xFFFFFFFF] * 2,
                [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
            ),
            (
                [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
                [0xA4093822, 0x299F31D0],
                [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            ),
        ],
        ids=["zeros", "ones", "pi"],
    )
    def test_known_answers_hold(self, counter, key, expected):
        """
        Philox4x32-10 gives the values published with Random123.
        """
        words = philox4x32(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])
        assert expected == words[:, 0].tolist()

    def test_key_is_the_seed_and_counter_is_position_then_choice(self):
        """
        A row's words are Philox with the seed's low and high word as key and (position, choice, 0, 0) as counter.
        """
        seed = 0x299F31D0_A4093822
        words = row_words(torch.tensor([seed]), torch.tensor([0x85A308D3]), torch.tensor([5]))
        counter = torch.tensor([[0x85A308D3], [5], [0], [0]])
        key = torch.tensor([[0xA4093822], [0x299F31D0]])
        assert torch.equal(philox4x32(counter, key), words.long() & 0xFFFFFFFF)

    def test_seed_with_top_bit_set_is_one_of_its_own(self):
        """
        A negative int64 carries the bits of a uint64 seed: its top bit changes the words.
        """
        plain, negative = words_of(seed=5, num_rows=1), words_of(seed=5 - 2**63, num_rows=1)
        assert not torch.equal(plain, negative)


class TestMix32:
    @pytest.mark.parametrize("num_ids", [1, 7, 8, 33])
    def test_tensors_agree_with_python_integers(self, num_ids):
        """
        32-bit wrap-around arithmetic on tensors gives exactly the documented formula.
        """
        words = words_of(seed=12345, step="position", num_rows=5)
        ids = torch.arange(num_ids, dtype=torch.int32) * 4999
        got = mix32(words[:, :, None], ids) & 0xFFFFFFFF
        expected = [
            [mix32_in_python([int(w) & 0xFFFFFFFF for w in words[:, r]], int(i)) for i in ids]
            for r in range(5)
        ]
        assert expected == (got.long() & 0xFFFFFFFF).tolist()

    def test_no_two_ids_of_a_row_share_their_bits(self):
        """
        mix32 is a permutation of 32-bit words for one row.
        """
        words = words_of(seed=3, num_rows=1)
        bits = mix32(words, torch.arange(200_000, dtype=torch.int32))
        assert 200_000 == bits.unique().numel()


class TestUniform:
    @pytest.mark.parametrize("step", ["seed", "position", "choice"])
    def test_numbers_fill_the_unit_interval_evenly(self, step):
        """
        Over neighbouring rows and ids the numbers pass a chi-square test with 256 cells.
        """
        u = numbers(words_of(seed=99, position=1000, step=step))
        counts = torch.bincount((u.flatten() * 256).long(), minlength=256).double()
        expected = torch.full_like(counts, u.numel() / 256)
        assert chi_square_limit(255) > chi_square(counts, expected)

    @pytest.mark.parametrize("step", ["seed", "position", "choice"])
    def test_one_id_is_even_over_rows(self, step):
        """
        Followed along one coordinate, a single id's numbers are uniform too.
        """
        u = numbers(words_of(seed=4, position=77, step=step, num_rows=20_000), num_ids=3)
        for i in range(3):
            counts = torch.bincount((u[:, i] * 64).long(), minlength=64).double()
            expected = torch.full_like(counts, u.shape[0] / 64)
            assert chi_square_limit(63) > chi_square(counts, expected)

    def test_pairs_of_neighbouring_ids_fill_the_square_evenly(self):
        """
        (u_i, u_i+1) is uniform on the unit square: a chi-square test with 16 x 16 cells.
        """
        u = numbers(words_of(seed=21, step="position"))
        cells = (u[:, :-1] * 16).long() * 16 + (u[:, 1:] * 16).long()
        counts = torch.bincount(cells.flatten(), minlength=256).double()
        expected = torch.full_like(counts, cells.numel() / 256)
        assert chi_square_limit(255) > chi_square(counts, expected)

    def test_extremes_stay_inside_the_open_interval(self):
        """
        The smallest and largest possible numbers are 2^-24 and 1 - 2^-24, so noise is finite.
        """
        u = (torch.tensor([0, 2**23 - 1]).float() + 0.5) * 2.0**-23
        assert [2.0**-24, 1 - 2.0**-24] == u.tolist()
        low, high = (-torch.log(-torch.log(u))).tolist()
        assert MAX_SPREAD > high - low
        assert [-2.812, 16.636] == pytest.approx([low, high], abs=1e-3)  # three decimals

    def test_noise_has_the_gumbel_distribution(self):
        """
        exp(-exp(-g)) of the noise is uniform again.
        """
        ids = torch.arange(NUM_IDS, dtype=torch.int32)
        g = gumbel(words_of(seed=8, step="position")[:, :, None], ids)
        counts = torch.bincount((torch.exp(-torch.exp(-g)) * 128).long().flatten(), minlength=128)
        expected = torch.full((128,), g.numel() / 128, dtype=torch.float64)
        assert chi_square_limit(127) > chi_square(counts.double(), expected)


class TestIndependence:
    @pytest.mark.parametrize("step", ["seed", "position", "choice"])
    @pytest.mark.parametrize("distance", [1, 2, 64])
    def test_rows_apart_in_one_coordinate_are_uncorrelated(self, step, distance):
        """
        Rows that differ a little in seed, position or choice share nothing.
        """
        u = numbers(words_of(seed=31, position=500, step=step, num_rows=NUM_ROWS + distance))
        assert NO_CORRELATION > abs(correlation(u[distance:], u[:-distance]))

    @pytest.mark.parametrize("distance", [1, 2, 64, 256])
    def test_ids_apart_are_uncorrelated(self, distance):
        """
        Neighbouring ids of one row share nothing.
        """
        u = numbers(words_of(seed=17, step="position"), num_ids=NUM_IDS + distance)
        assert NO_CORRELATION > abs(correlation(u[:, distance:], u[:, :-distance]))

    @pytest.mark.parametrize("shift", [-2, -1, 1, 2])
    def test_no_row_is_its_neighbour_shifted_by_ids(self, shift):
        """
        The next position's numbers are not this position's numbers moved along the vocabulary.
        """
        u = numbers(words_of(seed=17, step="position", num_rows=NUM_ROWS + 1), num_ids=NUM_IDS + 2)
        moved = u[1:].roll(shift, dims=1)[:, 2:-2]
        assert NO_CORRELATION > abs(correlation(moved, u[:-1, 2:-2]))

    @pytest.mark.parametrize("step", ["seed", "position", "choice"])
    def test_check_would_see_an_ignored_coordinate(self, step):
        """
        Noise that ignored a coordinate would fail the correlation test above at once.
        """
        honest = numbers(words_of(seed=31, step=step, num_rows=2), num_ids=64)
        ignorant = numbers(words_of(seed=31, num_rows=2), num_ids=64)
        assert correlation(ignorant[0], ignorant[1]) == pytest.approx(1.0)
        assert 0.6 > abs(correlation(honest[0], honest[1]))
