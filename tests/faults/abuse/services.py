"""Services that an attempt floods or hurts, and what is read from them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tandem.inference.v1 import inference_service_pb2 as pb
from tests.e2e.cluster import BUNDLED_MODEL, Cluster

Figures = dict[str, float | str]

MIB = 1 << 20
COMPLETE = "/tandem.inference.v1.InferenceService/Complete"
GET_MODEL = "/tandem.inference.v1.InferenceService/GetModel"
TOKENIZE = "/tandem.inference.v1.InferenceService/Tokenize"
SETTLE_S = 8.0
"""Seconds after which memory that is given back has been."""
PATIENT_S = 300.0
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed afterwards; its name is short enough for a socket's path."""
    folder = Path(tempfile.mkdtemp(prefix="abuse-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def services(
    scheduler: Sequence[str] = (),
    executor: Sequence[str] = (),
    *,
    model: Path = BUNDLED_MODEL,
) -> Iterator[Cluster]:
    """Yield a scheduler and an executor of their own, with these options."""
    with temporary_folder() as folder:
        cluster = Cluster(model, folder, list(executor), ["--log-format=json", *scheduler])
        try:
            cluster.start_executor()
            yield cluster
        finally:
            cluster.close()


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


def small_request() -> pb.GenerateRequest:
    """Return a request of few tokens."""
    request = pb.GenerateRequest(text="def f(")
    request.stopping.max_tokens = 4
    return request


def frontend_of(cluster: Cluster) -> psutil.Process:
    """Return the process that reads requests."""
    family = cluster.scheduler.family()
    return next(one for one in family if "scheduler_svc.frontend" in one.cmdline())


class Peak:
    """Highest memory of a process since this was made."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def mib(self) -> int:
        """Return it in MiB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) // 1024


def memory_of(rss: int, peak: Peak, frontend: psutil.Process) -> Figures:
    """Return a frontend's memory before an attempt, at its peak, and once it has settled."""
    highest = peak.mib()
    time.sleep(SETTLE_S)
    kept = frontend.memory_info().rss
    return {
        "frontend before, MiB": round(rss / MIB),
        "frontend at its peak, MiB": highest,
        "frontend after, MiB": round(kept / MIB),
    }


def told(ends: dict[str, int]) -> str:
    """Return ends of calls with their numbers, as text."""
    return ", ".join(f"{end} {count}" for end, count in sorted(ends.items()))


def insecure_channel(address: str) -> grpc.Channel:
    """Return a channel that shares no connection with others."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
