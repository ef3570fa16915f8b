"""Encoding of a row's sampling params as `RowSampling` messages, and back."""

from __future__ import annotations

import math

import numpy as np

from tandem.executor.v1 import batch_pb2
from tandem.link.codec.fields import (
    FLOAT32,
    INT32,
    check_length,
    malformed,
    raw_column,
    read_column,
)
from tandem.sampling_params import MAX_LOGPROBS, SamplingParams

_MAX_INT32 = 2**31 - 1


def sampling_message(sampling: SamplingParams) -> batch_pb2.RowSampling:
    """Build the message; params that are off stay unset if an unset field reads as off."""
    message = batch_pb2.RowSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        choice=sampling.choice,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
    )
    if sampling.end_ids:
        message.end_ids = raw_column(np.array(sampling.end_ids, np.int32), INT32)
    if sampling.logit_bias:
        ids, bias = zip(*sampling.logit_bias, strict=True)
        message.bias_ids = raw_column(np.array(ids, np.int32), INT32)
        message.bias = raw_column(np.array(bias, np.float32), FLOAT32)
    return message


def read_sampling(message: batch_pb2.RowSampling, field: str) -> SamplingParams:
    """Read the message at `field`, or raise `SessionLost` naming the field that is out of range."""
    bias_ids = read_column(message.bias_ids, INT32, f"{field}.bias_ids")
    bias = read_column(message.bias, FLOAT32, f"{field}.bias")
    check_length(bias, len(bias_ids), f"{field}.bias")
    sampling = SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        choice=message.choice,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        min_p=message.min_p,
        min_tokens=message.min_tokens,
        end_ids=tuple(read_column(message.end_ids, INT32, f"{field}.end_ids").tolist()),
        logit_bias=tuple(zip(bias_ids.tolist(), bias.tolist(), strict=True)),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )
    _check(sampling, field)
    return sampling


def _check(sampling: SamplingParams, field: str) -> None:
    """Refuse values that no scheduler sends and for which the sampler's arithmetic is undefined."""
    ids = [token for token, _ in sampling.logit_bias]
    bias = [value for _, value in sampling.logit_bias]
    repetition = sampling.repetition_penalty
    rules = (
        ("temperature", 0 <= sampling.temperature < math.inf, sampling.temperature),
        ("top_p", 0 < sampling.top_p <= 1, sampling.top_p),
        ("top_k", sampling.top_k <= _MAX_INT32, sampling.top_k),
        ("repetition_penalty", 0 < repetition < math.inf, repetition),
        (
            "frequency_penalty",
            math.isfinite(sampling.frequency_penalty),
            sampling.frequency_penalty,
        ),
        ("presence_penalty", math.isfinite(sampling.presence_penalty), sampling.presence_penalty),
        ("min_p", 0 <= sampling.min_p <= 1, sampling.min_p),
        ("min_tokens", sampling.min_tokens <= _MAX_INT32, sampling.min_tokens),
        ("bias_ids", len(set(ids)) == len(ids), "not distinct"),
        ("bias", all(map(math.isfinite, bias)), "not finite"),
        ("logprobs", (sampling.logprobs or 0) <= MAX_LOGPROBS, sampling.logprobs),
    )
    for name, holds, value in rules:
        if not holds:
            raise malformed(f"{field}.{name}", f"is {value}")
