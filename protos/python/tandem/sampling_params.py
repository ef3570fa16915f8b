"""
Sampling parameters: the one declaration of their defaults and ranges; the protos only repeat them
in comments. They are the same in a request, in a model's generation_config.json and in an
executor's description of the model's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

MIN_TEMPERATURE = 0.01
"""Least temperature above 0; temperatures between 0 and it count as it."""
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_TOP_K = 2**31 - 1
MAX_MIN_TOKENS = 2**31 - 1
MAX_LOGPROBS = 20
"""Largest number of likeliest ids that are reported with a token."""
MAX_BIAS = 100.0
"""Largest amount that a logit bias adds to a logit, or takes from it."""

_Rule = tuple[Callable[[float], bool], str]
_FINITE: _Rule = (lambda value: -math.inf < value < math.inf, "must be a finite number")
_PENALTY: _Rule = (lambda value: -MAX_PENALTY <= value <= MAX_PENALTY, "must be in [-2, 2]")


def _declared(*rules: _Rule, model_default: bool = False) -> Mapping[str, Any]:
    """
    Return the metadata of a parameter.

    Args:
        rules: Conditions on its value, each with the sentence about a value that breaks it.
        model_default: True if a model's author may recommend another default.
    """
    return {"rules": rules, "model_default": model_default}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """
    Sampling params of one row; the defaults are those of a model that recommends none.

    One value of this class carries all of them from the frontend's check to the sampler.
    `temperature` 0 is greedy, `top_k` 0 is off, `top_p` 1 is off; `seed` is a uint64, `choice`
    counts from 0. Penalties apply to the tokens before the one that is sampled:
    `repetition_penalty` (1 is off) to those of prompt and output, the other two (0 is off) to those
    of the output. None of `end_ids` is sampled before `min_tokens` outputs. `logit_bias` is added
    to the logits of distinct ids. Only `allowed_token_ids` are sampled, where there are any.
    `logprobs` is the number of likeliest ids that are reported with each token's log probability;
    None reports no log probabilities. Those of `logprob_token_ids` follow them. `prompt_logprobs`
    is the same for the tokens of the prompt. `row_metadata` has numbers by label for a logits hook
    of an executor in the same process; they cross no link.
    """

    temperature: float = field(
        default=1.0,
        metadata=_declared(
            _FINITE,
            (lambda value: value >= 0, "must be non-negative"),
            (lambda value: value <= MAX_TEMPERATURE, "must be in [0, 2]"),
            model_default=True,
        ),
    )
    top_k: int = field(
        default=0,
        metadata=_declared(
            (lambda value: value >= -1, "must be 0 (disable), or at least 1"),
            (lambda value: value <= MAX_TOP_K, f"must be at most {MAX_TOP_K}"),
            model_default=True,
        ),
    )
    top_p: float = field(
        default=0.9,
        metadata=_declared((lambda value: 0 < value <= 1, "must be in (0, 1]"), model_default=True),
    )
    seed: int = field(
        default=0,
        metadata=_declared((lambda value: 0 <= value < 2**64, "must be in [0, 2**64)")),
    )
    choice: int = 0
    repetition_penalty: float = field(
        default=1.0,
        metadata=_declared(
            _FINITE, (lambda value: value > 0, "must be greater than zero"), model_default=True
        ),
    )
    frequency_penalty: float = field(default=0.0, metadata=_declared(_PENALTY, model_default=True))
    presence_penalty: float = field(default=0.0, metadata=_declared(_PENALTY, model_default=True))
    min_p: float = field(
        default=0.0,
        metadata=_declared(
            (lambda value: 0 <= value <= 1, "must be in [0, 1]"), model_default=True
        ),
    )
    min_tokens: int = field(
        default=0,
        metadata=_declared(
            (lambda value: value >= 0, "must be non-negative"),
            (lambda value: value <= MAX_MIN_TOKENS, f"must be at most {MAX_MIN_TOKENS}"),
        ),
    )
    end_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = field(
        default=None,
        metadata=_declared(
            (lambda value: 0 <= value <= MAX_LOGPROBS, f"must be in [0, {MAX_LOGPROBS}]")
        ),
    )
    prompt_logprobs: int | None = field(
        default=None,
        metadata=_declared(
            (lambda value: 0 <= value <= MAX_LOGPROBS, f"must be in [0, {MAX_LOGPROBS}]")
        ),
    )

    logprob_token_ids: tuple[int, ...] = ()
    row_metadata: tuple[tuple[str, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        """True if a penalty is on, so that the tokens so far change the next logits."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


_RULES: Mapping[str, tuple[_Rule, ...]] = {
    param.name: param.metadata["rules"] for param in fields(SamplingParams) if param.metadata
}
MODEL_DEFAULT_PARAMS = tuple(
    param.name for param in fields(SamplingParams) if param.metadata.get("model_default")
)
"""Parameters whose default a model's author may recommend in generation_config.json."""


def params_with_defaults(recommended: Mapping[str, Any]) -> SamplingParams:
    """Return the params of a request that sets none, where a model's author recommends these."""
    found = replace(SamplingParams(), **recommended)
    return replace(found, top_k=max(found.top_k, 0))


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


def broken_param(params: SamplingParams) -> str | None:
    """
    Return the first parameter whose value is outside its range, or None. Real numbers must be
    float32 already, as those from a message are.
    """
    for name, rules in _RULES.items():
        value = getattr(params, name)
        if value is not None and not all(holds(value) for holds, _ in rules):
            return name
    return None
