"""Bursts of calls, and messages that grow when they are decoded, at the public port."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import multiprocessing
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import grpc

from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import tokens_pb2
from tests.e2e.cluster import Cluster
from tests.faults.abuse.services import (
    CHANNEL_OPTIONS,
    COMPLETE,
    GET_MODEL,
    MIB,
    PATIENT_S,
    TOKENIZE,
    Figures,
    Peak,
    end_of,
    frontend_of,
    insecure_channel,
    memory_of,
    small_request,
    told,
)

NOT_VALID = "not a valid message"
"""Words of the refusal of bytes that cannot be decoded."""
Ends = collections.Counter[str]


def burst(cluster: Cluster, num_calls: int, num_connections: int) -> Figures:
    """Make many calls at once over many connections, and count how each ends."""
    frontend = frontend_of(cluster)
    raw = pb.CompleteRequest(request=small_request()).SerializeToString()
    rss = frontend.memory_info().rss
    peak = Peak(frontend)
    begin_s = time.monotonic()
    ends = asyncio.run(_burst(cluster.address, raw, num_calls, num_connections))
    seconds = time.monotonic() - begin_s
    wrong = sum(count for end, count in ends.items() if end not in {"OK", "QUEUE_FULL+RetryInfo"})
    return {
        "ends": told(ends),
        "wrong statuses": wrong,
        "seconds": round(seconds, 1),
        **memory_of(rss, peak, frontend),
    }


async def _burst(address: str, raw: bytes, num_calls: int, num_connections: int) -> Ends:
    channels = [
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) for _ in range(num_connections)
    ]
    ends: Ends = collections.Counter()

    async def call(at: int) -> None:
        try:
            await channels[at % num_connections].unary_unary(COMPLETE)(raw, timeout=PATIENT_S)
            ends["OK"] += 1
        except grpc.aio.AioRpcError as error:
            ends[end_of(error)] += 1

    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    await asyncio.gather(*(call(at) for at in range(num_calls)))
    await asyncio.gather(*(channel.close() for channel in channels))
    return ends


def amplified(cluster: Cluster, kind: str, count: int, num_bytes: int) -> Figures:
    """Send large messages of many small parts, gzipped, at once; look how long others wait."""
    frontend = frontend_of(cluster)
    rss = frontend.memory_info().rss
    peak = Peak(frontend)
    with _waits(cluster.address) as waits:
        ends, _ = _sent_large(cluster.address, kind, count, num_bytes)
    return {
        "ends": told(ends),
        "longest wait of GetModel, s": round(max(waits), 2),
        **memory_of(rss, peak, frontend),
    }


def parsed(cluster: Cluster, inner: str, num_calls: int) -> Figures:
    """Have conversations tokenized whose JSON is an array of `inner`; look how long others wait."""
    frontend = frontend_of(cluster)
    rss = frontend.memory_info().rss
    peak = Peak(frontend)
    args = f'{{"a":[{",".join([inner] * (3_800_000 // (len(inner) + 1)))}]}}'
    chat = {"messages": [{"role": "user", "content": "x"}], "template_args_json": args}
    raw = tokens_pb2.TokenizeRequest(chat=chat).SerializeToString()
    ends: Ends = collections.Counter()
    begin_s = time.monotonic()
    with _waits(cluster.address) as waits, insecure_channel(cluster.address) as channel:
        tokenize = channel.unary_unary(TOKENIZE)
        for call in [tokenize.future(raw, timeout=PATIENT_S) for _ in range(num_calls)]:
            try:
                call.result()
                ends["OK"] += 1
            except grpc.RpcError as error:
                ends[end_of(error)] += 1
        seconds = time.monotonic() - begin_s
    return {
        "ends": told(ends),
        "seconds": round(seconds, 2),
        "longest wait of GetModel, s": round(max(waits), 2),
        **memory_of(rss, peak, frontend),
    }


def short_of_memory(
    cluster: Cluster, kind: str, count: int, num_bytes: int, spare_mib: int
) -> Figures:
    """
    Send large messages at once to a frontend that may have only so much more address space, as
    under `ulimit -v`, and count those that are called invalid.
    """
    frontend = frontend_of(cluster)
    most_bytes = frontend.memory_info().vms + spare_mib * MIB
    resource.prlimit(frontend.pid, resource.RLIMIT_AS, (most_bytes, most_bytes))
    ends, num_not_valid = _sent_large(cluster.address, kind, count, num_bytes)
    return {
        "ends": told(ends),
        "valid messages that were called invalid": num_not_valid,
        "frontend": "goes on" if frontend.is_running() else "ended",
    }


def _sent_large(address: str, kind: str, count: int, num_bytes: int) -> tuple[Ends, int]:
    """Send from a process of its own, so that this one waits for nothing."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(_send_large, address, kind, count, num_bytes).result()


def _send_large(address: str, kind: str, count: int, num_bytes: int) -> tuple[Ends, int]:
    """Return the ends, and the number of those that say that the bytes are no valid message."""
    raw = pb.CompleteRequest(request=LARGE[kind](num_bytes)).SerializeToString()
    ends: Ends = collections.Counter()
    num_not_valid = 0

    async def call() -> None:
        nonlocal num_not_valid
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            try:
                complete = channel.unary_unary(COMPLETE)
                await complete(raw, timeout=PATIENT_S, compression=grpc.Compression.Gzip)
                ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ends[end_of(error)] += 1
                num_not_valid += NOT_VALID in (error.details() or "")

    async def send() -> None:
        await asyncio.gather(*(call() for _ in range(count)))

    asyncio.run(send())
    return ends, num_not_valid


@contextlib.contextmanager
def _waits(address: str) -> Iterator[list[float]]:
    """Call GetModel again and again on a thread during the block; the list gets the seconds."""
    waits: list[float] = []
    done = threading.Event()

    def ask() -> None:
        with insecure_channel(address) as channel:
            get_model = channel.unary_unary(GET_MODEL)
            while not done.is_set():
                begin_s = time.monotonic()
                with contextlib.suppress(grpc.RpcError):
                    get_model(b"", timeout=PATIENT_S)
                waits.append(time.monotonic() - begin_s)
                done.wait(0.02)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        yield waits
    finally:
        done.set()
        asker.join()


def long_id(cluster: Cluster, num_bytes: int) -> Figures:
    """Send one request with an id of so many bytes; count what its refusal writes to the log."""
    before = cluster.scheduler.log.stat().st_size
    request = pb.CompleteRequest(request=small_request())
    request.request.request_id = "i" * num_bytes
    with insecure_channel(cluster.address) as channel:
        try:
            channel.unary_unary(COMPLETE)(request.SerializeToString(), timeout=PATIENT_S)
            end = "OK"
        except grpc.RpcError as error:
            end = end_of(error)
    time.sleep(1.0)
    return {"end": end, "bytes of log": cluster.scheduler.log.stat().st_size - before}


def _stops(num_bytes: int) -> pb.GenerateRequest:
    request = small_request()
    request.stopping.stop.extend([""] * (num_bytes // 2))
    return request


def _bias(num_bytes: int) -> pb.GenerateRequest:
    request = small_request()
    request.sampling.logit_bias.update(dict.fromkeys(range(num_bytes // 11), 1.0))
    return request


def _resume(num_bytes: int) -> pb.GenerateRequest:
    request = small_request()
    request.sampling.seed = 1
    request.resume.MergeFromString(b"\x0a\x00" * (num_bytes // 2))
    return request


def _chat(num_bytes: int) -> pb.GenerateRequest:
    request = small_request()
    request.chat.MergeFromString(b"\x0a\x00" * (num_bytes // 2))
    return request


def _text(num_bytes: int) -> pb.GenerateRequest:
    request = small_request()
    request.text = "a " * (num_bytes // 2)
    return request


LARGE: dict[str, Callable[[int], pb.GenerateRequest]] = {
    "stop": _stops,
    "bias": _bias,
    "resume": _resume,
    "chat": _chat,
    "text": _text,
}
