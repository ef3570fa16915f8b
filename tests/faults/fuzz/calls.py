"""Calls of cases, many at a time, and a count of how each ended."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import grpc

from tandem.status import from_rpc_error
from tests.faults.fuzz.cases import Case

LIMIT_S = 60.0
"""Deadline of a call; one that reaches it hangs."""
NUM_AT_ONCE = 64
BAD_CODES = frozenset({"INTERNAL", "UNKNOWN"})
NOT_DECODED = "are not a valid message"
"""Part of the refusal of bytes that are no message."""
HANGS = "hangs"
CLOSED = "Internal error from Core"
"""Text of gRPC's client where a server ends a call while its request is still being sent."""


@dataclass(slots=True)
class Outcome:
    """
    Ends of the cases of one kind.

    Attributes:
        ends: Number of cases by reason, or by gRPC code where there was none.
        decoded: Number of cases that got past decoding.
        bad: Cases that failed INTERNAL or UNKNOWN, or hung, with the reason; the first few.
    """

    ends: Counter[str] = field(default_factory=Counter)
    decoded: int = 0
    num_bad: int = 0
    bad: list[tuple[str, Case]] = field(default_factory=list)

    def note(self, end: str, case: Case, *, is_bad: bool, is_decoded: bool) -> None:
        """Count one case."""
        self.ends[end] += 1
        self.decoded += is_decoded
        self.num_bad += is_bad
        if is_bad and len(self.bad) < 10:
            self.bad.append((end, case))


async def run_cases(
    addresses: Mapping[str, str],
    make: Callable[[random.Random], Case],
    *,
    count: int,
    seed: int,
) -> Outcome:
    """
    Send random cases and wait for the end of each.

    Args:
        addresses: Address of each port.
        make: Draws a case.
        count: Number of cases.
        seed: Seed of the cases; the same seed draws the same ones.
    """
    draw, outcome = random.Random(seed), Outcome()
    channels = {port: grpc.aio.insecure_channel(address) for port, address in addresses.items()}
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            case = make(draw)
            await _send(channels[case.port], case, outcome)

    try:
        await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
    finally:
        await asyncio.gather(*(channel.close() for channel in channels.values()))
    return outcome


async def _send(channel: grpc.aio.Channel, case: Case, outcome: Outcome) -> None:
    try:
        if case.is_stream:
            streamed = channel.stream_stream(case.method)(iter([case.raw]), timeout=LIMIT_S)
            async for _ in streamed:
                break
            streamed.cancel()
        else:
            # Every answer can be read as a stream of messages.
            async for _ in channel.unary_stream(case.method)(case.raw, timeout=LIMIT_S):
                pass
    except grpc.aio.AioRpcError as error:
        typed = from_rpc_error(error)
        is_hung = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        code = error.code().name
        outcome.note(
            HANGS if is_hung else f"{code} {typed.reason}",
            case,
            is_bad=is_hung or (code in BAD_CODES and typed.message != CLOSED),
            is_decoded=NOT_DECODED not in typed.message,
        )
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        outcome.note("OK", case, is_bad=False, is_decoded=True)
    else:
        outcome.note("OK", case, is_bad=False, is_decoded=True)
