"""Decode attention in Triton: against the definition, and a row's bits against its neighbours."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
from torch import Tensor

from kernels.paged_attention import triton_decode
from kernels.paged_attention.triton_decode import allocate_scratch, decode_attention
from kernels.paged_attention.tuning import DecodeTuning, decode_splits, decode_tuning
from tests.kernels.attention_error import assert_errs_little, attended
from tests.kernels.triton.paged_attention.decode_scenes import DecodeScene, Heads, decode_scene

INTERPRETED = triton.knobs.runtime.interpret
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""About one rounding of outputs below 4; the sums are float32's."""

DTYPES = [torch.float32, torch.float16]
if not INTERPRETED:  # the interpreter multiplies the bit patterns of bfloat16
    DTYPES.append(torch.bfloat16)

TINY = DecodeTuning(tile=16, num_warps=4, num_stages=2, min_chunk=32, max_chunks=3)
"""Short rows have several chunks, and rows over 96 positions chunks of more than two tiles."""

MQA = Heads(num_heads=2, num_kv_heads=1)


def name(value: object) -> str | None:
    if isinstance(value, Heads):
        group = f"H{value.num_heads}K{value.num_kv_heads}"
        return f"{group}D{value.head_dim}b{value.block_size}-{str(value.dtype)[6:]}"
    return None


def attend(
    scene: DecodeScene,
    scale: float = 0.125,
    window: int | None = None,
    num_splits: int | None = None,
    tuning: DecodeTuning | None = TINY,
) -> Tensor:
    out = torch.full(scene.query.shape, float("nan"), dtype=scene.query.dtype)
    return decode_attention(
        *scene.arguments,
        scale=scale,
        window=window,
        num_splits=num_splits,
        tuning=tuning,
        out=out.to(scene.query.device),
    )


@pytest.fixture(scope="module")
def by_blocks_of_48(device) -> Tensor:
    """Return what rows of three lengths give from a cache with blocks of 48."""
    return attend(decode_scene([1, 65, 140], Heads(block_size=48), device))


class TestDefinition:
    @pytest.mark.parametrize("num_splits", [1, 2])
    @pytest.mark.parametrize(
        ("heads", "window"),
        [
            (Heads(), None),
            (Heads(block_size=7, head_dim=80, dtype=torch.float16), 40),
            (Heads(num_heads=3, num_kv_heads=1, block_size=64), 16),
        ],
        ids=name,
    )
    def test_matches(self, heads: Heads, window: int | None, num_splits: int, device):
        """
        Shuffled blocks give the definition's values, with NaN in all that is not the row's.
        """
        scene = decode_scene([1, 33, 70], heads, device)
        found = attend(scene, window=window, num_splits=num_splits)
        error = (found.float() - scene.expected(0.125, window)).abs().max()
        assert error <= TOLERANCE[heads.dtype]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("head_dim", "window", "dtype"),
        [
            (head_dim, window, DTYPES[(row + column) % len(DTYPES)])
            for row, head_dim in enumerate((64, 80, 96, 128, 256))
            for column, window in enumerate((None, 1, 50))
        ],
        ids=str,
    )
    def test_every_head_size_matches(self, dtype, head_dim: int, window: int | None, device):
        """
        Each head size with each number type and each window, as the table cuts it, gives the
        definition's values.
        """
        heads = Heads(head_dim=head_dim, block_size=32, dtype=dtype)
        scene = decode_scene([5, 150, 300], heads, device)
        found = attend(scene, window=window, tuning=None, num_splits=2)
        error = (found.float() - scene.expected(0.125, window)).abs().max()
        assert error <= TOLERANCE[dtype]

    @pytest.mark.slow
    @pytest.mark.parametrize("block_size", [1, 3, 16, 24, 32, 64, 100, 128, 256])
    def test_every_block_size_gives_the_same_bits(self, block_size: int, by_blocks_of_48, device):
        """
        The size of the cache's blocks, a power of two or not, changes no bit.
        """
        scene = decode_scene([1, 65, 140], Heads(block_size=block_size), device)
        found = attend(scene)
        assert torch.equal(by_blocks_of_48, found)
        assert (found - scene.expected(0.125)).abs().max() <= TOLERANCE[torch.float32]

    @pytest.mark.parametrize("num_heads", [1, 7, 20], ids="H{}K1".format)
    def test_any_group_is_packed(self, num_heads: int, device):
        """
        A key head serves any number of query heads, also more than a program takes at once.
        """
        scene = decode_scene([20], Heads(num_heads=num_heads, num_kv_heads=1), device)
        error = (attend(scene) - scene.expected(0.125)).abs().max()
        assert error <= TOLERANCE[torch.float32]

    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    def test_error_is_what_the_arithmetic_allows(self, dtype, device):
        """
        On the same rounded numbers 16 bits err by float32's roundings, one of each weight and one of the result.
        """
        heads = Heads(num_heads=2, num_kv_heads=2, block_size=90, dtype=dtype)
        scene = decode_scene([90], heads, device)
        key, value = scene.kv_cache[scene.block_table[0, 0].long()].unbind(1)
        seen = torch.ones((1, 90), dtype=torch.bool, device=device)
        expected = attended(scene.query, key, value, seen, scale=0.125, weight_dtype=dtype)
        assert_errs_little(expected, attend(scene))

    def test_queries_may_be_part_of_a_wider_row(self, device):
        """
        Queries are taken from a fused projection's output as they lie there.
        """
        scene = decode_scene([20, 3], MQA, device)
        wide = torch.cat((scene.query, torch.full_like(scene.query, float("nan"))), dim=1)
        strided = DecodeScene(wide[:, :2], *scene.arguments[1:])
        assert torch.equal(attend(scene), attend(strided))


class TestPadding:
    @pytest.mark.parametrize("num_splits", [1, 2])
    def test_padding_rows_are_zeros(self, num_splits: int, device):
        """
        A row of length 0 becomes zeros, whatever the dummy block and the scratch hold.
        """
        scene = decode_scene([0, 20, 0], MQA, device)
        found = attend(scene, num_splits=num_splits)
        assert torch.equal(torch.zeros_like(found[::2]), found[::2])
        assert (found - scene.expected(0.125)).abs().max() <= TOLERANCE[torch.float32]


class TestInvariance:
    @pytest.mark.usefixtures("rows_alone_in_products")
    def test_bits_do_not_depend_on_the_batch(self, device):
        """
        A row has the same bits alone, in any place among any rows, and by any number of splits.
        """
        scene = decode_scene([100, 0, 31], MQA, device)
        alone = attend(scene.rows([0]), num_splits=1)
        for num_splits in (1, 2, 3):
            found = attend(scene.rows([2, 0, 1]), num_splits=num_splits)
            assert torch.equal(alone[0], found[1]), num_splits

    def test_scratch_is_reused_without_a_trace(self, device):
        """
        Scratch memory with numbers from an earlier step with longer rows changes nothing.
        """
        scene = decode_scene([70, 20], MQA, device)
        scratch = allocate_scratch(2, 2, 64, TINY, device)
        for rows in ([0, 1], [1]):
            found = decode_attention(
                *scene.rows(rows).arguments,
                scale=0.125,
                scratch=scratch,
                tuning=TINY,
                num_splits=2,
            )
        assert torch.equal(attend(scene.rows([1])), found)


class TestLaunch:
    @pytest.mark.parametrize("num_splits", [1, 3])
    def test_grids_are_known_without_lengths(self, num_splits: int, monkeypatch):
        """
        Launches depend on shapes only: tensors without contents are enough, as in a capture.
        """
        grids = []

        class Recorder:
            def __getitem__(self, grid):
                return lambda *_args, **_options: grids.append(grid)

        for kernel in ("decode_kernel", "merge_kernel"):
            monkeypatch.setattr(triton_decode, kernel, Recorder())
        query = torch.empty((5, 40, 64), device="meta")
        decode_attention(
            query,
            torch.empty((9, 16, 2, 2, 64), device="meta"),
            torch.empty((5, 3), dtype=torch.int32, device="meta"),
            torch.empty(5, dtype=torch.int32, device="meta"),
            scale=0.125,
            num_splits=num_splits,
        )
        attending = (2 * 2, num_splits, 5)  # 20 heads of a key head take 2 programs
        merging = [(40, 5)] if num_splits > 1 else []
        assert [attending, *merging] == grids


LARGE_CACHE = """
import torch
from kernels.paged_attention.triton_decode import decode_attention
from kernels.paged_attention.tuning import DecodeTuning

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
blocks = 1_200_000
cache = torch.empty((blocks, 16, 2, 1, 64), dtype=torch.float16, device=device)  # 2.5e9 elements
assert cache.numel() > 2**31
torch.manual_seed(0)
cache[blocks - 1] = torch.randn((16, 2, 1, 64)).half().to(device)
table = torch.tensor([[blocks - 1]], dtype=torch.int32, device=device)
query = torch.randn((1, 2, 64)).half().to(device)
length = torch.tensor([16], dtype=torch.int32, device=device)
tuning = DecodeTuning(tile=16, num_warps=4, num_stages=2, min_chunk=16, max_chunks=1)
found = decode_attention(query, cache, table, length, scale=0.125, tuning=tuning, num_splits=1)
key, value = cache[blocks - 1, :, :, 0].float().unbind(1)
expected = (query[0].float() @ key.T * 0.125).softmax(-1) @ value
assert (found[0].float() - expected).abs().max() < 2e-3  # as TOLERANCE, one rounding to float16
"""


class TestLargeCache:
    @pytest.mark.slow
    def test_offsets_pass_two_to_the_thirty_one(self):
        """
        A block beyond 2**31 elements of the cache is read where it lies.
        """
        done = subprocess.run(  # a wrong address ends the process
            [sys.executable, "-c", LARGE_CACHE],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


class TestTable:
    @pytest.mark.parametrize("num_rows", [1, 8, 32, 64, 128, 256, 512])
    @pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
    def test_programs_fill_the_device(self, num_rows: int, num_kv_heads: int):
        """
        Few rows are split until there is work for every multiprocessor, many rows not at all.
        """
        tuning = decode_tuning(head_dim=128, num_kv_heads=num_kv_heads, dtype=torch.bfloat16)
        found = decode_splits(
            tuning, num_rows=num_rows, num_heads=4 * num_kv_heads, num_kv_heads=num_kv_heads
        )
        programs = num_rows * num_kv_heads
        assert 1 <= found <= tuning.max_chunks
        assert programs * found >= 15 * 132 or found == tuning.max_chunks
        assert found == 1 or programs * (found - 1) < 16 * 132

    @pytest.mark.parametrize(
        ("head_dim", "dtype"), [(257, torch.float16), (64, torch.float64)], ids=str
    )
    def test_unknown_heads_are_refused(self, head_dim: int, dtype):
        """
        A head size or number type without a row in the table is an error that names both.
        """
        with pytest.raises(ValueError, match=f"{dtype}.*{head_dim}"):
            decode_tuning(head_dim=head_dim, num_kv_heads=1, dtype=dtype)
