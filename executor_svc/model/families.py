"""
The supported decoder families: a table with one row per architecture and its differences.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from executor_svc.model.files.json_fields import JsonFields, shown
from tandem.errors import InvalidModel


class WindowRule(enum.Enum):
    """
    Rule for the layers to which sliding_window applies; layer_types, if present, tells each layer's
    kind.
    """

    NEVER = "no layer has a window"
    ALWAYS = "without layer_types all layers have it"
    SWITCHED = "with use_sliding_window; without layer_types layers from max_window_layers have it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """
    Properties that an architecture's name implies.

    Attributes:
        architecture: Name in config.json.
        model_types: Values that config.json's model_type may have, if it is given.
        qkv_bias: Query, key and value projections always have a bias.
        attention_bias_key: config.json's attention_bias gives all four projections one.
        mlp_bias_key: config.json's mlp_bias gives the three MLP projections one.
        qk_norm: Queries and keys are normalised per head.
        window: Rule for the layers that have a sliding window.
        defaults: Values of keys that are absent from config.json in this family.
    """

    architecture: str
    model_types: tuple[str, ...]
    qkv_bias: bool = False
    attention_bias_key: bool = False
    mlp_bias_key: bool = False
    qk_norm: bool = False
    window: WindowRule = WindowRule.NEVER
    defaults: Mapping[str, object] = field(default_factory=dict)


_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "sliding_window": 4096,
    "eos_token_id": 2,
}
_MISTRAL_TYPES = ("mistral", "ministral")
"""
Model types of Mistral and Ministral: transformers reads a mistral with layer_types as a ministral,
and they compute the same.
"""

FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            architecture="LlamaForCausalLM",
            model_types=("llama",),
            attention_bias_key=True,
            mlp_bias_key=True,
            defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
        ),
        Family(
            architecture="MistralForCausalLM",
            model_types=_MISTRAL_TYPES,
            window=WindowRule.ALWAYS,
            defaults=_MISTRAL_DEFAULTS,
        ),
        Family(
            architecture="MinistralForCausalLM",
            model_types=_MISTRAL_TYPES,
            window=WindowRule.ALWAYS,
            defaults=_MISTRAL_DEFAULTS,
        ),
        Family(
            architecture="Qwen2ForCausalLM",
            model_types=("qwen2",),
            qkv_bias=True,
            window=WindowRule.SWITCHED,
            defaults=_QWEN_DEFAULTS,
        ),
        Family(
            architecture="Qwen3ForCausalLM",
            model_types=("qwen3",),
            attention_bias_key=True,
            qk_norm=True,
            window=WindowRule.SWITCHED,
            defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        ),
    )
}

_FULL, _SLIDING = "full_attention", "sliding_attention"


def family_of(fields: JsonFields) -> Family:
    """
    Find the family that config.json names.

    Raises:
        InvalidModel: There is no architecture, or one that is not supported; the message lists the
            supported ones. Or model_type is another family's: then one of the two is wrong.
    """
    names = fields.get("architectures")
    known = ", ".join(FAMILIES)
    if not isinstance(names, list) or len(names) != 1:
        raise InvalidModel(
            f"{fields.path}: architectures must list one name, got {shown(names)}; known: {known}"
        )
    family = FAMILIES.get(names[0]) if isinstance(names[0], str) else None
    if family is None:
        raise InvalidModel(
            f"{fields.path}: architecture {shown(names[0])} is not supported; known: {known}"
        )
    model_type = fields.get("model_type")
    if model_type is not None and model_type not in family.model_types:
        raise InvalidModel(
            f"{fields.path}: model_type {shown(model_type)} does not fit architecture "
            f"{family.architecture!r}, which is of model_type {' or '.join(family.model_types)}: "
            "one of the two describes another computation"
        )
    return family


def layer_windows(fields: JsonFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """
    Decide each layer's sliding window in tokens; None is full attention.

    Raises:
        InvalidModel: layer_types has another length than the model, a kind that is not supported,
            or a sliding layer although there is no window; or a family without windows has one.
    """
    window = _window(fields, family)
    kinds = _layer_types(fields, num_layers)
    if kinds is None:
        first = 0
        if window is not None and family.window is WindowRule.SWITCHED:
            first = fields.whole_number("max_window_layers")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if window is None and _SLIDING in kinds:
        raise InvalidModel(
            f"{fields.path}: layer_types has a {_SLIDING} layer but there is no window: "
            f"in {family.architecture} {_HOW_TO_WINDOW[family.window]}"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)


_HOW_TO_WINDOW = {
    WindowRule.NEVER: WindowRule.NEVER.value,
    WindowRule.ALWAYS: "sliding_window sets it",
    WindowRule.SWITCHED: "sliding_window and use_sliding_window set it",
}


def _window(fields: JsonFields, family: Family) -> int | None:
    is_switched = family.window is WindowRule.SWITCHED
    if is_switched and not fields.boolean("use_sliding_window", default=False):
        return None
    if fields.get("sliding_window") is None:
        return None
    window = fields.positive_int("sliding_window")
    if family.window is WindowRule.NEVER:
        raise InvalidModel(
            f"{fields.path}: sliding_window is {window}, but in {family.architecture} "
            f"{family.window.value}: remove it, or name the architecture that has one"
        )
    return window


def _layer_types(fields: JsonFields, num_layers: int) -> list[str] | None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise InvalidModel(
            f"{fields.path}: layer_types must list {num_layers} layers, got {shown(kinds)}"
        )
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise InvalidModel(
                f"{fields.path}: layer type {shown(kind)} is not supported here; "
                f"supported: {_FULL}, {_SLIDING}"
            )
    return kinds
