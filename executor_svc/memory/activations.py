"""What the heaviest steps need beside weights and KV, estimated by the shapes of their tensors."""

from __future__ import annotations

import torch

from executor_svc.memory.decode_bytes import decode_scratch_bytes, static_step_bytes
from executor_svc.model.config import ModelConfig
from executor_svc.model.decoder import MLP_TOKENS
from tandem.engine_config import EngineConfig

_LOGITS_COPIES = 4
"""Float32 columns over the vocabulary that sampling has at once."""


def estimate_activations(
    config: ModelConfig,
    limits: EngineConfig,
    *,
    num_slots: int,
    dtype: torch.dtype,
    on_gpu: bool = False,
) -> int:
    """
    What the same steps should need by the shapes of their tensors.

    On a GPU, with the buffers of static decode steps and the scratch of decode attention; other
    kernels' scratch, and what a captured graph takes for itself, are left out.
    """
    bytes_per_number = dtype.itemsize
    tokens, rows = limits.max_total_tokens, min(limits.max_batch_size, limits.max_total_tokens)
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = tokens * (config.hidden_size + 3 * heads + 2 * kv_heads)
    mlp = min(tokens, MLP_TOKENS) * (config.hidden_size + 3 * config.intermediate_size)
    hidden = tokens * config.hidden_size
    logits = rows * config.vocab_size
    computing = (hidden + max(attention, mlp)) * bytes_per_number
    sampling = hidden * bytes_per_number + logits * (bytes_per_number + 4 * _LOGITS_COPIES)
    histories = num_slots * (limits.max_model_len + 1) * 4
    rotations = limits.max_model_len * config.head_dim * 4
    static = scratch = 0
    if on_gpu:
        static = static_step_bytes(
            config,
            limits,
            num_slots=num_slots,
            max_rows=limits.max_batch_size,
            bytes_per_number=bytes_per_number,
        )
        scratch = decode_scratch_bytes(config, rows, dtype)
    return max(computing + scratch, sampling) + histories + rotations + static


def prompt_lengths(limits: EngineConfig) -> list[int]:
    """
    Prompts of the heaviest prefill: as many as may run in one step, the first ones as long as can
    be, `max_total_tokens` in all unless `max_batch_size` full ones are fewer.
    """
    rows = min(limits.max_batch_size, limits.max_total_tokens)
    spare = limits.max_total_tokens - rows
    lengths = []
    for _ in range(rows):
        more = min(spare, limits.max_model_len - 1)
        lengths.append(1 + more)
        spare -= more
    return lengths
