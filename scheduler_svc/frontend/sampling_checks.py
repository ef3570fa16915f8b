"""Ranges of everything that decides how a token is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tandem.errors import InvalidParameter
from tandem.inference.v1 import request_pb2

MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_BIASED_IDS = 1024
MAX_BIAS = 100.0
MAX_LOGPROBS = 20


def check_sampling(sampling: request_pb2.SamplingParams, path: str) -> None:
    """
    Check everything but `logit_bias`, which needs the vocabulary.

    Args:
        sampling: What the client sent.
        path: Of its field, with a dot at the end.

    Raises:
        InvalidParameter: With the field's path.
    """
    top_p, min_p = sampling.top_p, sampling.min_p
    if sampling.HasField("temperature"):
        _check_temperature(sampling.temperature, f"{path}temperature")
    if sampling.HasField("top_k") and sampling.top_k < -1:
        raise InvalidParameter(
            f"top_k must be 0 (disable), or at least 1, got {sampling.top_k}.",
            field=f"{path}top_k",
        )
    if sampling.HasField("top_p") and not 0 < top_p <= 1:
        raise InvalidParameter(
            f"top_p must be in (0, 1], got {_shortest(top_p)}.", field=f"{path}top_p"
        )
    if not 0 <= min_p <= 1:
        raise InvalidParameter(
            f"min_p must be in [0, 1], got {_shortest(min_p)}.", field=f"{path}min_p"
        )
    if sampling.HasField("repetition_penalty"):
        _check_repetition(sampling.repetition_penalty, f"{path}repetition_penalty")
    for name in ("frequency_penalty", "presence_penalty"):
        penalty = getattr(sampling, name)
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise InvalidParameter(
                f"{name} must be in [-2, 2], got {_shortest(penalty)}.", field=f"{path}{name}"
            )


def check_logit_bias(bias: Mapping[int, float], vocab_size: int, *, field: str) -> None:
    """
    Check ids and values.

    Raises:
        InvalidParameter: Naming the first, by id, that is wrong.
    """
    if len(bias) > MAX_BIASED_IDS:
        raise InvalidParameter(
            f"logit_bias must have at most {MAX_BIASED_IDS} ids, got {len(bias)}.", field=field
        )
    for token_id in sorted(bias):
        if not 0 <= token_id < vocab_size:
            raise InvalidParameter(
                f"token id {token_id} is not in the vocabulary, which is 0 to {vocab_size - 1}.",
                field=f"{field}[{token_id}]",
            )
        if not -MAX_BIAS <= bias[token_id] <= MAX_BIAS:
            raise InvalidParameter(
                f"a logit bias must be in [-100, 100], got {_shortest(bias[token_id])}.",
                field=f"{field}[{token_id}]",
            )


def _check_temperature(temperature: float, field: str) -> None:
    if not math.isfinite(temperature):
        raise InvalidParameter(
            f"temperature must be a finite number, got {temperature}.", field=field
        )
    if temperature < 0:
        raise InvalidParameter(
            f"temperature must be non-negative, got {_shortest(temperature)}.", field=field
        )
    if temperature > MAX_TEMPERATURE:
        raise InvalidParameter(
            f"temperature must be in [0, 2], got {_shortest(temperature)}.", field=field
        )


def _check_repetition(penalty: float, field: str) -> None:
    if not math.isfinite(penalty):
        raise InvalidParameter(
            f"repetition_penalty must be a finite number, got {penalty}.", field=field
        )
    if penalty <= 0:
        raise InvalidParameter(
            f"repetition_penalty must be greater than zero, got {_shortest(penalty)}.", field=field
        )


def _shortest(value: float) -> str:
    """A float32's shortest decimal form, as the client wrote it."""
    return str(np.float32(value))
