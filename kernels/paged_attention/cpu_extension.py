"""
Paged attention on the CPU in C++: keys and values are read in place, through block tables.

If the processor has matrix products of a 16-bit type, which our C++ does not use, long chunks of
that type are left to PyTorch (`cpu`); a batch may hold both. Products of vectors alone
(avx512_bf16) are not enough: with them PyTorch takes 2 to 13 times as long as C++ does.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu_extension import load_library
from kernels.cpu_extension.library import NUMBER_TYPES
from kernels.cpu_features import cpu_has_any
from kernels.paged_attention import cpu
from kernels.paged_attention.sequences import AttentionPlan, AttentionShape, PagedSequences

_LONGEST_BESIDE_HARDWARE = 16
"""Longest query of rows that run in C++ if PyTorch uses the processor's matrix products."""

_HARDWARE = {
    torch.bfloat16: {"amx_bf16", "bf16"},
    torch.float16: {"amx_fp16", "avx512_fp16", "asimdhp"},
}
"""Features of processors that have matrix products of a type."""

_INPUTS = (
    *("num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size", "table_stride"),
    *("window", "num_threads", "type"),
)
_OUTPUTS = ("scratch_floats", "partial_floats", "least_block", "most_block")


class _Plan(ctypes.Structure):
    """The struct `Plan` of attention/plan.h, where the fields are described."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INPUTS),
        *((name, ctypes.c_void_p) for name in ("query_len", "seq_len", "block_table")),
        *((name, ctypes.c_void_p) for name in ("first_query", "first_item", "first_part")),
        *((name, ctypes.c_int64) for name in _OUTPUTS),
        *((name, ctypes.c_void_p) for name in ("scratch", "partials")),
        ("lone_heads", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class ExtensionPlan:
    """
    A plan of rows that run in C++, and of the others.

    `held` keeps the memory alive that `native` points to. `rest` is the plan of the long rows, and
    `rest_query` holds the places of their queries, int64; both are None if there are no long rows.
    """

    shape: AttentionShape
    num_queries: int
    library: ctypes.CDLL
    native: _Plan
    held: tuple[object, ...]
    rest: AttentionPlan | None
    rest_query: Tensor | None

    def check_blocks(self, num_blocks: int) -> None:
        """
        Refuse a cache of too few blocks.

        Raises:
            IndexError: A block table names a block that the cache does not have.
        """
        native = self.native
        if native.least_block < 0 or native.most_block >= num_blocks:
            raise IndexError(
                f"block tables name blocks {native.least_block} to {native.most_block}, the cache "
                f"has {num_blocks}"
            )

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """
        Compute attention; arguments and result are as in `paged_attention`, unchecked.

        Raises:
            IndexError: A block table names a block that the cache does not have.
        """
        self.check_blocks(kv_cache.shape[0])
        out = torch.empty(
            (self.num_queries, self.shape.num_heads, self.shape.head_dim), dtype=query.dtype
        )
        self.library.tandem_attention_attend(
            ctypes.byref(self.native),
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            kv_cache.data_ptr(),
            out.data_ptr(),
            scale,
        )
        if self.rest is not None:
            assert self.rest_query is not None
            rest = self.rest.attend(query.index_select(0, self.rest_query), kv_cache, scale)
            out.index_copy_(0, self.rest_query, rest)
        return out


def plan(sequences: PagedSequences, shape: AttentionShape, window: int | None) -> AttentionPlan:
    """
    Prepare a step; arguments are as in `plan_paged_attention`, unchecked. The library must be
    loadable.
    """
    if shape.dtype not in NUMBER_TYPES:
        computed = ", ".join(map(str, NUMBER_TYPES))
        raise ValueError(f"cpu-extension computes {computed}, not {shape.dtype}")
    query_len = sequences.query_len.astype(np.int64)
    short = query_len <= _longest_query(shape.dtype)
    if shape.batch_invariant:  # PyTorch sums differently, and a chunk's length must not matter
        short = np.ones_like(short)
    if not short.any():
        return cpu.plan(sequences, shape, window)
    first_query = np.cumsum(query_len) - query_len
    rest = rest_query = None
    own = sequences
    if not short.all():
        own, others = _rows(sequences, short), _rows(sequences, ~short)
        rest = cpu.plan(others, shape, window)
        rest_query = torch.from_numpy(np.flatnonzero(np.repeat(~short, query_len)))
    library = _library()
    native, held = _native(library, own, first_query[short], shape, window)
    return ExtensionPlan(shape, int(query_len.sum()), library, native, held, rest, rest_query)


@functools.cache
def _longest_query(dtype: torch.dtype) -> int:
    """Return the longest query of rows that run in C++ on this processor."""
    if cpu_has_any(*_HARDWARE.get(dtype, set())):
        return _LONGEST_BESIDE_HARDWARE
    return np.iinfo(np.int32).max


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library and declare the types of the functions called here."""
    library = load_library()
    library.tandem_attention_plan_bytes.restype = ctypes.c_int64
    assert library.tandem_attention_plan_bytes() == ctypes.sizeof(_Plan)
    library.tandem_attention_prepare.argtypes = (ctypes.POINTER(_Plan),)
    library.tandem_attention_prepare.restype = None
    library.tandem_attention_attend.argtypes = (
        *(ctypes.POINTER(_Plan), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float),
    )
    library.tandem_attention_attend.restype = None
    return library


def _rows(sequences: PagedSequences, chosen: NDArray[np.bool_]) -> PagedSequences:
    return PagedSequences(
        query_len=sequences.query_len[chosen],
        seq_len=sequences.seq_len[chosen],
        block_table=sequences.block_table[chosen],
    )


def _native(
    library: ctypes.CDLL,
    sequences: PagedSequences,
    first_query: NDArray[np.int64],
    shape: AttentionShape,
    window: int | None,
) -> tuple[_Plan, tuple[object, ...]]:
    num_rows = len(sequences.query_len)
    columns: dict[str, NDArray[np.generic]] = {
        "query_len": np.ascontiguousarray(sequences.query_len, np.int32),
        "seq_len": np.ascontiguousarray(sequences.seq_len, np.int32),
        "block_table": np.ascontiguousarray(sequences.block_table, np.int32),
        "first_query": np.ascontiguousarray(first_query),
        "first_item": np.empty(num_rows + 1, np.int64),
        "first_part": np.empty(num_rows + 1, np.int64),
    }
    native = _Plan(
        num_rows=num_rows,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        table_stride=sequences.block_table.shape[1],
        window=window or 0,
        num_threads=torch.get_num_threads(),
        type=NUMBER_TYPES[shape.dtype],
        **{name: column.ctypes.data for name, column in columns.items()},
    )
    library.tandem_attention_prepare(native)
    scratch = torch.empty((native.num_threads, native.scratch_floats))
    partials = torch.empty(native.partial_floats)
    native.scratch, native.partials = scratch.data_ptr(), partials.data_ptr()
    return native, (columns, scratch, partials)
