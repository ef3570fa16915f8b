"""
Sampling params of a request: checked, with defaults applied, and as the client is told them.

Field paths start at GenerateRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from tandem.errors import InvalidParameter
from tandem.inference.v1 import inference_service_pb2, request_pb2
from tandem.sampling_params import (
    MAX_BIAS,
    MIN_TEMPERATURE,
    SamplingParams,
    broken_range,
)

MAX_BIASED_IDS = 1024
_TOLD_PARAMS = tuple(
    param.name
    for param in fields(SamplingParams)
    if param.name in request_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    and param.name != "logit_bias"
)
"""Parameters that are one number and that a client is told."""


def check_sampling(request: inference_service_pb2.GenerateRequest, vocab_size: int) -> None:
    """
    Check all sampling params that are set.

    Raises:
        InvalidParameter: A value is out of range; the error has the field's path.
    """
    for descriptor, value in request.sampling.ListFields():
        name = descriptor.name
        if descriptor.message_type is None and (rule := broken_range(name, value)) is not None:
            shown = _shortest(value) if isinstance(value, float) else value
            raise InvalidParameter(f"{name} {rule}, got {shown}.", field=f"sampling.{name}")
    check_logit_bias(request.sampling.logit_bias, vocab_size, field="sampling.logit_bias")


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


def resolve_sampling(
    request: inference_service_pb2.GenerateRequest,
    defaults: SamplingParams,
    end_ids: Collection[int],
    choose_seed: Callable[[], int],
) -> SamplingParams:
    """
    Return a checked request's sampling params, with defaults for those that are not set.

    Args:
        request: The client's request.
        defaults: Defaults of the served model.
        end_ids: All ids that end the output.
        choose_seed: Called if no seed was sent.
    """
    given: dict[str, Any] = {param.name: value for param, value in request.sampling.ListFields()}
    given["min_tokens"] = request.stopping.min_tokens
    given["seed"] = given["seed"] if "seed" in given else choose_seed()
    response = request.response
    given["logprobs"] = response.logprobs if response.HasField("logprobs") else None
    given["logprob_token_ids"] = response.logprob_token_ids
    has_output = any(one.token_ids or one.finished for one in request.resume.choices)
    if response.HasField("prompt_logprobs") and not has_output:  # else they were told before
        given["prompt_logprobs"] = response.prompt_logprobs
    return row_params(given, defaults, end_ids)


def row_params(
    given: Mapping[str, Any], defaults: SamplingParams, end_ids: Collection[int]
) -> SamplingParams:
    """
    Return the params of a row, as executors take them, from checked values.

    Args:
        given: Values by name; None, or none, takes the default. `logit_bias` is a mapping.
        defaults: Params that are not given.
        end_ids: All ids that end the output.
    """
    chosen = replace(
        defaults, **{name: value for name, value in given.items() if value is not None}
    )
    temperature = chosen.temperature
    return replace(
        chosen,
        temperature=max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0,
        top_k=max(chosen.top_k, 0),
        end_ids=tuple(sorted(set(end_ids))) if chosen.min_tokens else (),
        logit_bias=tuple(sorted(given.get("logit_bias", {}).items())),
        logprob_token_ids=tuple(given.get("logprob_token_ids", ())),
        allowed_token_ids=tuple(sorted(set(given.get("allowed_token_ids", ())))),
    )


def sampling_message(sampling: SamplingParams) -> request_pb2.SamplingParams:
    """Return the sampling params as a client is told them, every field set."""
    told: dict[str, Any] = {name: getattr(sampling, name) for name in _TOLD_PARAMS}
    return request_pb2.SamplingParams(**told, logit_bias=dict(sampling.logit_bias))


def _shortest(value: float) -> str:
    """Return a float32's shortest decimal form, as the client wrote it."""
    return str(np.float32(value))
