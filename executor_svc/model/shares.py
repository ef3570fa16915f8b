"""A model's description as one of its ranks sees it."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.model.config import ModelConfig
from executor_svc.parallel.sharding import ModelSizes, Sharding, shard


def sizes_of(config: ModelConfig) -> ModelSizes:
    """Return the sizes that ranks divide."""
    return ModelSizes(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
    )


def sharding_of(
    config: ModelConfig,
    rank: int = 0,
    size: int = 1,
    *,
    pipeline_rank: int = 0,
    pipeline_size: int = 1,
) -> Sharding:
    """
    Return the share of one rank; arguments are those of `shard`.

    Raises:
        InvalidConfig: So many ranks cannot hold the model.
    """
    return shard(
        sizes_of(config), rank, size, pipeline_rank=pipeline_rank, pipeline_size=pipeline_size
    )


def rank_config(config: ModelConfig, sharding: Sharding) -> ModelConfig:
    """
    Return the geometry of one rank: its layers, its heads and its part of the MLP, as if they were
    a model. The vocabulary stays whole, because its ids are those of all ranks.
    """
    own, layers = sharding.own, sharding.stage.layers
    return replace(
        config,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        intermediate_size=own.intermediate_size,
        num_layers=own.num_layers,
        windows=config.windows[layers.start : layers.stop],
    )
