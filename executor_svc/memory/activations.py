"""
Memory that the heaviest steps need beside weights and KV, estimated from the shapes of tensors.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from executor_svc.memory.decode_bytes import decode_scratch_bytes, static_step_bytes
from executor_svc.model.config import ModelConfig
from executor_svc.model.decoder import MLP_TOKENS
from executor_svc.parallel.pipeline import STEPS_ON_THE_WAY
from tandem.engine_config import EngineConfig

_LOGITS_COPIES = 4
"""Number of float32 copies of the logits that sampling holds at once."""
_SCORED_LOGITS, _SCORED_LOGITS_ON_GPU = 1 << 22, 1 << 23
"""
Most logits that exist at a time for the log probabilities of prompts: enough positions that a
matrix product reads the output projection for many of them, and little memory beside the KV.
"""


def scored_positions(vocab_size: int, *, on_gpu: bool) -> int:
    """Return the most positions of prompts whose logits exist at a time."""
    return max(1, (_SCORED_LOGITS_ON_GPU if on_gpu else _SCORED_LOGITS) // vocab_size)


def estimate_activations(
    config: ModelConfig,
    limits: EngineConfig,
    *,
    num_slots: int,
    dtype: torch.dtype,
    on_gpu: bool = False,
    tp_size: int = 1,
    is_last_stage: bool = True,
) -> int:
    """
    Estimate the bytes that the heaviest steps need, from the shapes of their tensors.

    On a GPU the buffers of static decode steps and the scratch of decode attention are included;
    the scratch of other kernels and the memory of captured graphs are not.

    Args:
        config: Geometry of the model, or of the rank, with the whole vocabulary.
        limits: Engine limits.
        num_slots: Number of slots.
        dtype: Type of the model.
        on_gpu: The device is a GPU.
        tp_size: Number of ranks that share each layer.
        is_last_stage: False for a stage that sends hidden states instead of sampling.
    """
    bytes_per_number = dtype.itemsize
    config = replace(config, vocab_size=-(-config.vocab_size // tp_size))  # its logits, that is
    tokens, rows = limits.max_total_tokens, min(limits.max_batch_size, limits.max_total_tokens)
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = tokens * (config.hidden_size + 3 * heads + 2 * kv_heads)
    mlp = min(tokens, MLP_TOKENS) * (config.hidden_size + 3 * config.intermediate_size)
    hidden = tokens * config.hidden_size
    logits = rows * config.vocab_size
    computing = (hidden + max(attention, mlp)) * bytes_per_number
    sampling = hidden * bytes_per_number + logits * (bytes_per_number + 4 * _LOGITS_COPIES)
    scored = min(tokens, scored_positions(config.vocab_size, on_gpu=on_gpu)) * config.vocab_size
    scoring = hidden * bytes_per_number + scored * (bytes_per_number + 4 * _LOGITS_COPIES)
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
    if tp_size > 1:
        computing += _partial_bytes(config, tokens, bytes_per_number, on_gpu=on_gpu)
    if not is_last_stage:
        computing += STEPS_ON_THE_WAY * hidden * bytes_per_number
        sampling = scoring = 0
    return max(computing + scratch, sampling, scoring) + histories + rotations + static


def _partial_bytes(config: ModelConfig, tokens: int, bytes_per_number: int, *, on_gpu: bool) -> int:
    """Return the bytes of partial sums, and of what a CPU widens to compute them in float32."""
    partial = tokens * config.hidden_size * 4
    if on_gpu or bytes_per_number == 4:
        return partial
    widest = max(config.num_heads * config.head_dim, config.intermediate_size)
    return partial + (tokens + config.hidden_size) * widest * 4


def prompt_lengths(limits: EngineConfig) -> list[int]:
    """
    Return the prompt lengths of the heaviest prefill: as many prompts as one step may have, the
    first ones as long as possible. They have `max_total_tokens` tokens in all, or fewer if
    `max_batch_size` prompts of full length have fewer.
    """
    rows = min(limits.max_batch_size, limits.max_total_tokens)
    spare = limits.max_total_tokens - rows
    lengths = []
    for _ in range(rows):
        more = min(spare, limits.max_model_len - 1)
        lengths.append(1 + more)
        spare -= more
    return lengths
