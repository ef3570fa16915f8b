"""Executor, scheduler and gateway as child processes that never outlive their command."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tandem.errors import TandemError
from tandem.process.temporary import temporary_folder
from tandem.settings.options import ServiceName, flag_of
from tandem_client.admin import AdminClient, is_serving
from tandem_client.admin.executors import ExecutorState
from tandem_client.cli.local_server.service import Service, ServiceFailed
from tandem_client.cli.shared.failures import ExitCode
from tandem_client.cli.shared.never_ready import why_never
from tandem_client.cli.shared.stop_signals import stop_signals
from tandem_client.streams.retry import NO_RETRY

POLL_S = 0.05
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """
    Plan of a server to start. Executors listen on sockets that only the scheduler can reach.

    Attributes:
        executor_arguments: Arguments of `python -m executor_svc`, with the model, without an
            address; last come ours, so that nothing else secures the link between both.
        executor_shares: Further arguments of each executor, which give it its share of the machine;
            as many executors are started, one at least.
        scheduler_arguments: Arguments of `python -m scheduler_svc`, without the executor's address.
        drain_grace_s: Seconds that running requests may go on after a stop.
        start_timeout_s: Seconds within which all services must be ready.
        log_folder: Folder of the logs; None = a temporary folder, copied after a failure.
        openai_listen: HTTP address of a gateway with OpenAI's API; None = no gateway.
        gateway_arguments: Further arguments of the gateway.
    """

    executor_arguments: Sequence[str]
    scheduler_arguments: Sequence[str]
    executor_shares: Sequence[Sequence[str]] = ((),)
    drain_grace_s: float = 0.0
    start_timeout_s: float = 300.0
    log_folder: Path | None = None
    openai_listen: str | None = None
    gateway_arguments: Sequence[str] = ()

    @property
    def numbers(self) -> Sequence[int]:
        """Number of each executor; one alone has the number 0."""
        num_executors = len(self.executor_shares)
        return range(1, num_executors + 1) if num_executors > 1 else (0,)


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
    executor_addresses: Sequence[str] = ()
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
        Restart an executor or the gateway if it ended; requests wait in the scheduler for an
        executor, or go on at another, and a gateway listens where it did before.

        Args:
            now_s: Monotonic time in seconds.

        Returns:
            A line for the user about the restart; None = all services run.

        Raises:
            ServiceFailed: The scheduler ended, or another service over a wrong setting or model,
                or more than RESTARTS times within RESTARTS_WITHIN_S.
        """
        for service in sorted(self.services, key=lambda one: one.program in RESTARTED):
            try:
                service.check()
            except ServiceFailed as failure:
                if service.program not in RESTARTED or failure.code is ExitCode.USAGE:
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
        """
        Stop the gateway and the scheduler, which finish their requests, then all executors at once.

        Args:
            grace_s: Seconds that running requests have, besides the STOP_S of every process.
        """
        executors = [one for one in self.services if one.program == "executor"]
        try:
            for service in reversed(self.services):
                if service not in executors:
                    _stop_together([service], grace_s + STOP_S)
            _stop_together(executors, grace_s + STOP_S)
        finally:  # a second Ctrl-C, for example
            for service in self.services:
                service.kill()


def _stop_together(services: Sequence[Service], limit_s: float) -> None:
    """Ask services to end, once: a second request would break them off; kill them after a limit."""
    for service in services:
        service.ask_to_end()
    end_s = time.monotonic() + limit_s
    for service in services:
        service.wait_or_kill(max(0.0, end_s - time.monotonic()))


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
        stack.enter_context(stop_signals())
        sockets = [SCHEDULER_SOCKET, *(_executor_socket(number) for number in plan.numbers)]
        private = temporary_folder("tandem-", deepest=f"{max(sockets, key=len)}.lock")
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
    say("starting")
    executors = _start_executors(server, plan, private)
    # The ports may ask for certificates and tokens that we do not have: our calls go here.
    server.local_address = f"unix:{private / SCHEDULER_SOCKET}"
    scheduler = Service(
        "scheduler",
        "scheduler_svc",
        [
            f"--executor={','.join(server.executor_addresses)}",
            f"--local-listen={server.local_address}",
            f"--drain-grace-s={plan.drain_grace_s}",
            *plan.scheduler_arguments,
            *plain_link("scheduler"),
        ],
        server.log_folder,
    )
    server.services.append(scheduler)
    addresses = _wait_for(server, scheduler.addresses, scheduler, deadline_s)
    server.address = addresses["address"]
    server.admin_address = addresses.get("admin_address")
    server.metrics_address = addresses.get("metrics_address")
    say("loading the model")
    for executor, address in zip(executors, server.executor_addresses, strict=True):
        _wait_for(server, partial(_is_ready, address), executor, deadline_s)
    say("attaching the executor" if len(executors) == 1 else "attaching the executors")
    _wait_for(server, lambda: _is_usable(server.local_address), scheduler, deadline_s)
    if len(executors) > 1:
        _wait_for(server, lambda: _all_serve(server.local_address), scheduler, deadline_s)
    if plan.openai_listen is not None:
        _start_gateway(server, plan, deadline_s)


def _start_executors(server: RunningServer, plan: LocalServer, private: Path) -> list[Service]:
    # A socket in our own folder needs no search for a free port, so all services start at once,
    # and no other user can reach an executor.
    sockets = [private / _executor_socket(number) for number in plan.numbers]
    server.executor_addresses = [f"unix:{socket}" for socket in sockets]
    executors = []
    for number, address, share in zip(
        plan.numbers, server.executor_addresses, plan.executor_shares, strict=True
    ):
        listen = f"--listen={address}"
        arguments = [listen, *plan.executor_arguments, *share, *plain_link("executor")]
        executor = Service("executor", "executor_svc", arguments, server.log_folder, number)
        server.services.append(executor)  # each at once, so that it is stopped in any case
        executors.append(executor)
    return executors


def _executor_socket(number: int) -> str:
    return f"executor-{number}.sock" if number else "executor.sock"


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


def _all_serve(address: str) -> bool:
    """
    Return True if every executor serves.

    Raises:
        ServiceFailed: The scheduler cannot use one of them beside the others.
    """
    try:
        with AdminClient(address, retry=NO_RETRY) as admin:
            executors = admin.executors(deadline_s=2.0)
    except TandemError:
        return False
    for one in executors:
        if one.state is ExecutorState.REFUSED:
            raise ServiceFailed(f"executor {one.address} is not used: {one.why}", ExitCode.USAGE)
    return all(one.state is ExecutorState.SERVING for one in executors)


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
