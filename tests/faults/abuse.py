"""
Abuse of a service by what reaches its ports, with figures: `python -m tests.faults.abuse`.

Each attempt has a scheduler and an executor of its own, with the bundled model. `--json FILE` keeps
the figures; `--before FILE` prints those of an earlier run, of another commit say, beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import multiprocessing
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from tandem.executor.v1 import session_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.link import PROTOCOL_VERSION
from tests.e2e.cluster import BUNDLED_MODEL, Cluster

Figures = dict[str, float | str]

MIB = 1 << 20
COMPLETE = "/tandem.inference.v1.InferenceService/Complete"
GET_MODEL = "/tandem.inference.v1.InferenceService/GetModel"
UNREACHABLE_LIMIT_S = 60.0
"""Seconds after which the wait for a service that is shut out ends."""
SETTLE_S = 8.0
"""Seconds after which memory that is given back has been."""
PATIENT_S = 300.0
_CHANNEL = (
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


def main(argv: Sequence[str]) -> int:
    """Make the attempts that are asked for, and print a table."""
    options = _options(argv)
    found: dict[str, Figures] = {}
    for name in options.only or ATTEMPTS:
        with _cluster() as cluster:
            found[name] = ATTEMPTS[name](cluster)
        sys.stderr.write(f"{name}: {found[name]}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    before = json.loads(options.before.read_text()) if options.before is not None else {}
    sys.stdout.write(table(found, before) + "\n")
    return 0


def table(found: dict[str, Figures], before: dict[str, Figures]) -> str:
    """Return the figures as Markdown, beside those of an earlier run."""
    rows = ["| attempt | figure | before | now |", "|---|---|---|---|"]
    rows += [
        f"| {name} | {figure} | {before.get(name, {}).get(figure, '')} | {value} |"
        for name, figures in found.items()
        for figure, value in figures.items()
    ]
    return "\n".join(rows)


@contextlib.contextmanager
def _cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="abuse-"))
    cluster = Cluster(BUNDLED_MODEL, folder, [], ["--log-format=json"])
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def burst(cluster: Cluster, num_calls: int, num_connections: int) -> Figures:
    """Make many calls at once over many connections, and count how each ends."""
    frontend = _frontend(cluster)
    raw = pb.CompleteRequest(request=_small()).SerializeToString()
    rss = frontend.memory_info().rss
    peak = _Peak(frontend)
    begin_s = time.monotonic()
    ends = asyncio.run(_burst(cluster.address, raw, num_calls, num_connections))
    seconds = time.monotonic() - begin_s
    wrong = sum(count for end, count in ends.items() if end not in {"OK", "QUEUE_FULL+RetryInfo"})
    return {
        "ends": ", ".join(f"{end} {count}" for end, count in sorted(ends.items())),
        "wrong statuses": wrong,
        "seconds": round(seconds, 1),
        **_memory(rss, peak, frontend),
    }


async def _burst(
    address: str, raw: bytes, num_calls: int, num_connections: int
) -> collections.Counter[str]:
    channels = [
        grpc.aio.insecure_channel(address, options=_CHANNEL) for _ in range(num_connections)
    ]
    ends: collections.Counter[str] = collections.Counter()

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


def end_of(error: Any) -> str:
    """Return a status's reason, and whether it says when to try again; its code without a reason."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        status = None
    info, retry = error_details_pb2.ErrorInfo(), ""
    for detail in status.details if status is not None else ():
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = "+RetryInfo"
    return f"{info.reason or 'untyped ' + error.code().name}{retry}"


def amplified(cluster: Cluster, kind: str, count: int, num_bytes: int) -> Figures:
    """Send large messages of many small parts, gzipped, at once; look how long others wait."""
    frontend = _frontend(cluster)
    rss = frontend.memory_info().rss
    peak = _Peak(frontend)
    spawn = multiprocessing.get_context(
        "spawn"
    )  # a process of its own, so that no one waits for it
    with ProcessPoolExecutor(1, spawn) as pool, _waits(cluster.address) as waits:
        ends = pool.submit(_send_large, cluster.address, kind, count, num_bytes).result()
    return {
        "ends": ", ".join(f"{end} {number}" for end, number in sorted(ends.items())),
        "longest wait of GetModel, s": round(max(waits), 2),
        **_memory(rss, peak, frontend),
    }


def _send_large(address: str, kind: str, count: int, num_bytes: int) -> collections.Counter[str]:
    raw = pb.CompleteRequest(request=LARGE[kind](num_bytes)).SerializeToString()
    ends: collections.Counter[str] = collections.Counter()

    async def call() -> None:
        async with grpc.aio.insecure_channel(address, options=_CHANNEL) as channel:
            try:
                complete = channel.unary_unary(COMPLETE)
                await complete(raw, timeout=PATIENT_S, compression=grpc.Compression.Gzip)
                ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ends[end_of(error)] += 1

    async def send() -> None:
        await asyncio.gather(*(call() for _ in range(count)))

    asyncio.run(send())
    return ends


@contextlib.contextmanager
def _waits(address: str) -> Iterator[list[float]]:
    """Call GetModel again and again on a thread during the block; the list gets the seconds."""
    waits: list[float] = []
    done = threading.Event()

    def ask() -> None:
        with grpc.insecure_channel(address, options=_CHANNEL) as channel:
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


def long_id(cluster: Cluster) -> Figures:
    """Send one request whose id has 15 MB, and see what its refusal writes to the log."""
    before = cluster.scheduler.log.stat().st_size
    request = pb.CompleteRequest(request=_small())
    request.request.request_id = "i" * 15_000_000
    with grpc.insecure_channel(cluster.address, options=_CHANNEL) as channel:
        try:
            channel.unary_unary(COMPLETE)(request.SerializeToString(), timeout=PATIENT_S)
            end = "OK"
        except grpc.RpcError as error:
            end = end_of(error)
    time.sleep(1.0)
    return {"end": end, "bytes of log": cluster.scheduler.log.stat().st_size - before}


def stolen_lease(cluster: Cluster) -> Figures:
    """Take the executor over once, with the longest lease that is granted, and leave."""
    executor = cluster.executor.addresses()["address"]
    granted = 0
    with grpc.insecure_channel(executor) as channel:
        for lease_ms in (2**32 - 1, 60_000):
            try:
                ExecutorServiceStub(channel).OpenSession(
                    session_pb2.OpenSessionRequest(
                        protocol_version=PROTOCOL_VERSION,
                        scheduler_name="stranger",
                        scheduler_incarnation="1",
                        take_over=True,
                        lease_ms=lease_ms,
                    ),
                    timeout=10,
                )
            except grpc.RpcError:
                continue
            granted = lease_ms
            break
    return {"lease granted, ms": granted, "seconds unreachable": _unreachable_s(cluster)}


def watchers(cluster: Cluster, count: int) -> Figures:
    """Hold health watchers on the executor's port, opened again when refused, over a restart."""
    executor = cluster.executor.addresses()["address"]
    done = threading.Event()

    def watch() -> None:
        request = health_pb2.HealthCheckRequest(service="tandem.ready")
        with grpc.insecure_channel(executor, options=_CHANNEL) as channel:
            while not done.is_set():
                call = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=120)
                with contextlib.suppress(grpc.RpcError):
                    for _ in call:
                        if done.is_set():
                            break
                done.wait(0.05)

    threads = [threading.Thread(target=watch, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(2.0)
    cluster.scheduler.end()
    cluster.start_scheduler()
    found = _unreachable_s(cluster)
    done.set()
    return {"seconds unreachable after a restart": found}


def health_names(cluster: Cluster) -> Figures:
    """Watch 10,000 health names of 4 KB, one after another, on the executor."""
    process = psutil.Process(cluster.executor.process.pid)
    executor = cluster.executor.addresses()["address"]
    rss = process.memory_info().rss
    with grpc.insecure_channel(executor) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for number in range(10_000):
            call = stub.Watch(health_pb2.HealthCheckRequest(service=f"{number:4096d}"))
            with contextlib.suppress(grpc.RpcError):
                next(call)
            call.cancel()
    return {"memory kept, MiB": round((process.memory_info().rss - rss) / MIB)}


def _unreachable_s(cluster: Cluster) -> float | str:
    """Return the seconds until a request is served."""
    begin_s = time.monotonic()
    raw = pb.CompleteRequest(request=_small()).SerializeToString()
    while (elapsed_s := time.monotonic() - begin_s) < UNREACHABLE_LIMIT_S:
        with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(cluster.address) as channel:
            channel.unary_unary(COMPLETE)(raw, timeout=UNREACHABLE_LIMIT_S - elapsed_s)
            return round(time.monotonic() - begin_s, 1)
        time.sleep(0.1)
    return f"over {UNREACHABLE_LIMIT_S:.0f}"


class _Peak:
    """Highest memory of a process since this was made, in bytes of `MIB`."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def mib(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) // 1024


def _memory(rss: int, peak: _Peak, frontend: psutil.Process) -> Figures:
    highest = peak.mib()
    time.sleep(SETTLE_S)
    kept = frontend.memory_info().rss
    return {
        "frontend before, MiB": round(rss / MIB),
        "frontend at its peak, MiB": highest,
        "frontend after, MiB": round(kept / MIB),
    }


def _frontend(cluster: Cluster) -> psutil.Process:
    family = cluster.scheduler.family()
    return next(one for one in family if "scheduler_svc.frontend" in one.cmdline())


def _small() -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="def f(")
    request.stopping.max_tokens = 4
    return request


def _stops(num_bytes: int) -> pb.GenerateRequest:
    request = _small()
    request.stopping.stop.extend([""] * (num_bytes // 2))
    return request


def _bias(num_bytes: int) -> pb.GenerateRequest:
    request = _small()
    request.sampling.logit_bias.update(dict.fromkeys(range(num_bytes // 11), 1.0))
    return request


def _resume(num_bytes: int) -> pb.GenerateRequest:
    request = _small()
    request.sampling.seed = 1
    request.resume.MergeFromString(b"\x0a\x00" * (num_bytes // 2))
    return request


def _chat(num_bytes: int) -> pb.GenerateRequest:
    request = _small()
    request.chat.MergeFromString(b"\x0a\x00" * (num_bytes // 2))
    return request


def _text(num_bytes: int) -> pb.GenerateRequest:
    request = _small()
    request.text = "a " * (num_bytes // 2)
    return request


LARGE: dict[str, Callable[[int], pb.GenerateRequest]] = {
    "stop": _stops,
    "bias": _bias,
    "resume": _resume,
    "chat": _chat,
    "text": _text,
}


def _large(count: int, megabytes: int, kind: str) -> tuple[str, Callable[[Cluster], Figures]]:
    num_bytes = megabytes * 1_000_000
    name = f"{count} of {megabytes} MB: {kind}"
    return name, lambda cluster: amplified(cluster, kind, count, num_bytes)


ATTEMPTS: dict[str, Callable[[Cluster], Figures]] = {
    "5,000 calls, 10 connections": lambda cluster: burst(cluster, 5_000, 10),
    "20,000 calls, 40 connections": lambda cluster: burst(cluster, 20_000, 40),
    **dict(_large(10, 15, kind) for kind in LARGE),
    **dict(_large(60, 4, kind) for kind in LARGE),
    **dict((_large(60, 15, "stop"), _large(200, 15, "text"))),
    "request_id of 15 MB": long_id,
    "lease of 49 days": stolen_lease,
    "40 watchers": lambda cluster: watchers(cluster, 40),
    "10,000 health names": health_names,
}


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.abuse", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(ATTEMPTS), help="one attempt")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--before", type=Path, help="figures of an earlier run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
