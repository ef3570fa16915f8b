"""Checks of a request's sampling params."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tandem.errors import InvalidParameter
from tandem.inference.v1 import request_pb2
from tandem.sampling_ranges import MAX_BIAS, broken_range

MAX_BIASED_IDS = 1024


def check_sampling(sampling: request_pb2.SamplingParams, path: str) -> None:
    """
    Check all sampling params but `logit_bias`, which needs the vocabulary.

    Args:
        sampling: The client's sampling params.
        path: Path of their field, with a dot at the end.

    Raises:
        InvalidParameter: A value is out of range; the error has the field's path.
    """
    for descriptor, value in sampling.ListFields():  # those that are set
        name = descriptor.name
        if descriptor.message_type is None and (rule := broken_range(name, value)) is not None:
            shown = _shortest(value) if isinstance(value, float) else value
            raise InvalidParameter(f"{name} {rule}, got {shown}.", field=f"{path}{name}")


def check_logit_bias(bias: Mapping[int, float], vocab_size: int, *, field: str) -> None:
    """
    Check the ids and values of a logit bias.

    Raises:
        InvalidParameter: There are too many ids, or one is wrong; the error names the lowest.
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


def _shortest(value: float) -> str:
    """Return a float32's shortest decimal form, as the client wrote it."""
    return str(np.float32(value))
