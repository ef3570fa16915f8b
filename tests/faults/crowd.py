"""
Greedy tenants beside a polite one, on real services: `python -m tests.faults.crowd`.

The greedy tenants make all their calls at once, Generate and Complete by turns, or with `--items`
one GenerateBatch for each connection with as many items, over many connections of a process of
their own. The polite tenant, in another process with one connection,
sends a request every so often whether or not those before it have been answered, first alone and
then from before the burst until its end. Each call's end is counted, and a polite request's time
from its sending to its first token is measured at the client.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
from google.rpc.status_pb2 import Status

from tandem.bearer_token import token_hash
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1.batch_pb2 import GenerateBatchResponse
from tandem.status import from_status_proto
from tests.e2e.cluster import BUNDLED_MODEL, Cluster
from tests.faults.abuse.services import COMPLETE, end_of

GENERATE = "/tandem.inference.v1.InferenceService/Generate"
GENERATE_BATCH = f"{GENERATE}Batch"
POLITE = "polite"
ALLOWED_ENDS = frozenset({"OK", "QUEUE_FULL+RetryInfo"})
SETTLE_S = 2.0
"""Seconds of polite requests before the burst begins and after it has ended, which do not count."""
PATIENT_S = 300.0
_CHANNEL = (("grpc.use_local_subchannel_pool", 1),)
_SPAWN = multiprocessing.get_context("spawn")

Ends = collections.Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Calls of a run: those of the greedy tenants together, and those of the polite one."""

    num_calls: int = 20_000
    num_connections: int = 200
    num_tenants: int = 4
    greedy_tokens: int = 16
    polite_tokens: int = 8
    every_s: float = 0.1
    quiet_s: float = 30.0
    are_items: bool = False
    """The calls of a greedy connection are items of one GenerateBatch."""
    is_background: bool = False
    """The process of the greedy tenants runs only while the processors have nothing else to do."""


@dataclass(slots=True)
class Polite:
    """Requests of the polite tenant: how they ended, and when each was sent and first answered."""

    ends: Ends = field(default_factory=collections.Counter)
    waits: list[tuple[float, float]] = field(default_factory=list)

    def between(self, begin_s: float, end_s: float) -> list[float]:
        """Return the waits for first tokens of requests sent in this time, in seconds."""
        return [wait_s for sent_s, wait_s in self.waits if begin_s <= sent_s < end_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Calls of the greedy tenants: how they ended, when, and what making them took."""

    ends: Ends
    begin_s: float
    made_s: float
    end_s: float
    cpu_s: float


def main(argv: Sequence[str]) -> int:
    """Make both runs, and print a table of them; returns 1 if something that must hold does not."""
    options = _options(argv)
    load = Load(
        num_calls=options.calls,
        num_connections=options.connections,
        num_tenants=options.tenants,
        every_s=options.every,
        quiet_s=options.quiet,
        are_items=options.items,
        is_background=options.background,
    )
    settings = {"step_ms": options.step_ms, "greedy_limit": options.greedy_limit}
    with cluster(load.num_tenants, options.scheduler, **settings) as services:
        figures = measure(services, load)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.stdout.write("| figure | value |\n|---|---|\n")
    sys.stdout.writelines(f"| {name} | {value} |\n" for name, value in figures.items())
    return int(bool(figures["wrong statuses"] or figures["polite requests that failed"]))


@contextlib.contextmanager
def cluster(
    num_tenants: int,
    scheduler: Sequence[str] = (),
    *,
    step_ms: float | None = None,
    greedy_limit: int | None = None,
) -> Iterator[Cluster]:
    """
    Yield services that know the tenants' tokens, and their names.

    Args:
        num_tenants: Greedy tenants.
        scheduler: Options of the scheduler.
        step_ms: Time of every step of an executor without a model; None for the bundled model,
            whose steps take longer the more rows they have.
        greedy_limit: Most requests that each greedy tenant may have; None = as many as there are
            places.
    """
    folder = Path(tempfile.mkdtemp(prefix="crowd-"))
    greedy = [_greedy(number) for number in range(num_tenants)]
    tenants = {name: {"max_requests": greedy_limit} for name in greedy if greedy_limit is not None}
    credentials = [
        {"name": name, "tenant": name, "token_sha256": token_hash(name)}
        for name in [POLITE, *greedy]
    ]
    tokens = folder / "tokens.json"
    tokens.write_text(json.dumps({"credentials": credentials, "tenants": tenants}))
    services = Cluster(
        BUNDLED_MODEL, folder, [], ["--log-format=json", f"--tokens-file={tokens}", *scheduler]
    )
    try:
        if step_ms is None:
            services.start_executor()
        else:
            services.start_fixed_step_executor(step_ms)
        yield services
    finally:
        services.close()
        shutil.rmtree(folder, ignore_errors=True)


def measure(services: Cluster, load: Load) -> dict[str, float | str]:
    """Run the polite tenant alone, then beside the burst, and return what is told of both."""
    address = services.address
    with _polite(address, load) as warm:
        time.sleep(SETTLE_S)
    with _polite(address, load) as quiet:
        time.sleep(load.quiet_s)
    with _polite(address, load) as busy:
        time.sleep(SETTLE_S)
        burst = _burst(address, load)
        time.sleep(SETTLE_S)
    alone = sorted(quiet.between(0.0, math.inf))
    beside = sorted(busy.between(burst.begin_s, burst.end_s))
    failed = {end: n for end, n in (warm.ends + quiet.ends + busy.ends).items() if end != "OK"}
    wrong = sum(count for end, count in burst.ends.items() if end not in ALLOWED_ENDS)
    return {
        "ends of greedy calls": _told(burst.ends),
        "wrong statuses": wrong,
        "greedy calls handed to gRPC within, s": round(burst.made_s - burst.begin_s, 2),
        "greedy calls ended within, s": round(burst.end_s - burst.begin_s, 2),
        "CPU of the greedy process, s": round(burst.cpu_s, 2),
        "polite requests, alone and beside the burst": f"{len(alone)}, {len(beside)}",
        "polite requests that failed": _told(collections.Counter(failed)) or 0,
        **{
            f"wait to the first token, {name}, alone and beside the burst, ms": (
                f"{_at(alone, share)}, {_at(beside, share)}"
            )
            for name, share in (("median", 0.5), ("p99", 0.99), ("longest", 1.0))
        },
        "p99 beside the burst / p99 alone": round(_at(beside, 0.99) / _at(alone, 0.99), 2),
    }


def _at(ordered: list[float], share: float) -> float:
    """Return a quantile in milliseconds."""
    return round(ordered[math.ceil(share * len(ordered)) - 1] * 1e3, 1)


def _told(ends: Ends) -> str:
    return ", ".join(f"{end} {count}" for end, count in sorted(ends.items()))


@contextlib.contextmanager
def _polite(address: str, load: Load) -> Iterator[Polite]:
    """Send polite requests during the block, from a process; the figures are there after it."""
    found = Polite()
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_send_politely, args=(address, load, theirs))
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield found
        ours.send(None)
        sent = ours.recv()
        found.ends, found.waits = sent.ends, sent.waits
    finally:
        process.join(PATIENT_S)


def _send_politely(address: str, load: Load, pipe: Connection) -> None:
    os.setsid()
    pipe.send(asyncio.run(_polite_calls(address, load, pipe)))


async def _polite_calls(address: str, load: Load, pipe: Connection) -> Polite:
    found = Polite()
    calls = set()
    async with grpc.aio.insecure_channel(address, options=_CHANNEL) as channel:
        await channel.channel_ready()
        pipe.send(None)
        next_s = time.monotonic()
        while not pipe.poll():
            calls.add(asyncio.create_task(_polite_call(channel, load, found)))
            next_s += load.every_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        pipe.recv()
        await asyncio.gather(*calls)
    return found


async def _polite_call(channel: grpc.aio.Channel, load: Load, found: Polite) -> None:
    request = _request(load.polite_tokens)
    sent_s = time.monotonic()
    is_first = True
    try:
        call = channel.unary_stream(
            GENERATE,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        async for answer in call(request, timeout=PATIENT_S, metadata=_bearer(POLITE)):
            if is_first and answer.HasField("delta") and answer.delta.token_ids:
                is_first = False
                found.waits.append((sent_s, time.monotonic() - sent_s))
        found.ends["OK"] += 1
    except grpc.aio.AioRpcError as error:
        found.ends[_told_end(error)] += 1


def _burst(address: str, load: Load) -> Burst:
    """Make the greedy calls from a process, and return what came of them."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_send_greedily, args=(address, load, theirs))
    process.start()
    theirs.close()
    burst: Burst = ours.recv()
    process.join(PATIENT_S)
    return burst


def _send_greedily(address: str, load: Load, pipe: Connection) -> None:
    os.setsid()
    if load.is_background:
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    pipe.send(asyncio.run(_greedy_calls(address, load)))


async def _greedy_calls(address: str, load: Load) -> Burst:
    ends: Ends = collections.Counter()
    request = _request(load.greedy_tokens)
    generate = request.SerializeToString()
    complete = pb.CompleteRequest(request=request).SerializeToString()
    channels = [
        grpc.aio.insecure_channel(address, options=_CHANNEL) for _ in range(load.num_connections)
    ]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))

    async def batch(at: int) -> None:
        metadata = _bearer(_greedy(at % load.num_tenants))
        numbers = range(load.num_calls // load.num_connections)
        try:
            ends.update(await _ends_of_items(channels[at], request, numbers, metadata))
        except grpc.aio.AioRpcError as error:
            ends[_told_end(error)] += 1

    async def call(at: int) -> None:
        channel = channels[at % len(channels)]
        metadata = _bearer(_greedy(at % load.num_connections % load.num_tenants))
        try:
            if at // len(channels) % 2:
                await channel.unary_unary(COMPLETE)(complete, timeout=PATIENT_S, metadata=metadata)
            else:
                stream = channel.unary_stream(GENERATE)
                async for _ in stream(generate, timeout=PATIENT_S, metadata=metadata):
                    pass
            ends["OK"] += 1
        except grpc.aio.AioRpcError as error:
            ends[_told_end(error)] += 1

    cpu_s = time.process_time()
    begin_s = time.monotonic()
    if load.are_items:
        calls = [asyncio.create_task(batch(at)) for at in range(load.num_connections)]
    else:
        calls = [asyncio.create_task(call(at)) for at in range(load.num_calls)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    made_s = time.monotonic()
    await asyncio.gather(*calls)
    end_s = time.monotonic()
    cpu_s = time.process_time() - cpu_s
    await asyncio.gather(*(channel.close() for channel in channels))
    return Burst(ends=ends, begin_s=begin_s, made_s=made_s, end_s=end_s, cpu_s=cpu_s)


async def _ends_of_items(
    channel: grpc.aio.Channel,
    request: pb.GenerateRequest,
    numbers: Sequence[int],
    metadata: tuple[tuple[str, str]],
) -> Ends:
    """Return how the items of one stream ended, which are all added in its first message."""
    ends: Ends = collections.Counter()
    adding = pb.GenerateBatchRequest(add=[pb.BatchItem(item=at, request=request) for at in numbers])
    stream = channel.stream_stream(
        GENERATE_BATCH,
        request_serializer=pb.GenerateBatchRequest.SerializeToString,
        response_deserializer=GenerateBatchResponse.FromString,
    )
    async for message in stream(iter([adding]), timeout=PATIENT_S, metadata=metadata):
        for event in message.events:
            if event.HasField("error"):
                status = Status.FromString(event.error)
                kinds = {detail.TypeName().rpartition(".")[2] for detail in status.details}
                retry = "+RetryInfo" if "RetryInfo" in kinds else ""
                ends[f"{from_status_proto(status).reason}{retry}"] += 1
            elif event.HasField("done"):
                ends["OK"] += 1
    return ends


def _told_end(error: grpc.aio.AioRpcError) -> str:
    """Return how a call ended; where it has no reason, with gRPC's words."""
    end = end_of(error)
    return f"{end} ({error.details()})" if end.startswith("untyped") else end


def _request(max_tokens: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="def f(")
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    return request


def _greedy(number: int) -> str:
    return f"greedy-{number}"


def _bearer(name: str) -> tuple[tuple[str, str]]:
    """Return the metadata of a tenant's calls; its token is its name."""
    return (("authorization", f"Bearer {name}"),)


def _options(argv: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.crowd", description=__doc__)
    load = Load()
    parser.add_argument("--calls", type=int, default=load.num_calls)
    parser.add_argument("--connections", type=int, default=load.num_connections)
    parser.add_argument("--tenants", type=int, default=load.num_tenants, help="greedy tenants")
    parser.add_argument("--items", action="store_true", help="greedy: items of GenerateBatch")
    parser.add_argument("--every", type=float, default=load.every_s, help="polite, seconds")
    parser.add_argument("--quiet", type=float, default=load.quiet_s, help="seconds alone")
    parser.add_argument(
        "--background",
        action="store_true",
        help="run the greedy process only while the processors are idle",
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        help="time of each step of an executor without a model; default: the bundled model",
    )
    parser.add_argument(
        "--greedy-limit", type=int, help="most requests of each greedy tenant; more are refused"
    )
    parser.add_argument("--scheduler", action="append", default=[], help="an option of its own")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
