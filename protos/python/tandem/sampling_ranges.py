"""
Ranges of sampling params, the same in a request, in a model's generation_config.json and in an
executor's description of the model's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

MIN_TEMPERATURE = 0.01
"""Least temperature above 0; temperatures between 0 and it count as it."""
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 20
"""Largest number of likeliest ids that are reported with a token."""
MAX_BIAS = 100.0
"""Largest amount that a logit bias adds to a logit, or takes from it."""

_Rule = tuple[Callable[[float], bool], str]
_FINITE: _Rule = (lambda value: -math.inf < value < math.inf, "must be a finite number")
_PENALTY: _Rule = (lambda value: -MAX_PENALTY <= value <= MAX_PENALTY, "must be in [-2, 2]")

_RULES: Mapping[str, tuple[_Rule, ...]] = {
    "temperature": (
        _FINITE,
        (lambda value: value >= 0, "must be non-negative"),
        (lambda value: value <= MAX_TEMPERATURE, "must be in [0, 2]"),
    ),
    "top_k": (
        (lambda value: value >= -1, "must be 0 (disable), or at least 1"),
        (lambda value: value <= MAX_TOP_K, f"must be at most {MAX_TOP_K}"),
    ),
    "top_p": ((lambda value: 0 < value <= 1, "must be in (0, 1]"),),
    "min_p": ((lambda value: 0 <= value <= 1, "must be in [0, 1]"),),
    "repetition_penalty": (_FINITE, (lambda value: value > 0, "must be greater than zero")),
    "frequency_penalty": (_PENALTY,),
    "presence_penalty": (_PENALTY,),
}


def broken_range(name: str, value: float) -> str | None:
    """
    Return the rule that a value breaks, such as "must be in (0, 1]"; None if it breaks none.

    A real number is checked as the float32 that it becomes on its way to the sampler: 1e-60 is 0.

    Args:
        name: Name as in SamplingParams; a name without a range allows every value.
        value: A number; NaN breaks every range.
    """
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            value = float(np.float32(value))
    return next((rule for holds, rule in _RULES.get(name, ()) if not holds(value)), None)
