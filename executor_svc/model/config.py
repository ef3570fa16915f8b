"""
The model's description: a directory's config.json and generation_config.json, checked, in our own
terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from executor_svc.model.families import Family, family_of, layer_windows
from executor_svc.model.files.directory import FORMAT, check_model_directory
from executor_svc.model.files.json_fields import JsonFields, shown
from executor_svc.model.rope import Rope, context_len, read_rope
from tandem.errors import InvalidModel
from tandem.sampling_params import MODEL_DEFAULT_PARAMS, SamplingParams

MAX_LAYERS = 10_000
MAX_WIDTH = 2**24
MAX_HEADS = 2**16
MAX_HEAD_DIM = 2**14
"""
Bounds far above every model's sizes; larger values would cost time and memory before the weights
are read.
"""
MIN_CONTEXT_LEN = 2
"""Least context length of a model: one token of prompt and one of output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """
    The complete description of a decoder.

    Attributes:
        architecture: Name in config.json.
        windows: Sliding window per layer: number of last positions that a query sees, its own
            included; None for all positions.
        qk_norm: Queries and keys are normalised per head before rotation.
        checkpoint_dtype: "float32", "bfloat16" or "float16" as config.json names it; None if it
            names none of them.
        tied_embeddings: The output projection is the embedding. The value of config.json at first;
            a checkpoint that holds both tensors with different values overrules it when loaded.
        eos_token_ids: Ids that end a sequence: those of generation_config.json, then those of
            config.json. If neither file has the key, they are the family's default, as in
            transformers: 2 in Llama, Mistral and Ministral, none in Qwen. null means none.
        generation_defaults: Sampling parameters that the model's author recommends in
            generation_config.json, by name.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    checkpoint_dtype: str | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, float]

    @property
    def context_len(self) -> int:
        """Most tokens of one sequence, rotary scaling included."""
        return context_len(self.rope, self.max_position_embeddings)


def read_model_config(model_dir: Path) -> ModelConfig:
    """
    Read and check a model directory's description.

    Raises:
        InvalidModel: The directory or a file does not exist, JSON is bad, the architecture,
            activation or rope type is not supported, or a value is missing or out of range.
    """
    check_model_directory(model_dir)
    path = model_dir / "config.json"
    if not path.is_file():
        raise InvalidModel(f"{model_dir} has no config.json: give {FORMAT}")
    family = family_of(JsonFields.read(path))
    fields = JsonFields.read(path, defaults=family.defaults)
    _refuse_unsupported(fields)
    generation_path = model_dir / "generation_config.json"
    generation = JsonFields.read(generation_path) if generation_path.is_file() else None
    return _model_config(fields, family, generation)


def _refuse_unsupported(fields: JsonFields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in {"silu", "swish"}:
        raise InvalidModel(
            f"{fields.path}: hidden_act {shown(activation)} is not supported; supported: silu"
        )
    if fields.get("quantization_config") is not None:
        raise InvalidModel(
            f"{fields.path}: quantized checkpoints (quantization_config) are not supported; "
            "use the model's bfloat16, float16 or float32 weights"
        )
    if fields.get("per_layer_config"):
        raise InvalidModel(
            f"{fields.path}: layers with settings of their own (per_layer_config) are not supported"
        )


def _model_config(fields: JsonFields, family: Family, generation: JsonFields | None) -> ModelConfig:
    hidden_size = fields.positive_int("hidden_size", at_most=MAX_WIDTH)
    num_heads = fields.positive_int("num_attention_heads", at_most=MAX_HEADS)
    num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise InvalidModel(
            f"{fields.path}: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    head_dim = fields.positive_int("head_dim", hidden_size // num_heads, at_most=MAX_HEAD_DIM)
    if head_dim % 2:
        raise InvalidModel(f"{fields.path}: head_dim must be even for rotary positions: {head_dim}")
    num_layers = fields.positive_int("num_hidden_layers", at_most=MAX_LAYERS)
    max_positions = fields.positive_int("max_position_embeddings")
    rope = read_rope(fields, max_positions)
    _check_context(fields, context_len(rope, max_positions), max_positions)
    vocab_size = fields.positive_int("vocab_size")
    attention_bias = fields.boolean("attention_bias", default=False)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size", at_most=MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        rope=rope,
        windows=layer_windows(fields, family, num_layers),
        qkv_bias=family.qkv_bias or (family.attention_bias_key and attention_bias),
        output_bias=family.attention_bias_key and attention_bias,
        mlp_bias=family.mlp_bias_key and fields.boolean("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        tied_embeddings=fields.boolean("tie_word_embeddings", default=False),
        checkpoint_dtype=_checkpoint_dtype(fields),
        eos_token_ids=_eos_token_ids(fields, generation, vocab_size),
        generation_defaults=_generation_defaults(generation),
    )


def _check_context(fields: JsonFields, longest: int, max_positions: int) -> None:
    """Refuse a model that has no room for a prompt and a token of output."""
    if longest < MIN_CONTEXT_LEN:
        raise InvalidModel(
            f"{fields.path}: max_position_embeddings is {max_positions}, so that a sequence has no "
            f"room for a prompt and an output: they take {MIN_CONTEXT_LEN} tokens at least"
        )


def _checkpoint_dtype(fields: JsonFields) -> str | None:
    """Return the type that config.json names, under the key `dtype` or the older `torch_dtype`."""
    for key in ("dtype", "torch_dtype"):
        name = fields.get(key)
        if name in ("float32", "bfloat16", "float16"):
            return str(name)
    return None


def _eos_token_ids(
    fields: JsonFields, generation: JsonFields | None, vocab_size: int
) -> tuple[int, ...]:
    key = "eos_token_id"
    sources = [source for source in (generation, fields) if source and key in source.content]
    if sources:
        found = [token for source in sources for token in source.token_ids(key, vocab_size)]
        return tuple(dict.fromkeys(found))
    default = fields.get(key)
    return (default,) if default is not None and default < vocab_size else ()


def _generation_defaults(generation: JsonFields | None) -> Mapping[str, float]:
    if generation is None:
        return {}
    unset = SamplingParams()
    found = {
        name: (
            generation.optional_int(name)
            if isinstance(getattr(unset, name), int)
            else generation.optional_float(name)
        )
        for name in MODEL_DEFAULT_PARAMS
    }
    return {name: value for name, value in found.items() if value is not None}
