"""
Types of the numbers that an executor keeps for each request by slot: metadata types.

This module needs no PyTorch, so that settings are checked before it is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from tandem.errors import InvalidConfig

_FIELD = "request_metadata_types"

DTYPES: Mapping[str, type[np.generic]] = {
    "float32": np.float32,
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
}
"""Number types of metadata, as in `torch`."""

SAMPLING_DTYPES: Mapping[str, str] = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "seed": "int64",
    "choice": "int64",
    "min_p": "float32",
}
"""Labels whose numbers are sampling parameters that draw tokens; captured graphs read them too."""


class MetadataType(NamedTuple):
    """
    A number that every request has.

    Attributes:
        label: Its name.
        dtype: A key of `DTYPES`.
        on_gpu: True: the numbers of all slots lie on the model's device, else on the host.
    """

    label: str
    dtype: str
    on_gpu: bool

    def number(self, given: object) -> float | None:
        """Return a value as a number of this type, or None if it is none."""
        if self.dtype == "bool":
            return bool(given) if isinstance(given, bool | np.bool_) else None
        if isinstance(given, bool | np.bool_):
            return None
        if self.dtype == "float32" and isinstance(given, int | float | np.integer | np.floating):
            return _as_float32(given)
        if self.dtype == "float32" or not isinstance(given, int | np.integer):
            return None
        bounds = np.iinfo(np.dtype(self.dtype))
        return int(given) if bounds.min <= given <= bounds.max else None


DEFAULT_METADATA_TYPES = (
    MetadataType("temperature", "float32", on_gpu=False),
    MetadataType("top_k", "int32", on_gpu=False),
    MetadataType("top_p", "float32", on_gpu=False),
    MetadataType("termination_id", "int64", on_gpu=True),
    MetadataType("return_log_probs", "bool", on_gpu=False),
    MetadataType("skip_prompt_log_probs", "bool", on_gpu=False),
    MetadataType("top_n_logprobs", "int32", on_gpu=False),
)
"""Types where none are given, which every request fits. Source: those of Megatron Core."""

_KNOWN_DTYPES = {**SAMPLING_DTYPES, **{one.label: one.dtype for one in DEFAULT_METADATA_TYPES}}
"""Number types of the labels that have a meaning."""


def is_known(label: str) -> bool:
    """Tell whether a label's numbers come from the parameters that every request has."""
    return label in _KNOWN_DTYPES


def checked_types(given: Any) -> tuple[MetadataType, ...]:
    """
    Check metadata types.

    Args:
        given: Tuples of label, `torch.dtype` or its name, and True for numbers on the device; None
            for `DEFAULT_METADATA_TYPES`.

    Raises:
        InvalidConfig: One is no such tuple, has an unknown number type, or stands there twice.
    """
    if given is None:
        return DEFAULT_METADATA_TYPES
    if not isinstance(given, list | tuple):
        raise InvalidConfig(f"{_FIELD} must be a list of tuples, got {given!r}", field=_FIELD)
    types = tuple(map(_checked_type, given))
    label, count = Counter(one.label for one in types).most_common(1)[0] if types else ("", 1)
    if count > 1:
        raise InvalidConfig(f"{_FIELD} has the label {label!r} {count} times", field=_FIELD)
    return types


def _as_float32(given: float | np.integer[Any] | np.floating[Any]) -> float | None:
    """Return a number as a float32, or None if it is no finite one."""
    try:
        with np.errstate(over="ignore"):
            rounded = float(np.float32(given))
    except OverflowError:  # a whole number beyond every float
        return None
    return rounded if isfinite(rounded) else None


def _checked_type(given: Any) -> MetadataType:
    if not isinstance(given, tuple) or len(given) != len(MetadataType._fields):
        raise InvalidConfig(
            f"{_FIELD} must have tuples of label, dtype and on_gpu, such as "
            f'("steer", torch.float32, True), got {given!r}',
            field=_FIELD,
        )
    label, dtype, on_gpu = given
    name = str(dtype).removeprefix("torch.")
    if not isinstance(label, str) or not label or not isinstance(on_gpu, bool):
        raise InvalidConfig(
            f"a tuple of {_FIELD} begins with a label and ends with True or False, got {given!r}",
            field=_FIELD,
        )
    if name not in DTYPES:
        raise InvalidConfig(
            f"{_FIELD}: the dtype of {label!r} must be one of {', '.join(DTYPES)}, got {dtype!r}",
            field=_FIELD,
        )
    if _KNOWN_DTYPES.get(label, name) != name:
        raise InvalidConfig(
            f"{_FIELD}: {label!r} is a parameter of every request and {_KNOWN_DTYPES[label]}, "
            f"got {name}",
            field=_FIELD,
        )
    return MetadataType(label, name, on_gpu)
