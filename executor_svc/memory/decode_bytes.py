"""Bytes that decoding on a GPU takes beside activations, from geometry alone."""

from __future__ import annotations

import torch

from executor_svc.model.config import ModelConfig
from kernels.paged_attention.tuning import decode_splits, decode_tuning
from kernels.sampling.tuning import search_bytes
from tandem.engine_config import EngineConfig

RING_LINES = 8
"""
Number of steps that keep their sampled tokens on the device: more than may be launched before the
tokens of the first of them are fetched.
"""

_SLOT_BYTES = 4 + 4 + 4 + 4 + 4 + 8 + 8 + 4
"""Bytes of a slot: row, position, temperature, top_k, top_p, seed, choice, min_p."""

_ROW_BYTES = 4 + 8 + 8 + 4 + 4 + 4 + 4 + 8 + 8 + 8 + 4
"""
Bytes of a row: token, its position and that of its KV, length, then sampling parameters with the
position of the drawn token.
"""

_LINE_BYTES = 4


def static_step_bytes(
    config: ModelConfig,
    limits: EngineConfig,
    *,
    num_slots: int,
    max_rows: int,
    bytes_per_number: int,
) -> int:
    """
    Return the bytes of a `DecodeStep`'s buffers.

    Args:
        config: The model.
        limits: Engine limits; `max_model_len` and `block_size` are used.
        num_slots: Number of slots, S.
        max_rows: Most rows of a step, R.
        bytes_per_number: Bytes of a logit.
    """
    table = -(-limits.max_model_len // limits.block_size) * 4
    slots = num_slots * (_SLOT_BYTES + table)
    rows = max_rows * (_ROW_BYTES + table + RING_LINES * 4)
    return slots + rows + max_rows * config.vocab_size * bytes_per_number + _LINE_BYTES


def decode_scratch_bytes(config: ModelConfig, max_rows: int, dtype: torch.dtype) -> int:
    """
    Return the most bytes that decode attention keeps between its two kernel launches, for any
    number of rows up to `max_rows`; above some number of rows one launch is enough and nothing is
    kept.
    """
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
    tuning = decode_tuning(head_dim=config.head_dim, num_kv_heads=config.num_kv_heads, dtype=dtype)
    split_rows = (
        rows for rows in range(max_rows, 0, -1) if decode_splits(tuning, num_rows=rows, **heads) > 1
    )
    chunks = next(split_rows, 0) * config.num_heads * tuning.max_chunks
    return chunks * (config.head_dim + 2) * 4


def graph_pool_bytes(config: ModelConfig, max_rows: int, dtype: torch.dtype) -> int:
    """
    Return the least bytes of the memory pool that captured decode steps share: those that the
    largest, of `max_rows`, holds at once, be it while it computes or while it draws tokens by top_k
    and top_p. The pool stays allocated between steps. The driver's own memory for each graph is not
    included.
    """
    if max_rows == 0:
        return 0
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size + 3 * heads + 2 * kv_heads
    mlp = config.hidden_size + 3 * config.intermediate_size
    computing = max_rows * max(attention, mlp) * dtype.itemsize
    logits = max_rows * config.vocab_size * dtype.itemsize
    drawing = logits + search_bytes(max_rows, config.vocab_size)
    hidden = max_rows * config.hidden_size * dtype.itemsize
    return hidden + max(computing, drawing) + decode_scratch_bytes(config, max_rows, dtype)
