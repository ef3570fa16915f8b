"""`tandem doctor`: checks of this machine, and of a server that runs on it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tandem.bundled_model import bundled_model
from tandem.error_codes import DeadlineExceeded, PermissionDenied, Unauthenticated
from tandem.errors import InvalidConfig, TandemError
from tandem.installation import install_command
from tandem.network.address import host_and_port, names_this_machine
from tandem.network.listen_address import unprotected
from tandem.status import PeerUnavailable
from tandem.wording import gib
from tandem_client.admin import AdminClient, is_serving
from tandem_client.admin.executors import ExecutorState, ExecutorSummary
from tandem_client.channel import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.executor_words import executors_of, meaning_of
from tandem_client.cli.shared.failures import ExitCode, describe, readable_errors
from tandem_client.cli.shared.never_ready import why_never
from tandem_client.cli.shared.protection import protection_of
from tandem_client.cli.shared.tls_probe import wants_tls
from tandem_client.client import Client
from tandem_client.streams.retry import NO_RETRY
from tandem_client.targets import target_of
from tandem_client.views.unready import why_unready

TIMEOUT_S = 3.0
MIN_FREE_BYTES = 4 << 30
GIVE_CA = "give --ca FILE"
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
PARTS = {
    "client": ("grpcio", "protobuf", "typer", "rich"),
    "scheduler": ("pyzmq", "msgspec", "pydantic", "tokenizers", "jinja2"),
    "executor": ("torch", "safetensors", "pydantic"),
}
_TO_DO = {
    ExecutorState.DRAINED: "to let it serve again: tandem executors add {}",
    ExecutorState.SUSPENDED: "to go on: tandem resume",
    ExecutorState.CONNECTING: "start it, or remove it: tandem executors remove {}",
    ExecutorState.SILENT: "see its log",
}
"""Advice on an executor that does not serve, by its state; REFUSED has the reason already."""
PROBE_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
name = torch.cuda.get_device_name(0) if cuda else None
print(json.dumps({"version": torch.__version__, "cuda": name, "threads": torch.get_num_threads()}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `advice` says what to do about a problem."""

    verdict: Literal["ok", "warn", "fail"]
    subject: str
    fact: str
    advice: str = ""


@readable_errors
@takes_access
def doctor(
    *,
    channel: ChannelOptions,
    address: options.Address = DEFAULT_ADDRESS,
    admin_address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    as_json: options.Json = False,
    server: Annotated[
        bool, typer.Option("--server", help="A server must be running: fail if none is.")
    ] = False,
) -> None:
    """
    Check this machine, and a server if one is running.

    The exit code is 1 if any check fails.
    """
    for port in (address, admin_address):
        target_of(port)
    findings = [
        *check_python(),
        *check_packages(),
        *check_torch(),
        *check_machine(),
        *check_model(),
        *check_server(address, admin_address, channel, must_run=server),
    ]
    for finding in [] if as_json else findings:
        typer.secho(f"{finding.verdict:4}", fg=COLOURS[finding.verdict], nl=False)
        advice = f"; {finding.advice}" if finding.advice else ""
        typer.echo(f"  {finding.subject}: {finding.fact}{advice}")
    if as_json:
        keys = ("verdict", "subject", "fact", "advice")
        typer.echo(json.dumps([{key: getattr(f, key) for key in keys} for f in findings]))
    if any(finding.verdict == "fail" for finding in findings):
        raise typer.Exit(int(ExitCode.FAILED))


def check_python() -> Iterator[Finding]:
    """Report the versions of the interpreter and of the package itself."""
    yield Finding("ok", "python", f"{platform.python_version()} at {sys.executable}")
    yield Finding("ok", "tandem-serve", version("tandem-serve"))


def check_packages() -> Iterator[Finding]:
    """Check the packages that each part needs; a machine may lack those of the services."""
    for part, names in PARTS.items():
        missing = [name for name in names if not _is_installed(name)]
        if not missing:
            yield Finding("ok", part, ", ".join(f"{name} {version(name)}" for name in names))
            continue
        verdict: Literal["warn", "fail"] = "fail" if part == "client" else "warn"
        advice = f"to run it here: {install_command(part)}"
        yield Finding(verdict, part, f"{', '.join(missing)} not installed", advice)


def check_torch() -> Iterator[Finding]:
    """Check PyTorch, the executor's device library, in a process of its own."""
    if not _is_installed("torch"):
        return
    outcome = subprocess.run(  # noqa: S603  # our own interpreter
        [sys.executable, "-c", PROBE_TORCH], capture_output=True, text=True, check=False
    )
    if outcome.returncode != 0:
        why = (outcome.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        yield Finding("fail", "torch", f"does not start: {why}", "install it again")
        return
    facts = json.loads(outcome.stdout.strip().splitlines()[-1])
    device = facts["cuda"] or f"no CUDA device, {facts['threads']} CPU threads"
    yield Finding("ok", "torch", f"{facts['version']}, {device}")


def check_machine() -> Iterator[Finding]:
    """Check the processor and the free disk space."""
    flags = _cpu_flags()
    present = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    fact = f"{os.cpu_count()} cores, {platform.machine()}, {' '.join(present) or 'no AVX2'}"
    if platform.machine() == "x86_64" and "avx2" not in flags:
        yield Finding("warn", "cpu", fact, "the CPU executor will be slow")
    else:
        yield Finding("ok", "cpu", fact)
    free = shutil.disk_usage(Path.cwd()).free
    fact = f"{gib(free, '.1f')} GiB free here"
    if free < MIN_FREE_BYTES:
        yield Finding("warn", "disk", fact, "an installation with its packages needs about 4 GiB")
    else:
        yield Finding("ok", "disk", fact)


def check_model() -> Iterator[Finding]:
    """Check the model that `tandem up` serves by default."""
    folder = bundled_model()
    if folder is None:
        yield Finding(
            "warn", "bundled model", "not in this installation", "name one: tandem up DIR"
        )
        return
    missing = [
        name
        for name in ("config.json", "model.safetensors", "tokenizer.json")
        if not (folder / name).is_file()
    ]
    if missing:
        advice = "restore it from the repository"
        yield Finding("fail", "bundled model", f"{', '.join(missing)} missing in {folder}", advice)
    else:
        yield Finding("ok", "bundled model", str(folder))


def check_server(
    address: str, admin_address: str, channel: ChannelOptions, *, must_run: bool
) -> Iterator[Finding]:
    """Check a running server's health, or, without a server, that its addresses are free."""
    try:
        ready = is_serving(address, "tandem.ready", timeout_s=TIMEOUT_S, options=channel)
    except TandemError as error:
        if wants_tls(error, address, is_encrypted=channel.is_encrypted):
            verdict: Literal["warn", "fail"] = "fail" if must_run else "warn"
            yield Finding(verdict, "server", f"{address} speaks TLS", GIVE_CA)
        else:
            why = describe(error, address)
            yield from _no_server(address, admin_address, why, must_run=must_run)
        return
    if not ready:
        never = why_never(address, channel)
        advice = _advice(admin_address, channel) if never is None else never[0]
        yield Finding("fail", "server", f"{address} answers but is not ready", advice)
        with contextlib.suppress(TandemError):  # the line above stands for it
            yield from check_executors(_executors(admin_address, channel))
        return
    yield _check_public_port(address, channel)
    yield from _check_admin_port(admin_address, channel)


def _check_public_port(address: str, channel: ChannelOptions) -> Finding:
    try:
        with Client(address, retry=NO_RETRY, options=channel) as client:
            model = client.get_model(deadline_s=TIMEOUT_S)
    except (Unauthenticated, PermissionDenied) as error:
        return _refused("server", address, error, "generate", "what it serves")
    except TandemError as error:
        return Finding("fail", "server", describe(error, address), "see the scheduler's log")
    what = f"{model.name} ({model.architecture}, {model.dtype})"
    return Finding("ok", "server", f"{address} serves {what}")


def _check_admin_port(address: str, channel: ChannelOptions) -> Iterator[Finding]:
    try:
        with AdminClient(address, retry=NO_RETRY, options=channel) as admin:
            stats = admin.stats(deadline_s=TIMEOUT_S)
            settings = admin.config(deadline_s=TIMEOUT_S)
            executors = executors_of(admin, TIMEOUT_S)
    except (Unauthenticated, PermissionDenied) as error:
        yield _refused("admin", address, error, "operate", "its load and its security")
        return
    except (PeerUnavailable, DeadlineExceeded) as error:
        if wants_tls(error, address, is_encrypted=channel.is_encrypted):
            yield Finding("warn", "admin", f"{address} speaks TLS", GIVE_CA)
        else:
            yield Finding("warn", "admin", f"{address} does not answer", "set --admin-address")
        return
    except TandemError as error:
        yield Finding("warn", "admin", f"{address} answers: {describe(error)}", "see its log")
        return
    load = f"{stats.running_requests} running, {stats.waiting_requests} waiting"
    yield Finding("ok", "admin", f"{load}, {stats.used_blocks}/{stats.total_blocks} blocks used")
    yield from check_executors(executors)
    yield from check_security({one.name: one.value for one in settings})


def check_executors(executors: Iterable[ExecutorSummary]) -> Iterator[Finding]:
    """Check that each executor serves, and say why one does not."""
    for one in executors:
        is_well = one.state is ExecutorState.SERVING
        advice = _TO_DO.get(one.state, "").format(one.address)
        yield Finding(
            "ok" if is_well else "warn", f"executor {one.address}", meaning_of(one), advice
        )


def _executors(admin_address: str, channel: ChannelOptions) -> tuple[ExecutorSummary, ...]:
    with AdminClient(admin_address, retry=NO_RETRY, options=channel) as admin:
        return executors_of(admin, TIMEOUT_S)


def _refused(subject: str, address: str, error: TandemError, role: str, unseen: str) -> Finding:
    """Report a port that answers and wants another credential, which hides only `unseen`."""
    advice = f"to see {unseen}, give a token with the role {role!r}: --api-key, TANDEM_API_KEY"
    return Finding("warn", subject, f"{address} answers: {describe(error)}", advice)


def check_security(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that what other machines can reach, or what leaves this one, is protected."""
    for name in ("listen", "admin_listen", "metrics_listen"):
        is_metrics = name == "metrics_listen"
        own = name.removesuffix("listen")
        is_encrypted, is_authenticated = protection_of(name, settings)
        address = settings.get(name)
        why = address and unprotected(
            address, is_encrypted=is_encrypted, is_authenticated=is_authenticated
        )
        if why:
            tokens_file = "metrics_token_file" if is_metrics else "tokens_file"
            advice = (
                "listen on 127.0.0.1, or keep that network to those you trust, or set "
                f"{own}tls_cert, {own}tls_key and {tokens_file}"
            )
            yield Finding("warn", "security", f"{name} {address}: {why}", advice)
    is_encrypted = any(settings.get(name) for name in ("executor_ca", "executor_cert"))
    is_known = any(settings.get(name) for name in ("executor_cert", "link_token_file"))
    for address in str(settings.get("executor") or "").split(","):
        if address and not names_this_machine(address) and not (is_encrypted and is_known):
            lacks = [
                what
                for what, has in (("encrypted", is_encrypted), ("authenticated", is_known))
                if not has
            ]
            yield Finding(
                "warn",
                "security",
                f"executor {address}: calls leave this machine and are not {' or '.join(lacks)}",
                "set executor_ca, and executor_cert with executor_key or link_token_file",
            )


def _advice(admin_address: str, channel: ChannelOptions) -> str:
    """Return advice on a server that is not ready, from its admin port if that answers."""
    try:
        with AdminClient(admin_address, retry=NO_RETRY, options=channel) as admin:
            return why_unready(admin.stats(deadline_s=TIMEOUT_S))
    except TandemError:
        return "see its log, or ask again with --admin-address"


def _no_server(address: str, admin_address: str, why: str, *, must_run: bool) -> Iterator[Finding]:
    if must_run:
        yield Finding("fail", "server", why)
        return
    yield Finding("ok", "server", f"none at {address}")
    for port in (address, admin_address):
        if _is_free(port):
            yield Finding("ok", "port", f"{port} is free")
        else:
            advice = "something else listens there: stop it, or serve with tandem up --listen"
            yield Finding("warn", "port", f"{port} is taken", advice)


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def _is_free(address: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(host_and_port(address))
        except (OSError, ValueError, InvalidConfig):
            return False
    return True
