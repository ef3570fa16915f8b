"""Parts of a scheduler service that the benchmark of the step link runs."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from scheduler_svc.config.settings import load_settings
from scheduler_svc.executor_client.claims import Claims
from scheduler_svc.executor_client.connection import ExecutorConnector
from scheduler_svc.executor_client.link import ExecutorLink
from scheduler_svc.executor_client.model_cache import ModelCache
from scheduler_svc.ipc.sockets import CoreSocket
from scheduler_svc.service.loop import CoreLoop
from scheduler_svc.service.wakeup import Wakeup
from tandem.link.session import SchedulerId


def make_loop(
    executor: str,
    socket: CoreSocket,
    directory: Path,
    *,
    window: int,
    run_ahead: int,
    rows: int,
) -> CoreLoop:
    """
    Make a core loop that drives executors.

    Args:
        executor: Addresses of the executors, as for `--executor`.
        socket: Socket in place of the frontends'.
        directory: Directory for tokenizer files.
        window: Steps in flight.
        run_ahead: Steps in flight while no request waits, memory lasts and steps are short.
        rows: Number of requests that will be submitted.
    """
    loaded = load_settings(
        [
            "--executor",
            executor,
            "--window",
            str(window),
            "--run-ahead",
            str(run_ahead),
            "--max-num-seqs",
            str(rows),
        ],
        {},
    )
    wakeup = Wakeup()
    scheduler = SchedulerId(name="bench", incarnation=secrets.token_hex(8))
    cache, claims = ModelCache(directory / "models"), Claims()

    def make_link(address: str) -> ExecutorLink:
        connector = ExecutorConnector(
            (address,),
            scheduler=scheduler,
            lease_ms=loaded.settings.lease_ms,
            take_over=False,
            cache=cache,
            accept=lambda description: loaded.limits_on(description.geometry),
            claims=claims,
        )
        return ExecutorLink(connector, wake=wakeup.set)

    return CoreLoop(loaded, socket, make_link, wakeup, clock=time.monotonic)
