"""Executor, scheduler and gateway as child processes that never outlive their command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.errors import TandemError
from tandem.process.temporary import temporary_folder
from tandem.settings.options import ServiceName, flag_of
from tandem_client.admin import is_serving
from tandem_client.cli.shared.failures import ExitCode, Terminated, signal_name
from tandem_client.cli.shared.never_ready import why_never

CHILD = Path(__file__).with_name("child.py")
POLL_S = 0.05
EXECUTOR_SOCKET = "executor.sock"
SCHEDULER_SOCKET = "scheduler.sock"
LINK_SECURITY: Mapping[ServiceName, tuple[str, ...]] = {
    "executor": ("tls_cert", "tls_key", "tls_client_ca", "link_token_file", "insecure_link"),
    "scheduler": (
        *("executor_ca", "executor_cert", "executor_key", "link_token_file", "insecure_link"),
    ),
}
"""
Options of the link's security, which are set to none: a file for both services names certificates
of the ports, and variables may be set for an executor on a network.
"""
_SWITCH = "insecure_link"
MIN_LOG_BYTES = 1 << 20
STOP_S = 10.0
"""Seconds that a child may take to stop, besides the grace period for running requests."""
RESTARTED = frozenset({"executor", "gateway"})
"""Services without requests of their own: streams go on over them, or their clients come again."""
RESTARTS = 3
"""Number of restarts of one service allowed within RESTARTS_WITHIN_S; one more end is an error."""
RESTARTS_WITHIN_S = 120.0

_ANY_HOST = ("0.0.0.0:", "[::]:")
_REASON_LINE = re.compile(r"^[A-Z][A-Z_]+: .+")
_ERROR_LINE = re.compile(r'\[error *\]|"level": ?"error"')


class ServiceFailed(Exception):
    """Error of a child process that ended unexpectedly or did not become ready."""

    def __init__(self, line: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(line)
        self.line = line
        self.code = code


class Service:
    """One child process, in a process group of its own, with its log and ready file."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._ready_file = folder / f"{name}.json"
        shim = [sys.executable, "-I", "-S", str(CHILD), str(os.getpid())]
        command = [sys.executable, "-m", module, *arguments, "--ready-file", str(self._ready_file)]
        self._command = [*shim, *command]
        self.log.write_bytes(b"")
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            # In a group of its own: Ctrl-C in the terminal reaches only us, and we stop the
            # services in the right order.
            return subprocess.Popen(  # noqa: S603  # our own interpreter
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def replace(self, argument: str, other: str) -> None:
        """Have the next start use another argument, such as a port that this one got."""
        self._command = [other if one == argument else one for one in self._command]

    def restart(self) -> None:
        """Start the process again after it ended; its log is appended to."""
        self.kill()
        self._ready_file.unlink(missing_ok=True)
        self.process = self._spawn()

    def addresses(self) -> dict[str, Any] | None:
        """Return the content of the ready file; None before it exists."""
        try:
            content: dict[str, Any] = json.loads(self._ready_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return content

    def check(self) -> None:
        """
        Make sure that the process runs.

        Raises:
            ServiceFailed: The process ended; the line has its `last_word`.
        """
        status = self.process.poll()
        if status is None:
            return
        code = ExitCode.USAGE if status == ExitCode.USAGE else ExitCode.FAILED
        if status < 0:
            raise ServiceFailed(f"the {self.name} was killed by {signal_name(-status)}", code)
        raise ServiceFailed(f"the {self.name} ended (exit code {status}): {self.last_word()}", code)

    def stop(self, grace_s: float) -> None:
        """Ask the process to end, wait, and kill the remaining processes of its group."""
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill its whole process group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_word(self) -> str:
        """Return the last error it reported, or else logged, or else the last line it wrote."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        reasons = [line for line in lines if _REASON_LINE.match(line)]
        errors = [line for line in lines if _ERROR_LINE.search(line)]
        written = [line for line in lines if line]
        return (reasons or errors or written or [f"it wrote nothing to {self.log}"])[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """
    Plan of a server to start. The executor listens on a socket that only the scheduler can reach.

    Attributes:
        executor_arguments: Arguments of `python -m executor_svc`, with the model, without an
            address; last come ours, so that nothing else secures the link between both.
        scheduler_arguments: Arguments of `python -m scheduler_svc`, without the executor's address.
        drain_grace_s: Seconds that running requests may go on after a stop.
        start_timeout_s: Seconds within which both services must be ready.
        log_folder: Folder of the logs; None = a temporary folder, copied after a failure.
        openai_listen: HTTP address of a gateway with OpenAI's API; None = no gateway.
        gateway_arguments: Further arguments of the gateway.
    """

    executor_arguments: Sequence[str]
    scheduler_arguments: Sequence[str]
    drain_grace_s: float = 0.0
    start_timeout_s: float = 300.0
    log_folder: Path | None = None
    openai_listen: str | None = None
    gateway_arguments: Sequence[str] = ()


@dataclass(slots=True, eq=False)
class RunningServer:
    """
    A server that this process owns: its services, with a gateway as the last one if it has one,
    their addresses and their log folder. At its local address it needs no credentials.
    """

    log_folder: Path
    services: list[Service] = field(default_factory=list)
    address: str = ""
    local_address: str = ""
    executor_address: str = ""
    admin_address: str | None = None
    metrics_address: str | None = None
    openai_address: str | None = None
    _restarts_s: dict[str, list[float]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ServiceFailed if a service has ended."""
        for service in self.services:
            service.check()

    def keep_up(self, now_s: float) -> str | None:
        """
        Restart the executor or the gateway if it ended; requests wait in the scheduler for an
        executor, and a gateway listens where it did before.

        Args:
            now_s: Monotonic time in seconds.

        Returns:
            A line for the user about the restart; None = all services run.

        Raises:
            ServiceFailed: The scheduler ended, or another service over a wrong setting or model,
                or more than RESTARTS times within RESTARTS_WITHIN_S.
        """
        for service in sorted(self.services, key=lambda one: one.name in RESTARTED):
            try:
                service.check()
            except ServiceFailed as failure:
                if service.name not in RESTARTED or failure.code is ExitCode.USAGE:
                    raise
                before_s = self._restarts_s.get(service.name, [])
                recent_s = [at_s for at_s in before_s if now_s - at_s < RESTARTS_WITHIN_S]
                if len(recent_s) >= RESTARTS:
                    often = (
                        f"it was started again {RESTARTS} times in {RESTARTS_WITHIN_S:g} s before"
                    )
                    raise ServiceFailed(f"{failure.line}; {often}", failure.code) from None
                service.restart()
                self._restarts_s[service.name] = [*recent_s, now_s]
                return f"{failure.line}; starting it again"
        return None

    def stop(self, grace_s: float) -> None:
        """Stop the gateway and the scheduler, which finish their requests, then the executor."""
        try:
            for service in reversed(self.services):
                service.stop(grace_s + STOP_S)
        finally:  # a second Ctrl-C, for example
            for service in self.services:
                service.kill()


@contextlib.contextmanager
def local_server(plan: LocalServer, say: Callable[[str], None]) -> Iterator[RunningServer]:
    """
    Start all services, yield when requests are served, and stop all in any case.

    Args:
        plan: Plan of the server.
        say: Called with the name of each phase of the start, for display.

    Raises:
        ServiceFailed: A service ended or did not become ready; also raised through by the body.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_stop_signals())
        private = temporary_folder("tandem-", deepest=f"{SCHEDULER_SOCKET}.lock")
        stack.callback(shutil.rmtree, private, ignore_errors=True)
        server = RunningServer(plan.log_folder or private)
        server.log_folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(server.log_folder).free < MIN_LOG_BYTES:
            line = f"no room for logs in {server.log_folder}: choose another --log-dir"
            raise ServiceFailed(line, ExitCode.USAGE)
        stack.callback(server.stop, plan.drain_grace_s)
        _start(server, plan, private, say)
        try:
            yield server
        except ServiceFailed as failure:
            if plan.log_folder is not None:
                raise
            line = f"{failure.line}; {_kept_logs(private)}"
            raise ServiceFailed(line, failure.code) from None


def _kept_logs(folder: Path) -> str:
    """Copy the logs of a folder that will be removed; return a text on the result for the user."""
    try:
        kept = Path(tempfile.mkdtemp(prefix="tandem-logs-"))
        for log in folder.glob("*.log"):
            shutil.copy(log, kept)
    except OSError as error:
        return f"its logs could not be kept: {error.strerror}; choose a folder with --log-dir"
    return f"logs: {kept}"


def _start(
    server: RunningServer, plan: LocalServer, private: Path, say: Callable[[str], None]
) -> None:
    deadline_s = time.monotonic() + plan.start_timeout_s
    folder = server.log_folder
    for name in ("executor", "scheduler", "gateway"):
        (folder / f"{name}.json").unlink(missing_ok=True)
    # A socket in our own folder needs no search for a free port, so both start at once, and no
    # other user can reach the executor.
    executor_address = f"unix:{private / EXECUTOR_SOCKET}"
    server.executor_address = executor_address
    # The ports may ask for certificates and tokens that we do not have: our calls go here.
    server.local_address = f"unix:{private / SCHEDULER_SOCKET}"
    ours = [f"--executor={executor_address}", f"--local-listen={server.local_address}"]
    drain = f"--drain-grace-s={plan.drain_grace_s}"
    say("starting")
    executor = Service(
        "executor",
        "executor_svc",
        [f"--listen={executor_address}", *plan.executor_arguments, *plain_link("executor")],
        folder,
    )
    server.services.append(executor)
    scheduler = Service(
        "scheduler",
        "scheduler_svc",
        [*ours, drain, *plan.scheduler_arguments, *plain_link("scheduler")],
        folder,
    )
    server.services.append(scheduler)
    addresses = _wait_for(server, scheduler.addresses, scheduler, deadline_s)
    server.address = addresses["address"]
    server.admin_address = addresses.get("admin_address")
    server.metrics_address = addresses.get("metrics_address")
    say("loading the model")
    _wait_for(server, lambda: _is_ready(executor_address), executor, deadline_s)
    say("attaching the executor")
    _wait_for(server, lambda: _is_usable(server.local_address), scheduler, deadline_s)
    if plan.openai_listen is not None:
        _start_gateway(server, plan, deadline_s)


def plain_link(service: ServiceName) -> list[str]:
    """Return the flags that take everything back that was set for a link on a network."""
    files = [name for name in LINK_SECURITY[service] if name != _SWITCH]
    return [*(f"{flag_of(name)}=" for name in files), flag_of(f"no_{_SWITCH}")]


def _start_gateway(server: RunningServer, plan: LocalServer, deadline_s: float) -> None:
    arguments = [
        f"--scheduler={from_this_machine(server.address)}",
        f"--listen={plan.openai_listen}",
        f"--drain-grace-s={plan.drain_grace_s}",
        *plan.gateway_arguments,
    ]
    gateway = Service("gateway", "tandem_openai_gateway", arguments, server.log_folder)
    server.services.append(gateway)
    server.openai_address = _wait_for(server, gateway.addresses, gateway, deadline_s)["address"]
    gateway.replace(f"--listen={plan.openai_listen}", f"--listen={server.openai_address}")


def from_this_machine(address: str) -> str:
    """Return an address at which this machine reaches a server that listens on all its own."""
    for host in _ANY_HOST:
        if address.startswith(host):
            return f"127.0.0.1:{address.removeprefix(host)}"
    return address


def _is_usable(address: str) -> bool:
    """
    Return True if requests are served.

    Raises:
        ServiceFailed: The scheduler cannot use this model or executor, so it will never serve.
    """
    if _is_ready(address):
        return True
    never = why_never(address)
    if never is not None:
        raise ServiceFailed(*never)
    return False


def _is_ready(address: str) -> bool:
    try:
        return is_serving(address, "tandem.ready", timeout_s=2.0)
    except TandemError:
        return False


def _wait_for(
    server: RunningServer, condition: Callable[[], Any], service: Service, deadline_s: float
) -> Any:
    while not (outcome := condition()):
        server.check()
        if time.monotonic() > deadline_s:
            raise ServiceFailed(
                f"the {service.name} was not ready in time; it last said: {service.last_word()}"
            )
        time.sleep(POLL_S)
    return outcome


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP leave through the same clean-up as Ctrl-C; nohup is respected."""

    def leave(_number: int, _frame: object) -> None:
        raise Terminated

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
