"""Limits of an engine's runners, from what was given, the model and the free memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from executor_svc.config.limits import check_block_fits, fit_limits
from executor_svc.config.settings import load_settings
from executor_svc.memory.plan import Readings, plan_memory
from executor_svc.model.loader import LoadedModel
from executor_svc.parallel.collectives import AllRanks
from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig
from tandem.wording import GIB, gib


def default_limits(
    model: LoadedModel, model_dir: Path, buffer_size_gb: float | None, readings: Readings
) -> EngineConfig:
    """
    Return the limits of an executor without settings: see `tandem.kv_memory.default_size`. Ranks of
    a model call it together, and have the same.

    Args:
        model: The model, or the share of this rank.
        model_dir: Its directory.
        buffer_size_gb: Size of the KV memory, if it is given.
        readings: The part of the device's memory that one runner may have.
    """
    sized = [] if buffer_size_gb is None else [f"--buffer-size-gb={buffer_size_gb}"]
    loaded = load_settings([f"--model={model_dir}", *sized], {})
    limits = fit_limits(loaded, model.config, model.device)
    plan = plan_memory(
        loaded,
        model.rank_config,
        limits,
        model.dtype,
        readings,
        device=str(model.device),
        tp_size=model.groups.tensor_size,
        is_last_stage=model.sharding.stage.is_last,
        all_ranks=AllRanks(model.groups).all_of,
    )
    return replace(limits, max_model_len=plan.max_model_len, max_num_blocks=plan.num_blocks)


def least_limits(limits: Iterable[EngineConfig]) -> EngineConfig:
    """Return limits that hold for each of several runners."""
    each = list(limits)
    return replace(
        each[0],
        max_model_len=min(one.max_model_len for one in each),
        max_num_blocks=min(one.max_num_blocks for one in each),
        max_batch_size=min(one.max_batch_size for one in each),
        max_total_tokens=min(one.max_total_tokens for one in each),
    )


def sized_limits(
    config: EngineConfig, buffer_size_gb: float | None, bytes_per_block: int
) -> EngineConfig:
    """
    Set max_num_blocks to the blocks that fit into so many GiB beside the dummy block.

    Raises:
        InvalidConfig: No block fits.
    """
    if buffer_size_gb is None:
        return config
    num_blocks = int(buffer_size_gb * GIB) // bytes_per_block - 1
    if num_blocks < 1:
        message = (
            f"buffer_size_gb is {buffer_size_gb:g}, which holds no KV block of {bytes_per_block} "
            f"bytes beside the dummy: it takes at least {gib(2 * bytes_per_block, '.6f')}"
        )
        raise InvalidConfig(message, field="buffer_size_gb")
    return replace(config, max_num_blocks=num_blocks)


def fit_length(config: EngineConfig, longest: int) -> EngineConfig:
    """
    Lower a default max_model_len to what the model supports.

    Raises:
        InvalidConfig: A larger one is given, or a block is longer than the model supports.
    """
    check_block_fits(config.block_size, longest)
    if config.max_model_len <= longest:
        return config
    if config.max_model_len != EngineConfig().max_model_len:
        message = (
            f"max_model_len is {config.max_model_len}, but the model supports at most {longest} "
            f"tokens (max_position_embeddings): lower max_model_len to {longest} or less"
        )
        raise InvalidConfig(message, field="max_model_len")
    config = replace(config, max_model_len=longest)
    config.validate()
    return config
