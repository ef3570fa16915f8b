"""The Triton sampler draws the definition's tokens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.sampling import reference, triton_kernel, triton_search
from kernels.sampling.noise import reference as noise
from kernels.sampling.noise.triton_kernel import gumbel, random_bits
from kernels.sampling.triton_kernel import Needs, draw
from kernels.sampling.tuning import Cut, SamplingTiles
from tests.kernels.sampling.rows import make_columns, random_logits
from tests.kernels.triton.sampling.sampling_scenes import mixed_columns


def drawn(logits, columns, device, needs=None, cut=None):
    """Draw, and return tokens and validity as lists."""
    needs = needs or Needs.of(columns, logits.shape[1])
    token, valid = draw(logits.to(device), columns.to(device), needs, cut)
    return token.tolist(), valid.tolist()


def defined(logits, columns):
    """Draw the same by the definition."""
    result = reference.sample(logits, columns)
    return result.token.tolist(), result.valid.tolist()


@triton.jit
def _noise_kernel(seed, position, choice, bits, noise, WIDTH: tl.constexpr):
    row, ids = tl.program_id(0), tl.arange(0, WIDTH)
    random = random_bits(
        tl.load(seed + row), tl.load(position + row), tl.load(choice + row), ids * 4999
    )
    tl.store(bits + row * WIDTH + ids, random.to(tl.int32, bitcast=True))
    tl.store(noise + row * WIDTH + ids, gumbel(random))


def twins(scores):
    """Return row, lower id and higher id of neighbours in order that have equal scores."""
    found = []
    for row, values in enumerate(scores):
        ordered, ids = values.sort(stable=True)
        places = (ordered[1:] == ordered[:-1]).nonzero()[:, 0].tolist()
        found += [(row, int(ids[place]), int(ids[place + 1])) for place in places]
    return found


class TestNoise:
    def test_bits_are_those_of_the_cpu(self, device):
        """
        Kernels have the same random bits for seeds of 64 bits, positions and choices of 32 and any
        id, and noise of the same size to a few roundings.
        """
        seed = torch.tensor([0, 7, -1, 5 - 2**63, 0x299F31D0_A4093822], device=device)
        position = torch.tensor([0, 1, 2**32 - 1, 2**31, 77], device=device)
        choice = torch.tensor([0, 5, 2**32 - 1, 1, 0], device=device)
        bits = torch.empty(5, 64, dtype=torch.int32, device=device)
        found = torch.empty(5, 64, device=device)
        _noise_kernel[(5,)](seed, position, choice, bits, found, WIDTH=64)
        words = noise.row_words(seed, position, choice)[:, :, None]
        ids = torch.arange(64, dtype=torch.int32, device=device) * 4999
        assert torch.equal(noise.mix32(words, ids), bits)
        # Of two logarithms the inner one is a few roundings of 6e-8 off in relation to its size, which
        # the outer one makes an absolute error; noise goes up to 17, with roundings of its own size.
        torch.testing.assert_close(noise.gumbel(words, ids), found, rtol=1e-6, atol=1e-6)


class TestTokens:
    @pytest.mark.slow
    @pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
    @pytest.mark.parametrize("vocab_size", [1, 11, 130])
    def test_every_kind_of_row_draws_as_defined(self, device, vocab_size, spread):
        """
        Greedy rows, noise, top_k, top_p and both, of flat and of peaked logits, in one batch.
        """
        logits, columns = random_logits(12, vocab_size, spread=spread), mixed_columns(12)
        if vocab_size > 1:
            logits[:, vocab_size // 2] = float("-inf")
        assert defined(logits, columns) == drawn(logits, columns, device)

    @pytest.mark.slow
    @pytest.mark.parametrize("num_rows", [3, 17])
    def test_rows_of_several_splits_draw_as_defined(self, device, num_rows):
        """
        A row that several programs look at, however finely it is cut, draws the same.
        """
        cut = Cut.into(SamplingTiles(tile=64, split=64 if num_rows == 3 else 128), 333)
        logits, columns = random_logits(num_rows, 333), mixed_columns(num_rows)
        needs = Needs(top_k=False, top_p=False, min_p=False)
        columns.top_p[:] = 1.0
        columns.top_k[columns.top_k > 1] = 0
        assert defined(logits, columns) == drawn(logits, columns, device, needs, cut)

    @pytest.mark.slow
    def test_min_p_cuts_before_the_others(self, device):
        """
        min_p, alone and before top_k and top_p, keeps what it is defined to keep.
        """
        logits = random_logits(12, 90)
        columns = mixed_columns(12, min_p=[0.0, 0.02, 0.3, 1.0] * 3)
        assert defined(logits, columns) == drawn(logits, columns, device)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_widened_first(self, device, dtype):
        """
        Narrow logits, which often tie, draw what their exact float32 values draw.
        """
        logits, columns = random_logits(6, 90).to(dtype), mixed_columns(6)
        assert defined(logits.float(), columns) == drawn(logits, columns, device)

    @pytest.mark.slow
    def test_rows_may_lie_apart(self, device):
        """
        Logits may be some columns of a wider buffer: what lies between rows is not read.
        """
        wide = torch.full((6, 100), float("nan"))
        wide[:, :90] = random_logits(6, 90)
        columns = mixed_columns(6)
        expected = defined(wide[:, :90], columns)
        token, valid = draw(wide.to(device)[:, :90], columns.to(device), Needs())
        assert expected == (token.tolist(), valid.tolist())

    def test_ties_go_to_the_lowest_id(self, device):
        """
        The lowest id wins among equal best logits, across tiles and splits.
        """
        logits = torch.zeros(3, 2100)
        logits[1, 2:] = 1.0
        logits[2, [2000, 2099]] = 5.0
        assert [0, 2, 2000] == drawn(logits, make_columns(3, temperature=0.0), device)[0]

    def test_low_temperatures_count_as_one_hundredth(self, device):
        """
        Temperatures between 0 and 0.01 draw exactly as 0.01 does.
        """
        logits = random_logits(8, 40, spread=0.02)
        low = drawn(logits, make_columns(8, temperature=1e-6), device)
        assert drawn(logits, make_columns(8, temperature=0.01), device) == low
        assert logits.argmax(dim=1).tolist() != low[0]

    @pytest.mark.slow
    def test_equal_scores_go_to_the_lowest_id(self, device):
        """
        The lower of two ids with the same logit and the same noise is drawn, in one thread's hands
        or in two programs'.
        """
        cut = Cut.into(SamplingTiles(tile=16, split=2048), 4096)
        columns = make_columns(40)
        words = noise.row_words(columns.seed, columns.position, columns.choice)[:, :, None]
        found = noise.gumbel(words, torch.arange(4096, dtype=torch.int32))
        pairs = twins(found)
        same_program = [(row, a, b) for row, a, b in pairs if a // 2048 == b // 2048]
        same_thread = next(pair for pair in same_program if pair[1] % 16 == pair[2] % 16)
        apart = next(pair for pair in pairs if pair not in same_program)
        rows, first, second = zip(same_thread, apart, strict=True)
        logits = torch.full((2, 4096), float("-inf"))
        logits[[0, 1], first] = 0.0
        logits[[0, 1], second] = 0.0
        chosen = columns.select(torch.tensor(rows))
        assert list(first) == drawn(logits, chosen, device, cut=cut)[0]

    @pytest.mark.slow
    def test_kernels_for_what_nobody_needs_change_nothing(self, device):
        """
        Asking for every cut gives the same tokens as asking for those that some row needs.
        """
        logits, columns = random_logits(4, 50), make_columns(4, temperature=[0.0, 1.0, 0.5, 0.0])
        assert Needs(top_k=False, top_p=False, min_p=False) == Needs.of(columns, 50)
        assert drawn(logits, columns, device) == drawn(logits, columns, device, Needs())

    def test_no_rows_give_no_tokens(self, device):
        """
        An empty batch is not an error.
        """
        assert ([], []) == drawn(torch.empty(0, 10), make_columns(0), device)


class TestInvalidRows:
    @pytest.mark.slow
    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    def test_poisoned_rows_fail_alone(self, device, poison):
        """
        NaN or +infinity makes a row of any kind invalid with token 0; the others draw what they would without it.
        """
        logits, columns = random_logits(12, 60), mixed_columns(12)
        clean = drawn(logits, columns, device)[0]
        logits[::2, 17] = poison
        token, valid = drawn(logits, columns, device)
        assert [False, True] * 6 == valid
        assert [0] * 6 == token[::2]
        assert clean[1::2] == token[1::2]

    @pytest.mark.slow
    def test_masked_rows_are_valid_while_an_id_is_left(self, device):
        """
        -infinity is a legal mask as long as one id is left.
        """
        logits = torch.full((12, 60), float("-inf"))
        logits[1::2, 9] = -3.0
        token, valid = drawn(logits, mixed_columns(12), device)
        assert [False, True] * 6 == valid
        assert [0, 9] * 6 == token


class TestInvariance:
    @pytest.mark.slow
    def test_row_draws_the_same_alone_and_in_any_batch(self, device):
        """
        A row's token does not depend on its neighbours, its place or how many rows there are.
        """
        logits, columns = random_logits(18, 150), mixed_columns(18)
        together = drawn(logits, columns, device)[0]
        order = torch.randperm(18, generator=torch.Generator().manual_seed(3))
        shuffled = drawn(logits[order], columns.select(order), device)[0]
        some = [2, 3, 4]
        alone = [
            drawn(logits[r : r + 1], columns.select(torch.tensor([r])), device)[0][0] for r in some
        ]
        assert [together[r] for r in order.tolist()] == shuffled
        assert [together[r] for r in some] == alone


class Recorder:
    """Stands for a kernel and notes how it is launched."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            plain = [arg for arg in args if not isinstance(arg, torch.Tensor)]
            self.launches.append((self.name, grid, plain, kwargs))

        return launch


class NothingIsRead(TorchDispatchMode):
    """Fails where a tensor's value decides what the host does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in {
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten._to_copy,
        }
        return func(*args, **(kwargs or {}))


class TestGraphs:
    def launches(self, columns, monkeypatch):
        """Return the launches of `draw` for columns on its device."""
        found = []
        for module in (triton_kernel, triton_search):
            names = [name for name in vars(module) if name.endswith("_kernel")]
            assert names
            for name in names:
                monkeypatch.setattr(module, name, Recorder(name, found))
        with NothingIsRead():
            draw(torch.zeros(len(columns.seed), 5000), columns, Needs())
        return found

    def test_launches_depend_on_shapes_alone(self, monkeypatch):
        """
        Batches of one shape launch the same kernels over the same grids, whatever their rows ask for, and no value comes to the host: a graph holds them.
        """
        greedy = make_columns(300, temperature=0.0, min_p=0.0)
        first = self.launches(greedy, monkeypatch)
        assert first == self.launches(mixed_columns(300, min_p=0.5), monkeypatch)
        searches = ["_weigh_kernel", "_collect_kernel", "_search_kernel"] * 4
        names = ["_best_kernel", "_greedy_kernel", *searches, "_draw_kernel", "_choose_kernel"]
        assert names == [launch[0] for launch in first]


FAR_ROWS = """
import torch
from kernels.sampling import reference
from kernels.sampling.triton_kernel import Needs, draw
from tests.kernels.sampling.rows import random_logits
from tests.kernels.triton.sampling.sampling_scenes import mixed_columns

stride = 1_100_000_000
assert 2 * stride > 2**31
near, columns = random_logits(3, 40).half(), mixed_columns(3, min_p=0.01)
far = torch.empty(2 * stride + 40, dtype=torch.float16).as_strided((3, 40), (stride, 1))
far.copy_(near)
assert torch.equal(reference.sample(near, columns).token, draw(far, columns, Needs())[0])
"""


@pytest.mark.slow
class TestOffsets:
    def test_rows_beyond_32_bits_are_read_where_they_are(self):
        """
        Rows more than 2**31 elements apart draw like rows side by side.
        """
        # An offset that wraps reads outside the process's memory, so a process of its own does it.
        done = subprocess.run(
            [sys.executable, "-c", FAR_ROWS],
            env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
