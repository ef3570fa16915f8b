"""`tandem up`: a whole server on this machine, until Ctrl-C."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandem.engine_config import EngineConfig
from tandem_client.channel import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from tandem_client.cli.failures import Terminated, fail, readable_errors
from tandem_client.cli.services import LocalServer, RunningServer, ServiceFailed, local_server

WATCH_S = 0.2
EXECUTOR_LIMITS = (
    "block_size",
    "max_num_blocks",
    "max_batch_size",
    "max_model_len",
    "max_total_tokens",
)
"""Engine limits that both services take; the scheduler also takes the others."""

Limit = Annotated[int | None, typer.Option(rich_help_panel="Engine limits")]


def bundled_model() -> Path | None:
    """The model that comes with a checkout of the project; None in other installations."""
    folder = Path(__file__).resolve().parents[4] / "deploy" / "models" / "tandem-py"
    return folder if folder.is_dir() else None


@readable_errors
def up(
    *,
    model: Annotated[
        Path | None, typer.Argument(help="Model directory; default: the bundled model.")
    ] = None,
    listen: Annotated[str, typer.Option(help="Public address; port 0 = any.")] = DEFAULT_ADDRESS,
    admin_listen: Annotated[
        str, typer.Option(help="Address for operators; empty = none.")
    ] = DEFAULT_ADMIN_ADDRESS,
    metrics_listen: Annotated[
        str, typer.Option(help="Address of /metrics; empty = none.")
    ] = "127.0.0.1:9464",
    config: Annotated[
        Path | None, typer.Option(help="JSON file of engine limits; flags win over it.")
    ] = None,
    block_size: Limit = None,
    max_num_blocks: Limit = None,
    max_batch_size: Limit = None,
    max_num_seqs: Limit = None,
    max_model_len: Limit = None,
    max_total_tokens: Limit = None,
    memory_threshold: Annotated[float | None, typer.Option(rich_help_panel="Engine limits")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    drain_grace_s: Annotated[
        float, typer.Option(help="Seconds that running requests may go on after Ctrl-C.")
    ] = 5.0,
    start_timeout_s: Annotated[float, typer.Option(help="Longest wait for readiness.")] = 300.0,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the services' logs here.")] = None,
    executor_arg: Annotated[
        list[str] | None,
        typer.Option(help="More for the executor, e.g. --executor-arg=--num-threads=4."),
    ] = None,
    scheduler_arg: Annotated[
        list[str] | None,
        typer.Option(help="More for the scheduler, e.g. --scheduler-arg=--window=2."),
    ] = None,
) -> None:
    """Start an executor and a scheduler, and serve until Ctrl-C."""
    folder = model or bundled_model()
    if folder is None:
        raise typer.BadParameter("name a model directory: tandem up MODEL_DIR")
    limits = _limits(
        config,
        {
            "block_size": block_size,
            "max_num_blocks": max_num_blocks,
            "max_batch_size": max_batch_size,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "max_total_tokens": max_total_tokens,
            "memory_threshold": memory_threshold,
        },
    )
    for_executor = {name: limits[name] for name in EXECUTOR_LIMITS if name in limits}
    file = [] if config is None else [f"--config={config}"]
    executor = ["--model", str(folder), "--dtype", dtype, "--device", device]
    addresses = [
        f"--listen={listen}",
        f"--admin-listen={admin_listen}",
        f"--metrics-listen={metrics_listen}",
    ]
    plan = LocalServer(
        executor_arguments=[
            *executor,
            *file,
            *_flags(for_executor),
            *(executor_arg or []),
        ],
        scheduler_arguments=[*addresses, *file, *_flags(limits), *(scheduler_arg or [])],
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
                    _watch(server)
                finally:
                    console.print("stopping; Ctrl-C again ends everything at once", style="dim")
    except ServiceFailed as failure:
        raise fail(failure.line, failure.code) from None
    except (KeyboardInterrupt, Terminated):
        if not is_up:
            raise
        console.print("stopped", style="dim")


def _watch(server: RunningServer) -> None:
    while True:
        server.check()
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


def _limits(config: Path | None, flags: Mapping[str, int | float | None]) -> dict[str, int | float]:
    """Limits that a flag sets, after validation together with the file and the defaults."""
    base = EngineConfig() if config is None else EngineConfig.from_file(config)
    given = {name: value for name, value in flags.items() if value is not None}
    replace(base, **given).validate()  # type: ignore[arg-type]  # typer checked the types
    return given


def _flags(limits: Mapping[str, int | float]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
