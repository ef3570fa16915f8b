"""Model configurations by size alone; benchmarks fill them with random weights."""

from __future__ import annotations

from executor_svc.model.config import ModelConfig
from executor_svc.model.rope import Rope
from tandem_bench.device.sizes import MODEL_SIZES, NORM_EPS, ROPE_THETA, ModelSizes


def model_config(sizes: ModelSizes) -> ModelConfig:
    """Describe a model of these sizes as the executor does, with a bfloat16 checkpoint."""
    return ModelConfig(
        architecture=sizes.architecture,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        norm_eps=NORM_EPS,
        max_position_embeddings=sizes.max_positions,
        rope=Rope(theta=ROPE_THETA),
        windows=(None,) * sizes.num_layers,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=sizes.qk_norm,
        tied_embeddings=sizes.tied_embeddings,
        checkpoint_dtype="bfloat16",
        eos_token_ids=(),
        generation_defaults={},
    )


SHAPES = {name: model_config(sizes) for name, sizes in MODEL_SIZES.items()}
"""Model configurations by the names of `MODEL_SIZES`."""
