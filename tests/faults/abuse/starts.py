"""Services as they start: a taken socket, Ctrl-C, and a hostile model directory."""

from __future__ import annotations

import collections
import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc

from tandem.inference.v1 import inference_service_pb2 as pb
from tests.e2e.cluster import BUNDLED_MODEL, ROOT, Cluster, Process, environment
from tests.faults.abuse.services import (
    COMPLETE,
    Figures,
    end_of,
    insecure_channel,
    small_request,
    temporary_folder,
    told,
)
from tests.waiting import wait_until

START_S = 60.0
"""Seconds within which a service ends, or a request."""
INTERRUPTED_S = 30.0
"""Seconds after SIGINT within which a program has ended."""
MODEL = (f"--model={BUNDLED_MODEL}", "--dtype=float32", "--max-num-blocks=64")
PROGRAMS = {
    "executor": ("executor_svc", *MODEL, "--listen=127.0.0.1:0"),
    "scheduler": ("scheduler_svc", "--executor=127.0.0.1:1", "--listen=127.0.0.1:0"),
    "tandem": ("tandem_client", "top"),
}
MOMENTS_S = tuple(at / 5 for at in range(1, 11))
"""Times of Ctrl-C after a program's start."""
HOSTILE = (
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.5),
    ("temperature", 5.0),
    ("temperature", -1.0),
    ("top_k", 10**12),
)
"""Values of generation_config.json that no request may have."""


def stolen_socket() -> Figures:
    """Start a second executor on the unix path of a first; then stop the second, if it started."""
    with temporary_folder() as folder, contextlib.ExitStack() as stack:
        path = folder / "s.sock"

        def start(name: str) -> Process:
            process = Process("executor_svc", [*MODEL, f"--listen=unix:{path}"], folder, name)
            stack.callback(process.end)
            return process

        start("first").addresses()
        inode = path.stat().st_ino
        second = start("second")
        has_started = wait_until(lambda: _has_started(second, folder), "it starts or ends")
        if has_started == "starts":
            second.process.terminate()
            second.process.wait(START_S)
        is_there = path.exists() and path.stat().st_ino == inode
        lines = second.log.read_text().splitlines()
        return {
            "the second": has_started if has_started == "starts" else lines[-1].split(":")[0],
            "the first's socket afterwards": "there" if is_there else "gone",
        }


def _has_started(process: Process, folder: Path) -> str | None:
    if (folder / f"{process.log.stem}.json").exists():
        return "starts"
    return "refuses" if process.process.poll() is not None else None


def interrupted_start() -> Figures:
    """Send SIGINT to each program at several moments of its start, and look how it ends."""
    # Programs that a job in the background starts would inherit that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found: Figures = {}
    for name, arguments in PROGRAMS.items():
        ends = collections.Counter(_interrupted(arguments, at_s) for at_s in MOMENTS_S)
        found[name] = told(ends)
    return found


def _interrupted(arguments: tuple[str, ...], at_s: float) -> str:
    """Return how a program ends that gets SIGINT so long after its start."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        time.sleep(at_s)
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            process.send_signal(signal.SIGINT)
        try:
            shown = process.communicate(timeout=INTERRUPTED_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return "goes on"
    return "traceback" if "Traceback" in shown else "no traceback"


def hostile_model() -> Figures:
    """Serve models whose recommended sampling parameters are out of range, one after another."""
    return {f"{name} {value}": _served_with(name, value) for name, value in HOSTILE}


def _served_with(name: str, value: float) -> str:
    """Return how the start, or a request that leaves the parameter unset, ends."""
    with temporary_folder() as folder:
        model = folder / "model"
        model.mkdir()
        for file in BUNDLED_MODEL.iterdir():
            if file.name != "generation_config.json":
                (model / file.name).symlink_to(file)
        (model / "generation_config.json").write_text(json.dumps({name: value}))
        cluster = Cluster(model, folder, [], [])
        try:
            with contextlib.suppress(AssertionError):  # it has ended, which is looked at next
                cluster.start_executor(ready=False)
            executor = cluster.executor
            assert executor is not None
            wait_until(
                lambda: executor.process.poll() is not None or cluster.is_ready(),
                "the executor is ready or has ended",
            )
            if executor.process.poll() is None:
                return _asked(cluster)
            return f"start refused: {executor.log.read_text().splitlines()[-1].split(':')[0]}"
        finally:
            cluster.close()


def _asked(cluster: Cluster) -> str:
    """Return how a request that sets no parameter ends, and the sessions that it took."""
    raw = pb.CompleteRequest(request=small_request()).SerializeToString()
    end = "OK"
    with insecure_channel(cluster.address) as channel:
        try:
            channel.unary_unary(COMPLETE)(raw, timeout=START_S)
        except grpc.RpcError as error:
            end = end_of(error)
    return f"request {end}, executor's sessions {cluster.stats().executor_sessions}"
