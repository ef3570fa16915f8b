"""The work that a sweep times: launches of a kernel at a point, with a given tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.linear.triton_kernel import linear
from kernels.linear.tuning import LinearTiles, cut
from kernels.paged_attention import AttentionShape, reference
from kernels.paged_attention.triton_decode import decode_attention
from kernels.paged_attention.triton_prefill import prefill_attention
from kernels.paged_attention.triton_prefill_tiles import TileSize, cut_rows
from kernels.paged_attention.tuning import DecodeTuning, decode_splits, for_kv_heads
from kernels.sampling import SamplingColumns
from kernels.sampling import reference as sampling_reference
from kernels.sampling.triton_kernel import Needs, draw
from kernels.sampling.tuning import Cut, SamplingTiles
from tandem_bench.device.operands import paged_buffers, random_numbers
from tandem_bench.kernels.attention_cases import ragged_rows
from tests.gpu.rates.sweep.points import SIZES, Point, products
from tests.gpu.rates.sweep.tables import TABLES, Tuning
from tests.kernels.attention_error import UNIT

BLOCK_SIZE = 16
_RAGGED_FROM = 2
_LOGIT_DEVIATION = 2.5
_INTERPRETED_SPLITS = 2
"""
Most programs that share a row's chunks where they are interpreted: each takes milliseconds, and a
tuning asks for thousands.
"""
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """Device and number type of operands; `draws` is false where nothing reads them."""

    device: torch.device
    dtype: torch.dtype
    draws: bool = True

    def numbers(self, *shape: int, seed: int) -> Tensor:
        """Make an operand, of random numbers if it is read."""
        if not self.draws:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return random_numbers(shape, self.dtype, self.device, seed=seed)


class Work(Protocol):
    """
    One operation on operands of its own.

    Attributes:
        num_bytes: Bytes that a call reads and writes, about.
    """

    num_bytes: int

    def call(self, tuning: Any) -> Call:
        """Return a call that launches the kernel with a tuning, fit for capture."""

    def same_bits(self, tuning: Any) -> list[Call]:
        """Return calls whose results must have the bits of `call`'s: other cuts of the work."""

    def worst_error(self, found: Tensor) -> float:
        """Return the largest error against the definition, in units of what is allowed."""


def make_work(point: Point, place: Place, seed: int = 0) -> Work:
    """Make the work of a point."""
    kinds: dict[str, Callable[[Point, Place, int], Work]] = {
        "decode": _Decode,
        "linear": _Linear,
        "sampling": _Sampling,
    }
    return kinds.get(point.operation, _Prefill)(point, place, seed)


def launch(*, point: Mapping[str, Any], tuning: Mapping[str, Any], dtype: str) -> None:
    """Launch a point's kernels once, on a CPU and with short rows, to have them compiled."""
    asked = Point(**point)
    short = replace(asked, length=min(asked.length, asked.queries + BLOCK_SIZE))
    place = Place(torch.device("cpu"), getattr(torch, dtype), draws=False)
    make_work(short, place).call(TABLES[asked.operation].tuning(**tuning))()


def same_bits_at(work: Work, tuning: Tuning) -> bool:
    """Tell whether a row has the same bits however its work is cut."""
    expected = work.call(tuning)()
    return all(torch.equal(expected, call()) for call in work.same_bits(tuning))


class _Attention:
    """Operands of attention, and the comparison of its results."""

    def __init__(self, point: Point, place: Place, seed: int) -> None:
        sizes = SIZES[point.model]
        self.shape = AttentionShape(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            block_size=BLOCK_SIZE,
            dtype=place.dtype,
            device=place.device,
        )
        query_len, seq_len = _lengths(point)
        self.buffers = paged_buffers(self.shape, query_len, seq_len, seed=seed)
        self.scale = sizes.head_dim**-0.5
        kv_bytes = 2 * sizes.num_kv_heads * sizes.head_dim * place.dtype.itemsize
        self.num_bytes = sum(seq_len) * kv_bytes
        self.table = self._there(self.buffers.sequences.block_table)

    def _there(self, numbers: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int32)).to(self.shape.device)

    def worst_error(self, found: Tensor) -> float:
        """Compare with the definition in float32: weights and results are each rounded once."""
        # A result is a weighted mean of values; one more unit is room for sums in float32.
        allowed = 3 * UNIT[found.dtype] * self.buffers.kv_cache[:, :, 1].abs().max().float()
        return float(((found.float() - self._expected).abs().max() / allowed).item())

    @cached_property
    def _expected(self) -> Tensor:
        """The definition's result, which all candidates are compared with."""
        wide = replace(self.shape, dtype=torch.float32)
        plan = reference.plan(self.buffers.sequences, wide, None)
        return plan.attend(self.buffers.query.float(), self.buffers.kv_cache.float(), self.scale)


def _lengths(point: Point) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the new positions and all positions of each sequence."""
    if point.operation == "decode" and point.rows >= _RAGGED_FROM:
        return (1,) * point.rows, ragged_rows(point.rows, point.length).seq_len
    if not point.is_ragged:
        return (point.queries,) * point.rows, (point.length,) * point.rows
    source = np.random.default_rng(0)
    new = source.integers(1, point.queries, point.rows, endpoint=True)
    before = source.integers(0, point.length - point.queries, point.rows, endpoint=True)
    new[0], before[0] = point.queries, point.length - point.queries
    return tuple(new.tolist()), tuple((new + before).tolist())


class _Decode(_Attention):
    def __init__(self, point: Point, place: Place, seed: int) -> None:
        super().__init__(point, place, seed)
        is_interpreted = place.device.type == "cpu" and place.draws
        self.most_splits = _INTERPRETED_SPLITS if is_interpreted else None

    def call(self, tuning: DecodeTuning, num_splits: int | None = None) -> Call:
        shape = self.shape
        own = for_kv_heads(tuning, shape.num_kv_heads)
        length = self._there(self.buffers.sequences.seq_len)
        heads = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads}
        wanted = decode_splits(own, num_rows=len(length), **heads)
        splits = num_splits or min(wanted, self.most_splits or wanted)
        return lambda: decode_attention(
            self.buffers.query,
            self.buffers.kv_cache,
            self.table,
            length,
            scale=self.scale,
            tuning=own,
            num_splits=splits,
        )

    def same_bits(self, tuning: DecodeTuning) -> list[Call]:
        return [self.call(tuning, num_splits) for num_splits in (1, 3)]


class _Prefill(_Attention):
    def __init__(self, point: Point, place: Place, seed: int) -> None:
        super().__init__(point, place, seed)
        self.rows = np.arange(point.rows)

    def call(self, tuning: TileSize) -> Call:
        return self._attend(tuning, per_tile=tuning.rows)

    def same_bits(self, tuning: TileSize) -> list[Call]:
        """Return one call, in which each query is alone in a tile."""
        return [self._attend(tuning, per_tile=self.shape.group_size)]

    def _attend(self, size: TileSize, *, per_tile: int) -> Call:
        buffers = self.buffers
        alone = replace(size, rows=per_tile)
        table = cut_rows(buffers.sequences, self.shape.group_size, self.rows, alone)
        tiles = self._there(table)

        def attend() -> Tensor:
            out = torch.empty_like(buffers.query)
            prefill_attention(
                buffers.query,
                buffers.kv_cache,
                self.table,
                tiles,
                size,
                scale=self.scale,
                window=None,
                out=out,
            )
            return out

        return attend


class _Linear:
    def __init__(self, point: Point, place: Place, seed: int) -> None:
        columns, width = products(point.model)[point.part]
        self.x = place.numbers(point.rows, width, seed=seed)
        self.weight = place.numbers(columns, width, seed=seed + 1)
        self.num_bytes = self.weight.nbytes + self.x.nbytes

    def call(self, tuning: LinearTiles, *, split: bool | None = None) -> Call:
        own = cut(self.x.shape[1], tuning)
        return lambda: linear(self.x, self.weight, None, None, split=split, tuning=own)

    def same_bits(self, tuning: LinearTiles) -> list[Call]:
        return [self.call(tuning, split=split) for split in (False, True)]

    def worst_error(self, found: Tensor) -> float:
        """Compare with float64: one rounding, and one of float32 for each term of a sum."""
        exact, sizes = self._expected
        width = self.x.shape[1]
        allowed = UNIT[found.dtype] * exact.abs() + width * UNIT[torch.float32] * sizes
        return float(((found.double() - exact).abs() / allowed).max().item())

    @cached_property
    def _expected(self) -> tuple[Tensor, Tensor]:
        """The exact products, and what they would be of sizes alone."""
        x, weight = self.x.double(), self.weight.double()
        return x @ weight.T, x.abs() @ weight.abs().T


class _Sampling:
    def __init__(self, point: Point, place: Place, seed: int) -> None:
        vocab_size = SIZES[point.model].vocab_size
        shape = (point.rows, vocab_size)
        self.logits = (
            random_numbers(shape, torch.float32, place.device, seed=seed, scale=_LOGIT_DEVIATION)
            if place.draws
            else torch.empty(shape, device=place.device)
        )
        self.num_bytes = self.logits.nbytes
        rows = point.rows
        self.columns = SamplingColumns(
            temperature=torch.full((rows,), 0.8),
            top_k=torch.zeros(rows, dtype=torch.int32),
            top_p=torch.full((rows,), 0.9 if point.part == "top_p" else 1.0),
            seed=torch.arange(rows),
            position=torch.full((rows,), 100),
            choice=torch.zeros(rows, dtype=torch.int64),
            min_p=None,
        )

    def call(self, tuning: SamplingTiles) -> Call:
        needs = Needs.of(self.columns, self.logits.shape[1])
        there, own = self.columns.to(self.logits.device), Cut.into(tuning, self.logits.shape[1])
        return lambda: draw(self.logits, there, needs, own)[0]

    def same_bits(self, _tuning: SamplingTiles) -> list[Call]:
        return []  # tokens are compared with the definition's, bit for bit

    def worst_error(self, found: Tensor) -> float:
        """Count the rows that drew another token than the definition draws, twice each."""
        return 2.0 * int((self._expected != found.cpu()).sum())

    @cached_property
    def _expected(self) -> Tensor:
        """The definition's tokens."""
        return sampling_reference.sample(self.logits.cpu(), self.columns).token
