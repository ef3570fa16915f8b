"""`tandem up`: a server with executor and scheduler on this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tandem.bundled_model import bundled_model
from tandem.errors import AddressInUse, TandemError
from tandem.network.listen_address import check_all_free
from tandem.settings.options import table_of
from tandem_client.admin import AdminClient
from tandem_client.cli.local_server.service import ServiceFailed
from tandem_client.cli.local_server.service_config import ask_services, check_files, check_model
from tandem_client.cli.local_server.services import LocalServer, RunningServer, local_server
from tandem_client.cli.shared.failures import ExitCode, Terminated, fail, readable_errors
from tandem_client.cli.up.banner import banner
from tandem_client.cli.up.free_ports import free_instead
from tandem_client.cli.up.passed_on import refuse_dry_runs, refuse_questions
from tandem_client.cli.up.protected_gateway import gateway_arguments, has_files
from tandem_client.cli.up.service_flags import (
    EXECUTOR,
    SCHEDULER,
    arguments_of,
    flags_for,
    takes_service_flags,
)
from tandem_client.cli.up.shares import shares_of
from tandem_client.streams.retry import NO_RETRY

LISTENING = ("listen", "admin_listen", "metrics_listen")
MODEL_VARIABLE = f"{table_of(EXECUTOR).env_prefix}MODEL"
"""Environment variable of the executor's model; the executor inherits this environment."""
WATCH_S = 0.2
DRAIN_LOOK_S = 1.0
DRAIN_GRACE_S = 5.0
START_TIMEOUT_S = 300.0
MAX_EXECUTORS = 64

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL", help="Model directory, or ORG/NAME in the Hugging Face cache; see above."
    ),
]
ModelFlag = Annotated[
    Path | None,
    typer.Option("--model", "--model-path", metavar="MODEL", help="Another way to give MODEL."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="JSON or TOML file of what follows below; flags win over it."
    ),
]
DrainGrace = Annotated[
    float | None,
    typer.Option(
        metavar="FLOAT",
        help=f"Seconds that running requests may go on after Ctrl-C. [default: {DRAIN_GRACE_S}]",
    ),
]
StartTimeout = Annotated[float, typer.Option(metavar="FLOAT", help="Longest wait for readiness.")]
LogDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the services' logs here.")]
OpenAI = Annotated[
    str | None,
    typer.Option(
        "--openai",
        metavar="ADDRESS",
        help="Serve OpenAI's HTTP API too, at HOST:PORT, for example 127.0.0.1:8000.",
    ),
]
NumExecutors = Annotated[
    int | None,
    typer.Option(
        "--dp-size",
        "--num-executors",
        metavar="INT",
        min=1,
        max=MAX_EXECUTORS,
        help="Executors that serve together, each with a copy of the model. They share out the "
        "CPU's threads, its memory for KV and the GPUs, where no flag says how much each takes. "
        "[default: 1]",
    ),
]
ExecutorArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FLAG", help="Another of the executor, e.g. --executor-arg=--num-threads=4."
    ),
]
GatewayArg = Annotated[
    list[str] | None,
    typer.Option(metavar="FLAG", help="One of the gateway, e.g. --gateway-arg=--cors-origins=*."),
]
SchedulerArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FLAG", help="Another of the scheduler, e.g. --scheduler-arg=--take-over."
    ),
]


@takes_service_flags
@readable_errors
def up(
    *,
    model: Model = None,
    model_flag: ModelFlag = None,
    config: Config = None,
    drain_grace_s: DrainGrace = None,
    start_timeout_s: StartTimeout = START_TIMEOUT_S,
    log_dir: LogDir = None,
    openai: OpenAI = None,
    dp_size: NumExecutors = None,
    executor_arg: ExecutorArg = None,
    scheduler_arg: SchedulerArg = None,
    gateway_arg: GatewayArg = None,
    **flags: str | bool | None,
) -> None:
    """
    Start an executor and a scheduler, and serve until Ctrl-C.

    An executor that dies is started again, and running requests go on, at once where several serve;
    so is the gateway that --openai starts. When the scheduler dies, everything ends.

    Models: Llama, Mistral, Ministral, Qwen2 and Qwen3, in Hugging Face format (config.json,
    *.safetensors in float32, bfloat16 or float16, tokenizer.json), from a local directory; without
    one, the bundled test model. Nothing is downloaded: hf download ORG/NAME --local-dir DIR.
    """
    model = _one_of(model, model_flag)
    passed_on = {"executor": executor_arg, "scheduler": scheduler_arg, "gateway": gateway_arg}
    refuse_questions({program: given or () for program, given in passed_on.items()})
    chosen = model if model or MODEL_VARIABLE in os.environ else _bundled_or_refuse()
    own: Mapping[str, object] = {"model": chosen, "config": config}
    for_executor = [*arguments_of(own), *flags_for(EXECUTOR, flags), *(executor_arg or [])]
    own = {"config": config, "drain_grace_s": drain_grace_s}
    for_scheduler = [*arguments_of(own), *flags_for(SCHEDULER, flags), *(scheduler_arg or [])]
    # Mistakes are reported before anything starts.
    asked = ask_services({SCHEDULER: for_scheduler, EXECUTOR: for_executor})
    settings = {service: _by_name(asked[service]) for service in asked}
    refuse_dry_runs(settings, {EXECUTOR: for_executor, SCHEDULER: for_scheduler})
    values = {name: one["value"] for name, one in settings[SCHEDULER].items()}
    for_gateway = _checked(values, for_scheduler, gateway_arg or [], openai)
    listening = {**{name: values[name] for name in LISTENING}, "openai": openai}
    addresses = {name: at for name, at in listening.items() if at}
    try:
        check_all_free(addresses)
    except AddressInUse as error:
        check_model(for_executor)  # report first a mistake that other ports would not fix
        given = {**own, "log_dir": log_dir, "dp_size": dp_size}
        others = {**flags, "openai": openai, **free_instead(addresses)}
        raise _in_use(error, _repeated(model, given, passed_on, others)) from None
    grace = settings[SCHEDULER]["drain_grace_s"]
    plan = LocalServer(
        executor_arguments=for_executor,
        executor_shares=shares_of(dp_size or 1, for_executor, settings[EXECUTOR]),
        scheduler_arguments=for_scheduler,
        drain_grace_s=DRAIN_GRACE_S if grace["source"] == "default" else grace["value"],
        start_timeout_s=start_timeout_s,
        log_folder=log_dir,
        openai_listen=openai,
        gateway_arguments=for_gateway,
    )
    _serve(plan, Path(settings[EXECUTOR]["model"]["value"]), asked[SCHEDULER]["warnings"], values)


def _one_of(model: Path | None, flag: Path | None) -> Path | None:
    """Return the model, whichever way it was given."""
    if model and flag:
        raise fail(f"give one model: {model} and --model {flag} are two", ExitCode.USAGE)
    return model or flag


def _in_use(error: AddressInUse, elsewhere: list[str]) -> typer.Exit:
    command = shlex.join(["tandem", "up", *elsewhere])
    return fail(f"{error.reason}: {error.message}; or serve elsewhere: {command}")


def _checked(
    settings: Mapping[str, Any], for_scheduler: list[str], given: list[str], openai: str | None
) -> list[str]:
    """Check the scheduler's files of security; return the gateway's flags, if there is one."""
    if has_files(settings):
        check_files(for_scheduler)
    return gateway_arguments(settings, given) if openai else []


def _serve(
    plan: LocalServer, model: Path, warnings: Sequence[str], settings: Mapping[str, Any]
) -> None:
    console = Console(stderr=True)
    started_s = time.monotonic()
    is_up = False
    try:
        with console.status("starting") as status:

            def say(what: str) -> None:
                status.update(f"{what} ({model})")

            with local_server(plan, say) as server:
                status.stop()
                took_s = time.monotonic() - started_s
                lines = banner(
                    server,
                    took_s,
                    is_bundled=_is_bundled(model),
                    warnings=warnings,
                    settings=settings,
                )
                typer.echo("\n".join(lines))
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
    """Keep the services up until the server is drained."""
    with contextlib.ExitStack() as stack:
        admin: AdminClient | None = None
        if server.admin_address:
            admin = stack.enter_context(AdminClient(server.local_address, retry=NO_RETRY))
        looked_s = time.monotonic()
        while True:
            done = server.keep_up(time.monotonic())
            if done is not None:
                console.print(done, style="yellow", markup=False)
            if admin is not None and time.monotonic() - looked_s > DRAIN_LOOK_S:
                looked_s = time.monotonic()
                if is_drained(admin):
                    console.print("drained: no request is left and none is taken", style="yellow")
                    return
            time.sleep(WATCH_S)


def is_drained(admin: AdminClient) -> bool:
    """Return True if a drain is complete; False if the server does not answer now."""
    try:
        now = admin.stats(deadline_s=DRAIN_LOOK_S)
    except TandemError:
        return False
    is_empty = now.running_requests + now.waiting_requests == 0
    return now.draining and is_empty and not now.executor_attached


def _bundled_or_refuse() -> Path:
    folder = bundled_model()
    if folder is None:
        raise typer.BadParameter("name a model directory: tandem up MODEL_DIR")
    return folder


def _is_bundled(model: Path) -> bool:
    bundled = bundled_model()
    return bundled is not None and model.resolve() == bundled.resolve()


def _by_name(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in report["settings"]}


def _repeated(
    model: Path | None,
    own: Mapping[str, object],
    passed_on: Mapping[str, list[str] | None],
    others: Mapping[str, object],
) -> list[str]:
    """Return the arguments of a command like this one."""
    for_programs = [
        part
        for program, many in passed_on.items()
        for one in many or []
        for part in arguments_of({f"{program}_arg": one})
    ]
    named = [str(model)] if model else []
    return [*named, *arguments_of(own), *for_programs, *arguments_of(others)]
