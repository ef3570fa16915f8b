"""Attempts at the executor's port: leases, health watchers, and a batch that the link refuses."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.executor.v1 import batch_pb2, session_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.link import PROTOCOL_VERSION
from tandem_client import NO_RETRY, AdminClient, is_serving
from tests.e2e.cluster import BUNDLED_MODEL, PATIENCE, Cluster, Process
from tests.faults.abuse.services import (
    COMPLETE,
    MIB,
    PATIENT_S,
    Figures,
    end_of,
    insecure_channel,
    small_request,
    temporary_folder,
)
from tests.faults.proxies.message_proxy import MessageProxy
from tests.waiting import wait_until

UNREACHABLE_LIMIT_S = 60.0
"""Seconds after which the wait for a service that is shut out ends."""
LONGEST_LEASE_MS = 2**32 - 1
SPOILT_SEED = 77_777
"""Seed of the request whose row is spoilt on its way to the executor."""
NUM_OTHERS = 8
_CRC_TAG = b"\x7d"
"""Key of the field `crc32`, which is the last of a message."""


def stolen_lease(cluster: Cluster) -> Figures:
    """Take the executor over once, with the longest lease that is granted, and leave."""
    granted = 0
    with insecure_channel(_executor_address(cluster)) as channel:
        for lease_ms in (LONGEST_LEASE_MS, 60_000):
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
    executor = _executor_address(cluster)
    done = threading.Event()

    def watch() -> None:
        request = health_pb2.HealthCheckRequest(service="tandem.ready")
        with insecure_channel(executor) as channel:
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
    assert cluster.executor is not None
    process = psutil.Process(cluster.executor.process.pid)
    rss = process.memory_info().rss
    with grpc.insecure_channel(_executor_address(cluster)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for number in range(10_000):
            call = stub.Watch(health_pb2.HealthCheckRequest(service=f"{number:4096d}"))
            with contextlib.suppress(grpc.RpcError):
                next(call)
            call.cancel()
    return {"memory kept, MiB": round((process.memory_info().rss - rss) / MIB)}


def _executor_address(cluster: Cluster) -> str:
    assert cluster.executor is not None
    address: str = cluster.executor.addresses()["address"]
    return address


def _unreachable_s(cluster: Cluster) -> float | str:
    """Return the seconds until a request is served."""
    begin_s = time.monotonic()
    raw = pb.CompleteRequest(request=small_request()).SerializeToString()
    while (elapsed_s := time.monotonic() - begin_s) < UNREACHABLE_LIMIT_S:
        with contextlib.suppress(grpc.RpcError), insecure_channel(cluster.address) as channel:
            channel.unary_unary(COMPLETE)(raw, timeout=UNREACHABLE_LIMIT_S - elapsed_s)
            return round(time.monotonic() - begin_s, 1)
        time.sleep(0.1)
    return f"over {UNREACHABLE_LIMIT_S:.0f}"


class SpoilingProxy(MessageProxy):
    """Proxy that gives the request of `SPOILT_SEED` a top_p that no scheduler may send."""

    def _outcomes(self, raw: bytes, way: str) -> list[bytes | None]:
        message = batch_pb2.ExecuteRequest()
        if way == "down" and message.ParseFromString(raw) and message.HasField("step"):
            spoilt = [one for one in message.step.batch.admit if one.sampling.seed == SPOILT_SEED]
            for one in spoilt:
                one.sampling.top_p = 7.0
            if spoilt:
                message.ClearField("crc32")
                raw = message.SerializeToString()
                raw += _CRC_TAG + struct.pack("<I", zlib.crc32(raw))
        return super()._outcomes(raw, way)


def malformed_batch() -> Figures:
    """Spoil one request's row of a batch on its way to the executor, with others beside it."""
    with temporary_folder() as folder, contextlib.ExitStack() as stack:

        def start(name: str, module: str, *options: str) -> dict[str, Any]:
            process = Process(module, ["--listen=127.0.0.1:0", *options], folder, name)
            stack.callback(process.end)
            return process.addresses()

        model = (f"--model={BUNDLED_MODEL}", "--dtype=float32", "--max-num-blocks=512")
        proxy = SpoilingProxy(start("executor", "executor_svc", *model)["address"])
        ports = ("--admin-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", *PATIENCE)
        link = f"--executor=127.0.0.1:{proxy.start()}"
        scheduler = start("scheduler", "scheduler_svc", link, *ports)
        public: str = scheduler["address"]
        wait_until(lambda: is_serving(public, "tandem.ready", timeout_s=10), "tandem.ready")
        with ThreadPoolExecutor(1 + NUM_OTHERS) as pool:
            others = [pool.submit(_end, public, seed, 400) for seed in range(NUM_OTHERS)]
            time.sleep(1.0)
            spoilt = pool.submit(_end, public, SPOILT_SEED, 4)
            served = sum(one.result() == "OK" for one in others)
        with AdminClient(scheduler["admin_address"], retry=NO_RETRY) as admin:
            stats = admin.stats()
        return {
            "its request ends": spoilt.result(),
            "others beside it that were served": f"{served} of {NUM_OTHERS}",
            "sessions of the executor": stats.executor_sessions,
            "deaths blamed on the executor": stats.executor_deaths,
        }


def _end(address: str, seed: int, max_tokens: int) -> str:
    request = small_request()
    request.sampling.seed = seed
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    raw = pb.CompleteRequest(request=request).SerializeToString()
    with insecure_channel(address) as channel:
        try:
            channel.unary_unary(COMPLETE)(raw, timeout=PATIENT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            return end_of(error)
    return "OK"
