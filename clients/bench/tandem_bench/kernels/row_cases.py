"""Operations that work row by row, between the matrix products of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from executor_svc.model.config import ModelConfig
from kernels.patch_rows import PackedRows, RowField, patch_rows
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul
from tandem_bench.device.case import TANDEM, Case
from tandem_bench.device.operands import random_numbers
from tandem_bench.device.options import Where
from tandem_bench.device.timing import Call

_EPS = 1e-5
_PATCHED_SHARE = 16
"""Rows per row that appends a block in a step; 16, as with blocks of 16 tokens."""
_TABLE_WIDTH = 256


def row_cases(
    config: ModelConfig, num_tokens: int, where: Where, *, block_size: int
) -> Iterator[Case]:
    """
    Yield one case per operation for a model's sizes.

    Args:
        config: Model that gives the sizes.
        num_tokens: Tokens of the step, T in tables.
        where: Device, and number type of activations and cache.
        block_size: Tokens per KV block.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    itemsize = where.dtype.itemsize

    def case(operation: str, width: str, num_bytes: int, make: Callable[[int], Call]) -> Case:
        return Case(
            operation=operation,
            shape=f"T={num_tokens} {width}",
            implementation=TANDEM,
            num_bytes=num_bytes,
            num_flop=0,
            make=make,
        )

    moved = num_tokens * hidden * itemsize
    yield case(
        "rms_norm",
        f"N={hidden}",
        2 * moved,
        lambda seed: _norm(num_tokens, hidden, where, seed),
    )
    yield case(
        "add_rms_norm",
        f"N={hidden}",
        4 * moved,
        lambda seed: _add_norm(num_tokens, hidden, where, seed),
    )
    yield case(
        "silu_mul",
        f"N={inner}",
        3 * num_tokens * inner * itemsize,
        lambda seed: _gate(num_tokens, inner, where, seed),
    )
    heads = f"heads={config.num_heads}/{config.num_kv_heads}x{config.head_dim}"
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    yield case(
        "rope_kv_write",
        heads + (" normed" if config.qk_norm else ""),
        num_tokens * (2 * width * itemsize + config.head_dim * torch.float32.itemsize),
        lambda seed: _rope(config, num_tokens, where, block_size, seed),
    )


def patch_case(num_rows: int, device: torch.device) -> Case:
    """Make a case that patches a new block into a sixteenth of the rows and a token into all."""
    num_changes = num_rows + -(-num_rows // _PATCHED_SHARE)
    return Case(
        operation="patch_rows",
        shape=f"B={num_rows} changes={num_changes}",
        implementation=TANDEM,
        num_bytes=3 * num_changes * torch.int32.itemsize,
        num_flop=0,
        make=lambda _seed: _patch(num_rows, device),
    )


def _norm(num_tokens: int, hidden: int, where: Where, seed: int) -> Call:
    dtype, device = where.dtype, where.device
    x = random_numbers((num_tokens, hidden), dtype, device, seed=seed)
    weight = random_numbers((hidden,), dtype, device)
    return lambda: rms_norm(x, weight, _EPS)


def _add_norm(num_tokens: int, hidden: int, where: Where, seed: int) -> Call:
    dtype, device = where.dtype, where.device
    x = random_numbers((num_tokens, hidden), dtype, device, seed=seed, scale=1e-3)
    residual = random_numbers((num_tokens, hidden), dtype, device, seed=seed + 1)
    weight = random_numbers((hidden,), dtype, device)
    return lambda: add_rms_norm(x, residual, weight, _EPS)


def _gate(num_tokens: int, inner: int, where: Where, seed: int) -> Call:
    dtype, device = where.dtype, where.device
    # The operation may overwrite it; values then shrink from call to call, but the work does not.
    gate_up = random_numbers((num_tokens, 2 * inner), dtype, device, seed=seed)
    return lambda: silu_mul(gate_up)


def _rope(
    config: ModelConfig,
    num_tokens: int,
    where: Where,
    block_size: int,
    seed: int,
) -> Call:
    dtype, device = where.dtype, where.device
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    num_blocks = -(-num_tokens // block_size) + 1
    cache_shape = (num_blocks, block_size, 2, kv_heads, dim)
    qkv = random_numbers((num_tokens, (heads + 2 * kv_heads) * dim), dtype, device, seed=seed)
    cache = random_numbers(cache_shape, dtype, device)
    angle = random_numbers((num_tokens, dim // 2), torch.float32, device)
    rotation = torch.stack((angle.cos(), angle.sin()), dim=-1)
    place: Tensor = torch.arange(block_size, block_size + num_tokens, device=device)
    norm = random_numbers((heads + kv_heads, dim), dtype, device) if config.qk_norm else None
    return lambda: rope_kv_write(qkv, rotation, place, cache, qk_norm=norm, norm_eps=_EPS)


def _patch(num_rows: int, device: torch.device) -> Call:
    fields = (
        RowField(name="token", dtype=torch.int32),
        RowField(name="block_table", dtype=torch.int32, width=_TABLE_WIDTH),
    )
    packed = PackedRows(fields, num_rows, device)
    rows = np.arange(num_rows)
    appended = rows[::_PATCHED_SHARE]
    changes = packed.patch()
    changes.set_rows("token", rows, rows)
    changes.set_entries("block_table", appended, appended % _TABLE_WIDTH, appended + 1)
    patch = changes.packed()
    return lambda: patch_rows(packed.words, patch)
