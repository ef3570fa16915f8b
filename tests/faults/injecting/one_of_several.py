"""The actions that do each kind of fault to one of several executors that serve together."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tandem_client import NO_RETRY, AdminClient, ExecutorState
from tandem_client.errors import TandemError
from tests.faults.injecting.target import Target
from tests.faults.processes.executors import Executor
from tests.faults.schedule import Fault, Kind
from tests.waiting import wait_until

LEAST_LEFT = 2
"""Number of other executors that must serve when one is struck."""


def _one(fault: Fault, target: Target) -> tuple[Executor, str]:
    """Wait until enough others serve; return the executor to strike, and its address."""
    rig = target.rig
    place = fault.draw % len(rig.executors)
    address = rig.executor_addresses()[place]
    wait_until(
        lambda: len(_serving(target) - {address}) >= LEAST_LEFT, "enough executors that serve"
    )
    return rig.executors[place], address


def _serving(target: Target) -> set[str]:
    """Return the addresses of the executors that serve."""
    try:
        with AdminClient(target.rig.admin_address, retry=NO_RETRY) as admin:
            rows = admin.executors()
    except TandemError:
        return set()
    return {row.address for row in rows if row.state is ExecutorState.SERVING}


def _kill(fault: Fault, target: Target) -> None:
    """Kill an executor, whatever it does: it may be computing, starting or attaching."""
    executor, _ = _one(fault, target)
    executor.signal(signal.SIGKILL)


def _tell_to_stop(fault: Fault, target: Target) -> None:
    executor, _ = _one(fault, target)
    executor.signal(signal.SIGTERM)


def _stop(fault: Fault, target: Target) -> None:
    """Stop an executor until its requests have moved; then let it go on, with results of old."""
    executor, address = _one(fault, target)
    num_losses = target.rig.stats().executor_losses
    wait_until(lambda: address in _serving(target), "the executor that is to be stopped")
    executor.signal(signal.SIGSTOP)
    wait_until(lambda: target.rig.stats().executor_losses > num_losses, "its requests to move")
    executor.signal(signal.SIGCONT)


def _drain(fault: Fault, target: Target) -> None:
    """Drain an executor with some grace, replace its process and add it again."""
    executor, address = _one(fault, target)
    with AdminClient(target.rig.admin_address) as admin:
        admin.drain_executor(address, grace_s=0.2)
        executor.signal(signal.SIGKILL)
        admin.add_executor(address)


def _remove(fault: Fault, target: Target) -> None:
    """Remove an executor from among those that serve, and add it again."""
    _, address = _one(fault, target)
    with AdminClient(target.rig.admin_address) as admin:
        admin.remove_executor(address)
        admin.add_executor(address)


FLEET_ACTIONS: dict[Kind, Callable[[Fault, Target], None]] = {
    Kind.ONE_KILLED: _kill,
    Kind.ONE_STOPPED: _stop,
    Kind.ONE_TOLD_TO_STOP: _tell_to_stop,
    Kind.ONE_DRAINED: _drain,
    Kind.ONE_REMOVED: _remove,
}
"""Action of each kind."""
