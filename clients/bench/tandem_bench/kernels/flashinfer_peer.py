"""FlashInfer's attention on the same rows, for GPUs where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kernels.paged_attention import AttentionShape
from tandem_bench.device.operands import PagedBuffers
from tandem_bench.device.timing import Call

NAME = "flashinfer"
WITH_TENSOR_CORES = "flashinfer-tensor-cores"

_WORKSPACE_BYTES = 512 * 1024**2

Maker = Callable[[PagedBuffers], Call]


def is_installed() -> bool:
    """Return True where it can be imported; its first use also needs a CUDA compiler."""
    return find_spec("flashinfer") is not None


def contestants(shape: AttentionShape, *, is_decode: bool) -> Iterator[tuple[str, Maker]]:
    """
    Yield name and maker of its kernels: none without a GPU or where it is not installed.

    Its decode kernel uses vector units, or as an option the tensor cores. The faster one depends on
    the number of query heads per KV head, so both are measured.
    """
    if shape.device.type != "cuda" or not is_installed():
        return
    if is_decode:
        yield NAME, partial(_decode, use_tensor_cores=False)
        yield WITH_TENSOR_CORES, partial(_decode, use_tensor_cores=True)
    else:
        yield NAME, _prefill


def _decode(buffers: PagedBuffers, *, use_tensor_cores: bool) -> Call:
    shape = buffers.shape
    wrapper = _flashinfer().BatchDecodeWithPagedKVCacheWrapper(
        _workspace(shape.device), "NHD", use_tensor_cores=use_tensor_cores
    )
    wrapper.plan(
        *_pages(buffers),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
    )
    return partial(wrapper.run, buffers.query, _keys_and_values(buffers))


def _prefill(buffers: PagedBuffers) -> Call:
    shape = buffers.shape
    wrapper = _flashinfer().BatchPrefillWithPagedKVCacheWrapper(_workspace(shape.device), "NHD")
    wrapper.plan(
        _indptr(torch.from_numpy(buffers.sequences.query_len)).to(shape.device),
        *_pages(buffers),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        causal=True,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
    )
    return partial(wrapper.run, buffers.query, _keys_and_values(buffers))


def _flashinfer() -> Any:
    return importlib.import_module("flashinfer")


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _pages(buffers: PagedBuffers) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets of the rows into the pages, all rows' pages, and tokens on the last ones."""
    sequences, block_size = buffers.sequences, buffers.shape.block_size
    lengths = torch.from_numpy(sequences.seq_len)
    held = (lengths + block_size - 1) // block_size
    table = torch.from_numpy(sequences.block_table)
    is_held = torch.arange(table.shape[1])[None, :] < held[:, None]
    columns = (_indptr(held), table[is_held], (lengths - 1) % block_size + 1)
    first, pages, last_len = (column.to(buffers.shape.device, torch.int32) for column in columns)
    return first, pages, last_len


def _indptr(counts: Tensor) -> Tensor:
    """Return the offsets at which rows begin, and the end of the last, int32 ``[R + 1]``."""
    ends = counts.cumsum(0, dtype=torch.int32)
    return torch.cat((torch.zeros(1, dtype=torch.int32), ends))


def _keys_and_values(buffers: PagedBuffers) -> tuple[Tensor, Tensor]:
    """
    Copy keys and values into contiguous tensors: our layout would prevent its wide loads. The cache
    that they came from must not be held on to: at long contexts it is as large as all else.
    """
    key, value = buffers.kv_cache.unbind(2)
    return key.contiguous(), value.contiguous()
