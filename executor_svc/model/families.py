"""
The decoder families we compute: one table row per architecture says how it differs from the others.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from executor_svc.model.json_fields import JsonFields
from tandem.errors import InvalidModel


class WindowRule(enum.Enum):
    """Which layers attend to a sliding window."""

    NONE = "no layer"
    ALL_LAYERS = "all layers when sliding_window is set"
    BY_LAYER = "layer_types, or layers from max_window_layers, when use_sliding_window is set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """
    What an architecture's name implies.

    Attributes:
        architecture: Name in config.json.
        qkv_bias: Query, key and value projections always have a bias.
        attention_bias_key: config.json's attention_bias gives all four projections one.
        mlp_bias_key: config.json's mlp_bias gives the three MLP projections one.
        qk_norm: Queries and keys are normalised per head.
        window: Which layers have a sliding window.
        defaults: What absent keys of config.json mean in this family.
    """

    architecture: str
    qkv_bias: bool = False
    attention_bias_key: bool = False
    mlp_bias_key: bool = False
    qk_norm: bool = False
    window: WindowRule = WindowRule.NONE
    defaults: Mapping[str, object] = field(default_factory=dict)


_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            architecture="LlamaForCausalLM",
            attention_bias_key=True,
            mlp_bias_key=True,
            defaults={"max_position_embeddings": 2048},
        ),
        Family(
            architecture="MistralForCausalLM",
            window=WindowRule.ALL_LAYERS,
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 4096 * 32,
                "sliding_window": 4096,
            },
        ),
        Family(
            architecture="Qwen2ForCausalLM",
            qkv_bias=True,
            window=WindowRule.BY_LAYER,
            defaults=_QWEN_DEFAULTS,
        ),
        Family(
            architecture="Qwen3ForCausalLM",
            attention_bias_key=True,
            qk_norm=True,
            window=WindowRule.BY_LAYER,
            defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        ),
    )
}


def family_of(fields: JsonFields) -> Family:
    """
    Find the family config.json names.

    Raises:
        InvalidModel: No architecture, or one we do not compute; the message lists those we do.
    """
    names = fields.get("architectures")
    known = ", ".join(FAMILIES)
    if not isinstance(names, list) or len(names) != 1:
        raise InvalidModel(
            f"{fields.path}: architectures must list one name, got {names!r}; known: {known}"
        )
    family = FAMILIES.get(names[0]) if isinstance(names[0], str) else None
    if family is None:
        raise InvalidModel(
            f"{fields.path}: architecture {names[0]!r} is not supported; known: {known}"
        )
    return family


def layer_windows(fields: JsonFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """
    Decide each layer's sliding window in tokens; None is full attention.

    Raises:
        InvalidModel: layer_types has another length than the model, or a kind we do not compute.
    """
    if family.window is WindowRule.NONE:
        return (None,) * num_layers
    by_layer = family.window is WindowRule.BY_LAYER
    if by_layer and not fields.boolean("use_sliding_window", default=False):
        _layer_types(fields, num_layers, allowed={"full_attention"})
        return (None,) * num_layers
    if fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.positive_int("sliding_window")
    if not by_layer:
        return (window,) * num_layers
    kinds = _layer_types(fields, num_layers, allowed={"full_attention", "sliding_attention"})
    if kinds is None:
        first = fields.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise InvalidModel(
                f"{fields.path}: max_window_layers must be 0 or a positive integer, got {first!r}"
            )
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_types(fields: JsonFields, num_layers: int, allowed: set[str]) -> list[str] | None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise InvalidModel(
            f"{fields.path}: layer_types must list {num_layers} layers, got {kinds!r}"
        )
    for kind in kinds:
        if kind not in allowed:
            raise InvalidModel(
                f"{fields.path}: layer type {kind!r} is not supported here; "
                f"supported: {', '.join(sorted(allowed))}"
            )
    return kinds
