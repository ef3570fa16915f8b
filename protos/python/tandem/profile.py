"""Options of a profile of an executor's steps: limits and checks, the same in every service."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.common.v1 import profile_pb2
from tandem.errors import InvalidParameter

MAX_STEPS = 100
MAX_STEPS_WITH_STACK = 20
"""
Limit with stacks, which make an entry per function: closing a recording delays steps by
microseconds per entry.
"""
MAX_DURATION_S = 60.0
FEATURE = "profile"
"""Entry in `DescribeResponse.features` of an executor that can record profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of one profile; see tandem.common.v1.ProfileOptions."""

    num_steps: int = 20
    duration_s: float = 10.0
    with_stack: bool = False
    record_shapes: bool = False


def read_options(message: profile_pb2.ProfileOptions) -> ProfileOptions:
    """
    Read and check the options of a request.

    Raises:
        InvalidParameter: An option is out of range.
    """
    options = ProfileOptions(with_stack=message.with_stack, record_shapes=message.record_shapes)
    num_steps = message.num_steps if message.HasField("num_steps") else options.num_steps
    duration_s = message.duration_s if message.HasField("duration_s") else options.duration_s
    most = MAX_STEPS_WITH_STACK if message.with_stack else MAX_STEPS
    if not 1 <= num_steps <= most:
        where = " with with_stack" if message.with_stack else ""
        raise InvalidParameter(
            f"num_steps must be in [1, {most}]{where}, got {num_steps}.",
            field="options.num_steps",
        )
    if not (math.isfinite(duration_s) and 0 < duration_s <= MAX_DURATION_S):
        raise InvalidParameter(
            f"duration_s must be over 0 and at most {MAX_DURATION_S:g}, got {duration_s}.",
            field="options.duration_s",
        )
    return ProfileOptions(
        num_steps=num_steps,
        duration_s=duration_s,
        with_stack=message.with_stack,
        record_shapes=message.record_shapes,
    )
