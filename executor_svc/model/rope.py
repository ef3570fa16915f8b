"""Rotary positions: their settings in config.json, and the table of rotations."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.model.files.json_fields import JsonFields, shown
from tandem.errors import InvalidModel

DEFAULT_THETA = 10_000.0

_KNOWN_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}


class RopeKind(enum.Enum):
    """Kind of scaling that stretches frequencies beyond the length of pre-training."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """
    Resolved settings of rotary positions.

    `factor` stretches LINEAR and LLAMA3. The last three fields bound LLAMA3's blend: its bounds are
    wavelengths of `original_max_positions / low_freq_factor` and `original_max_positions /
    high_freq_factor` tokens.
    """

    theta: float = DEFAULT_THETA
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def read_rope(fields: JsonFields, max_positions: int) -> Rope:
    """
    Read `rope_scaling` (the older key) or `rope_parameters` (the newer one); theta may stand inside
    or beside them.

    Raises:
        InvalidModel: A rope type or key is not supported, or a value is out of range.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    inner = fields.inner(name) or JsonFields(fields.path, {}, {})
    unknown = sorted(set(inner.content) - _KNOWN_KEYS)
    kind_name = inner.get("rope_type") or inner.get("type") or RopeKind.DEFAULT.value
    try:
        kind = RopeKind(kind_name)
    except ValueError:
        known = ", ".join(kind.value for kind in RopeKind)
        raise InvalidModel(
            f"{fields.path}: rope type {shown(kind_name)} in {name} is not supported; "
            f"supported: {known}"
        ) from None
    if unknown:
        raise InvalidModel(
            f"{fields.path}: {name} has keys that are not supported: {shown(', '.join(unknown))}"
        )
    for source in (inner, fields):
        share = source.positive_float("partial_rotary_factor", 1.0)
        if share != 1.0:
            raise InvalidModel(
                f"{fields.path}: partial_rotary_factor {share} is not supported; supported: 1.0"
            )
    theta = inner.positive_float("rope_theta", fields.positive_float("rope_theta", DEFAULT_THETA))
    if kind is RopeKind.DEFAULT:
        return Rope(theta=theta)
    factor = inner.positive_float("factor")
    if kind is RopeKind.LINEAR:
        return Rope(theta=theta, kind=kind, factor=factor)
    rope = Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=inner.positive_float("low_freq_factor"),
        high_freq_factor=inner.positive_float("high_freq_factor"),
        original_max_positions=_original_max_positions(inner, fields, max_positions),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise InvalidModel(
            f"{fields.path}: {name}.high_freq_factor must be greater than low_freq_factor"
        )
    return rope


def _original_max_positions(inner: JsonFields, fields: JsonFields, max_positions: int) -> int:
    """Read the length of pre-training; the model's own key comes before the rope's."""
    key = "original_max_position_embeddings"
    return fields.positive_int(key, inner.positive_int(key, max_positions))


def context_len(rope: Rope, max_positions: int) -> int:
    """
    Return the length of the longest sequence that a model supports.

    `max_position_embeddings` does not include linear scaling but includes Llama 3's, as in vLLM.
    """
    return int(max_positions * rope.factor) if rope.kind is RopeKind.LINEAR else max_positions


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """
    Return the radians per position of each pair, float32 ``[head_dim / 2]``.

    Linear scaling divides all frequencies; Llama 3.1 divides those of wavelengths above the low
    bound, keeps those below the high bound and blends linearly in between.

    Source: RoPE (arXiv:2104.09864).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind is RopeKind.DEFAULT:
        return plain
    stretched = plain / rope.factor
    if rope.kind is RopeKind.LINEAR:
        return stretched
    turns = rope.original_max_positions * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * stretched + keep * plain


def rotation_table(rope: Rope, head_dim: int, num_positions: int) -> Tensor:
    """
    Compute cosine and sine of every position and pair, float32
    ``[num_positions, head_dim / 2, 2]``.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.stack((angles.cos(), angles.sin()), dim=-1)
