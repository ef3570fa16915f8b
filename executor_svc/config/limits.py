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
"""Two cores with AVX-512 take about five seconds for them, and as long again for long contexts."""

LEAST_CPU_STEP_TOKENS = 128
"""Fewer would read the weights too often."""


def num_slots_for(limits: EngineConfig) -> int:
    """Slots of an executor: rows that compute, and as many that are paused or draining."""
    return 2 * limits.max_batch_size


def _tokens_of_a_cpu_step(limits: EngineConfig, config: ModelConfig) -> int:
    """Tokens whose products with all weights are at most `CPU_STEP_OPERATIONS`."""
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
    Join the limits with the model's longest sequence, which is the default; a preset's gives way
    to it, a set value does not. A default max_total_tokens gives way to what a CPU computes in some
    seconds: a step in which a prompt takes longer holds up all others, and looks like one that is
    stuck.

    Raises:
        InvalidConfig: A length was set that the model does not support, or the model's own is less
            than a block, or a rule fails.
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
    """Warnings of an executor's limits; `max_num_seqs` is for the scheduler, which sees it set."""
    return replace(limits, max_num_seqs=max(limits.max_num_seqs, limits.max_batch_size)).warnings()
