"""`tandem up`: a whole server on this machine, until Ctrl-C."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandem.bundled_model import bundled_model
from tandem_client.channel import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from tandem_client.cli.failures import Terminated, fail, readable_errors
from tandem_client.cli.service_config import ask_services
from tandem_client.cli.service_flags import EXECUTOR, SCHEDULER, flags_for, takes_service_flags
from tandem_client.cli.services import LocalServer, RunningServer, ServiceFailed, local_server

WATCH_S = 0.2

Model = Annotated[Path | None, typer.Argument(help="Model directory; default: the bundled model.")]
Listen = Annotated[str, typer.Option(help="Public address; port 0 = any.")]
AdminListen = Annotated[str, typer.Option(help="Address for operators; empty = none.")]
MetricsListen = Annotated[str, typer.Option(help="Address of /metrics; empty = none.")]
Config = Annotated[
    Path | None, typer.Option(help="JSON or TOML file of what follows below; flags win over it.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DrainGrace = Annotated[
    float, typer.Option(help="Seconds that running requests may go on after Ctrl-C.")
]
StartTimeout = Annotated[float, typer.Option(help="Longest wait for readiness.")]
LogDir = Annotated[Path | None, typer.Option(help="Keep the services' logs here.")]
ExecutorArg = Annotated[
    list[str] | None,
    typer.Option(help="More for the executor, e.g. --executor-arg=--num-threads=4."),
]
SchedulerArg = Annotated[
    list[str] | None,
    typer.Option(help="More for the scheduler, e.g. --scheduler-arg=--window=2."),
]


Settings = dict[str, str | Path | None]


@takes_service_flags
@readable_errors
def up(
    *,
    model: Model = None,
    listen: Listen = DEFAULT_ADDRESS,
    admin_listen: AdminListen = DEFAULT_ADMIN_ADDRESS,
    metrics_listen: MetricsListen = "127.0.0.1:9464",
    config: Config = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    drain_grace_s: DrainGrace = 5.0,
    start_timeout_s: StartTimeout = 300.0,
    log_dir: LogDir = None,
    executor_arg: ExecutorArg = None,
    scheduler_arg: SchedulerArg = None,
    **flags: str | bool | None,
) -> None:
    """
    Start an executor and a scheduler, and serve until Ctrl-C.

    An executor that dies is started again, and running requests go on; when the scheduler dies,
    everything ends.
    """
    folder = model or bundled_model()
    if folder is None:
        raise typer.BadParameter("name a model directory: tandem up MODEL_DIR")
    file: Settings = {"config": config}
    addresses: Settings = {
        "listen": listen,
        "admin_listen": admin_listen,
        "metrics_listen": metrics_listen,
    }
    engine: Settings = {"model": folder, "dtype": dtype, "device": device}
    for_executor = [*_flags({**engine, **file}), *flags_for(EXECUTOR, flags), *(executor_arg or [])]
    for_scheduler = [
        *_flags({**addresses, **file}),
        *flags_for(SCHEDULER, flags),
        *(scheduler_arg or []),
    ]
    # Mistakes show before anything starts.
    ask_services({SCHEDULER: for_scheduler, EXECUTOR: for_executor})
    plan = LocalServer(
        executor_arguments=for_executor,
        scheduler_arguments=for_scheduler,
        drain_grace_s=drain_grace_s,
        start_timeout_s=start_timeout_s,
        log_folder=log_dir,
    )
    _serve(plan, folder)


def _serve(plan: LocalServer, model: Path) -> None:
    console = Console(stderr=True)
    started_s = time.monotonic()
    is_up = False
    try:
        with console.status("starting") as status:

            def say(what: str) -> None:
                status.update(f"{what} ({model})")

            with local_server(plan, say) as server:
                status.stop()
                _announce(server, time.monotonic() - started_s)
                is_up = True
                try:
                    _watch(server, console)
                finally:
                    console.print("stopping; Ctrl-C again ends everything at once", style="dim")
    except ServiceFailed as failure:
        raise fail(failure.line, failure.code) from None
    except (KeyboardInterrupt, Terminated):
        if not is_up:
            raise
        console.print("stopped", style="dim")


def _watch(server: RunningServer, console: Console) -> None:
    while True:
        done = server.keep_up(time.monotonic())
        if done is not None:
            console.print(done, style="yellow", markup=False)
        time.sleep(WATCH_S)


def _announce(server: RunningServer, took_s: float) -> None:
    lines = [f"serving at {server.address} (ready after {took_s:.1f} s)"]
    if server.admin_address:
        lines.append(f"  operators  {server.admin_address}")
    if server.metrics_address:
        lines.append(f"  metrics    http://{server.metrics_address}/metrics")
    lines.append(f"  logs       {server.log_folder}")
    example = shlex.join(["tandem", "generate", "def fibonacci(n):", "--address", server.address])
    lines += ["try it:", f"  {example}", "Ctrl-C stops it"]
    typer.echo("\n".join(lines))


def _flags(settings: Mapping[str, object]) -> list[str]:
    """Flags of a service for every setting that has a value."""
    return [
        f"--{name.replace('_', '-')}={value}"
        for name, value in settings.items()
        if value is not None
    ]
