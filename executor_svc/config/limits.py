"""The engine limits in force for one model."""

from __future__ import annotations

from dataclasses import replace

import torch

from executor_svc.config.settings import LoadedSettings
from executor_svc.model.config import ModelConfig
from executor_svc.model.weights import weight_bytes
from executor_svc.start_warnings import warn
from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig

CPU_STEP_OPERATIONS = 1 << 39
"""
Operations of one step on a CPU, at most. Two cores with AVX-512 take about five seconds for them,
and as long again for long contexts.
"""

LEAST_CPU_STEP_TOKENS = 128
"""Least tokens of a CPU's step; with fewer the weights would be read too often."""


def num_slots_for(limits: EngineConfig) -> int:
    """Return an executor's number of slots: rows that compute, and as many paused or draining."""
    return 2 * limits.max_batch_size


def _tokens_of_a_cpu_step(limits: EngineConfig, config: ModelConfig) -> int:
    """
    Return `max_total_tokens` for a CPU: lowered so that products with all weights take at most
    `CPU_STEP_OPERATIONS`, but not below `LEAST_CPU_STEP_TOKENS` nor `max_batch_size`.
    """
    num_weights = weight_bytes(config, torch.float32) // torch.float32.itemsize
    fitting = max(CPU_STEP_OPERATIONS // (2 * num_weights), LEAST_CPU_STEP_TOKENS)
    return max(min(limits.max_total_tokens, fitting), limits.max_batch_size)


def check_block_fits(block_size: int, longest: int) -> None:
    """
    Check that a model's longest sequence fills a block.

    Raises:
        InvalidConfig: It does not.
    """
    if longest < block_size:
        raise InvalidConfig(
            f"the model supports at most {longest} tokens (max_position_embeddings), less than one "
            f"block of block_size {block_size}: lower block_size to {longest} or less"
        )


def may_shorten(loaded: LoadedSettings) -> bool:
    """Tell whether max_model_len gives way to the KV memory: no flag, file or variable set it."""
    return loaded.settings.max_model_len is None or not loaded.is_set("max_model_len")


def fit_limits(loaded: LoadedSettings, config: ModelConfig, device: torch.device) -> EngineConfig:
    """
    Join the settings' limits with the model's longest sequence, the default of max_model_len. A
    longer max_model_len of a preset is cut to it; a longer one that was set is an error. On a CPU a
    default max_total_tokens is cut to what the CPU computes in some seconds: a longer step would
    hold up all other requests and look stuck.

    Raises:
        InvalidConfig: A length was set that the model does not support, or the model's longest
            sequence is shorter than a block, or a rule fails.
    """
    limits, longest = loaded.limits, config.context_len
    if loaded.settings.max_model_len is None:
        limits = replace(limits, max_model_len=longest)
    elif limits.max_model_len > longest:
        if loaded.is_set("max_model_len"):
            raise InvalidConfig(
                f"max_model_len is set to {limits.max_model_len} "
                f"({loaded.places['max_model_len']}), but the model supports at most {longest} "
                f"tokens (max_position_embeddings): lower max_model_len to {longest} or less"
            )
        limits = replace(limits, max_model_len=longest)
    if device.type == "cpu" and "max_total_tokens" not in loaded.sources:
        limits = replace(limits, max_total_tokens=_tokens_of_a_cpu_step(limits, config))
    check_block_fits(limits.block_size, longest)
    limits.validate()
    for warning in limit_warnings(limits):
        warn("unusual_setting", warning)
    return limits


def limit_warnings(limits: EngineConfig) -> list[str]:
    """
    Return warnings about an executor's limits, without those about `max_num_seqs`, which belongs to
    the scheduler.
    """
    return replace(limits, max_num_seqs=max(limits.max_num_seqs, limits.max_batch_size)).warnings()
