"""
Encoding of a row's sampling params as `RowSampling` messages, and back.

A parameter that is one number has a field of its own name and needs no line here.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from tandem.errors import SessionLost
from tandem.executor.v1 import batch_pb2
from tandem.link.codec.fields import (
    FLOAT32,
    INT32,
    check_length,
    malformed,
    raw_column,
    read_column,
)
from tandem.sampling_params import SamplingParams, broken_param, broken_range

_LISTS = ("end_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids")
_LOCAL = "row_metadata"
"""Parameter that no message has."""
_NUMBERS = tuple(
    param.name for param in fields(SamplingParams) if param.name not in (*_LISTS, _LOCAL)
)
"""Parameters that are one number."""
_OPTIONAL = tuple(
    (param.name, param.default)
    for param in fields(SamplingParams)
    if param.name in _NUMBERS
    and batch_pb2.RowSampling.DESCRIPTOR.fields_by_name[param.name].has_presence
)
"""Parameters whose field may be unset, with the default that it then has."""


_OWN = ("seed", "choice")
"""Parameters that differ between requests which are alike in all others."""
_SHARED = tuple(param.name for param in fields(SamplingParams) if param.name not in _OWN)
_shared_values = attrgetter(*_SHARED)
_KNOWN_PARAMS = 256
"""Number of different parameters whose messages are kept; most requests use one of a few."""


def sampling_message(sampling: SamplingParams) -> batch_pb2.RowSampling:
    """Build the message; params that are off stay unset if an unset field reads as off."""
    values = _shared_values(sampling)
    message = batch_pb2.RowSampling()
    message.CopyFrom(_shared_message(values, _types_of(values)))
    message.seed, message.choice = sampling.seed, sampling.choice
    return message


def _types_of(values: tuple[object, ...]) -> tuple[type, ...]:
    """Return the types of values, as values of different types may be equal."""
    return tuple(map(type, values))


@lru_cache(_KNOWN_PARAMS)
def _shared_message(values: tuple[object, ...], _types: tuple[type, ...]) -> batch_pb2.RowSampling:
    """Build the message of params with these values of `_SHARED`; it must not be changed."""
    shared: dict[str, Any] = dict(zip(_SHARED, values, strict=True))
    sampling = SamplingParams(**shared)
    if sampling.row_metadata:
        raise ValueError(f"{_LOCAL} is for an executor in the same process")
    numbers = {name: getattr(sampling, name) for name in _NUMBERS if name not in _OWN}
    message = batch_pb2.RowSampling(**numbers)
    if sampling.end_ids:
        message.end_ids = raw_column(np.array(sampling.end_ids, np.int32), INT32)
    if sampling.allowed_token_ids:
        message.allowed_ids = raw_column(np.array(sampling.allowed_token_ids, np.int32), INT32)
    if sampling.logprob_token_ids:
        message.logprob_ids = raw_column(np.array(sampling.logprob_token_ids, np.int32), INT32)
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
    numbers = {name: getattr(message, name) for name in _NUMBERS}
    numbers |= {name: default for name, default in _OPTIONAL if not message.HasField(name)}
    sampling = SamplingParams(
        **numbers,
        end_ids=tuple(read_column(message.end_ids, INT32, f"{field}.end_ids").tolist()),
        logit_bias=tuple(zip(bias_ids.tolist(), bias.tolist(), strict=True)),
        logprob_token_ids=tuple(
            read_column(message.logprob_ids, INT32, f"{field}.logprob_ids").tolist()
        ),
        allowed_token_ids=tuple(
            read_column(message.allowed_ids, INT32, f"{field}.allowed_ids").tolist()
        ),
    )
    _check(sampling, field)
    return sampling


def what_link_refuses(sampling: SamplingParams) -> str | None:
    """
    Return why the other end would refuse these params, as it would read them; None if it would not.
    A scheduler asks this of every request: a batch that is refused ends the session of all.
    """
    try:
        values = _shared_values(sampling)
        own = batch_pb2.RowSampling(seed=sampling.seed, choice=sampling.choice)
        refusal = _what_is_refused(values, _types_of(values))
    except (OverflowError, TypeError, ValueError) as error:  # what no message can hold
        return f"sampling: {error}"
    if refusal is not None:
        return refusal
    for name in _OWN:
        value, sent = getattr(sampling, name), getattr(own, name)
        if sent != value:
            return f"sampling: {name} {value} is no whole number"
        if broken_range(name, sent) is not None:
            return _out_of_range("sampling", name, sent).message
    return None


@lru_cache(_KNOWN_PARAMS)
def _what_is_refused(values: tuple[object, ...], types: tuple[type, ...]) -> str | None:
    """Return why the other end would refuse params with these values of `_SHARED`, if it would."""
    try:
        read_sampling(_shared_message(values, types), "sampling")
    except SessionLost as error:
        return error.message
    return None


def _check(sampling: SamplingParams, field: str) -> None:
    """Refuse values that no scheduler sends."""
    broken = broken_param(sampling)
    if broken is not None:
        raise _out_of_range(field, broken, getattr(sampling, broken))
    ids = [token for token, _ in sampling.logit_bias]
    if len(set(ids)) != len(ids):
        raise malformed(f"{field}.bias_ids", "is not distinct")
    if len(set(sampling.allowed_token_ids)) != len(sampling.allowed_token_ids):
        raise malformed(f"{field}.allowed_ids", "is not distinct")
    if not all(math.isfinite(value) for _, value in sampling.logit_bias):
        raise malformed(f"{field}.bias", "is not finite")


def _out_of_range(field: str, name: str, value: object) -> SessionLost:
    return malformed(f"{field}.{name}", f"is {value}")
