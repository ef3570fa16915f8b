"""Life of a frontend process, which serves until its parent closes the other end of its stdin."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import socket as sockets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog
import zmq.asyncio

from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.intake.memory import bound_heaps
from scheduler_svc.frontend.operators.reports import send_reports
from scheduler_svc.frontend.server import start_servers
from scheduler_svc.frontend.tracing.switch import open_tracing
from scheduler_svc.ipc.messages import Hello
from scheduler_svc.ipc.sockets import connect_frontend
from scheduler_svc.process.frontend_settings import FrontendSettings, parse_settings
from scheduler_svc.process.tick_watch import EXIT_AFTER_S, LOOK_INTERVAL_S, TickWatch, exit_stuck
from tandem.errors import HandedOver, InvalidConfig
from tandem.network.grpc_wakeups import read_all_wakeups
from tandem.process.telemetry import configure_logging

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

STOP_GRACE_S = 0.5
"""Seconds for the last statuses to reach clients."""
NICENESS = 5
"""Niceness of a frontend; with few cores the core runs first, as a late step delays all clients."""
SPANS_GRACE_S = 1.5
"""Seconds for the last spans to reach their collector, within `FORCED_EXIT_S`."""
FORCED_EXIT_S = 3.0
"""Seconds after the parent's end after which the process exits, even if it hangs."""


def run(argv: Sequence[str]) -> int:
    """
    Parse the arguments, serve until the parent stops, and return the exit code.

    Raises:
        TandemError: The settings are invalid, or an address cannot be listened on.
    """
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.frontend")
    parser.add_argument("--settings-json", required=True, help="FrontendSettings as JSON")
    try:
        settings = parse_settings(parser.parse_args(argv).settings_json)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"--settings-json: {error}") from error
    configure_logging(settings.log_level, settings.log_format)
    structlog.contextvars.bind_contextvars(frontend=settings.index)
    os.nice(NICENESS)
    bound_heaps()
    # All modules stay. Looking at them in every full collection would stop all calls for long.
    gc.freeze()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        read_all_wakeups(runner.get_loop())
        return runner.run(_serve(settings))


async def _serve(settings: FrontendSettings) -> int:
    parent_gone = asyncio.Event()
    _watch_parent(asyncio.get_running_loop(), parent_gone)
    context = zmq.asyncio.Context()
    socket = connect_frontend(context, Path(settings.ipc_path), settings.index)
    core = CoreClient(settings, socket, time.monotonic)
    tracer = open_tracing(
        settings.otlp_endpoint,
        time.monotonic,
        f"{sockets.gethostname()}-{os.getppid()}-{settings.index}",
    )
    servers = await start_servers(settings, core, time.monotonic, tracer)
    hello = Hello(
        settings.index,
        os.getpid(),
        servers.address,
        servers.admin_address,
        servers.metrics_address,
    )
    _log.info("frontend_listening", address=servers.address)
    pipe = asyncio.create_task(core.run(hello))
    failed_calls = servers.refusals.num_failed
    reports = asyncio.create_task(send_reports(core, settings.index, failed_calls))
    _watch_loop(core)
    stop = asyncio.create_task(parent_gone.wait())
    await asyncio.wait((pipe, stop), return_when=asyncio.FIRST_COMPLETED)

    broken = pipe.done()
    if broken:
        _log.error("core_pipe_broken", error=repr(pipe.exception()))
    core.lose(HandedOver("the scheduler is stopping: send the request again"))
    await servers.stop(STOP_GRACE_S)
    for task in (pipe, stop, reports):
        task.cancel()
    await asyncio.gather(pipe, stop, reports, return_exceptions=True)
    if tracer is not None:
        await tracer.close(SPANS_GRACE_S)
    core.close()
    context.destroy(linger=0)
    _log.info("frontend_stopped")
    return 1 if broken else 0


def _watch_parent(loop: asyncio.AbstractEventLoop, gone: asyncio.Event) -> None:
    """Start a thread that sets `gone` when stdin ends, and ends even a stuck process after it."""

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        loop.call_soon_threadsafe(gone.set)
        time.sleep(FORCED_EXIT_S)
        os._exit(1)

    threading.Thread(target=wait_for_end, name="parent-watch", daemon=True).start()


def _watch_loop(core: CoreClient) -> None:
    """
    Start a thread that ends the process when its event loop hangs; the loop answers health checks
    too, so no answer could tell of it.
    """
    loop_thread = threading.get_ident()

    def look() -> None:
        watch = TickWatch(time.monotonic())
        while watch.look(core.num_turns, time.monotonic()) <= EXIT_AFTER_S:
            time.sleep(LOOK_INTERVAL_S)
        exit_stuck("frontend", loop_thread)

    threading.Thread(target=look, name="loop-watch", daemon=True).start()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  # not on every platform
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
