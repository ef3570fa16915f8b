"""gRPC calls of cases, many at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

import grpc

from tests.faults.fuzz.cases import Case
from tests.faults.fuzz.judge import OK, End, Outcome, end_of, judge


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
    draw = random.Random(seed)
    channels = {port: grpc.aio.insecure_channel(address) for port, address in addresses.items()}

    async def send(case: Case, limit_s: float) -> End:
        return await send_case(channels[case.port], case, limit_s)

    try:
        return await judge((make(draw) for _ in range(count)), send)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels.values()))


async def send_case(channel: grpc.aio.Channel, case: Case, limit_s: float) -> End:
    """
    Make the call of a case and judge its end.

    Every method is called with one message and read as a stream, which looks the same to the
    server. For a method that takes a stream this keeps gRPC's client from writing on after the
    server has ended the call, which it would report as INTERNAL of its own.
    """
    call = channel.unary_stream(case.method)(case.raw, timeout=limit_s)
    try:
        async for _ in call:
            if case.is_stream:  # the answers may go on for as long as the session does
                call.cancel()
                return OK
    except grpc.aio.AioRpcError as error:
        return end_of(error)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
    return OK
