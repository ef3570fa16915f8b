"""The ranks that rank 0 starts on its own machine, which never outlive it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from executor_svc.ranks.place import LOOPBACK, PARENT_VARIABLE, RankPlace
from tandem.errors import InternalError
from tandem.process.exit_codes import EXIT_FAILED
from tandem.process.parent import die_with_parent


@dataclass(slots=True, eq=False)
class Children:
    """
    Processes that rank 0 started.

    Attributes:
        meeting: Socket of the store in which the ranks meet; it listens already, so that they may
            connect before this process has imported what serves it.
        processes: The processes by rank.
    """

    meeting: socket.socket
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def port(self) -> int:
        """Port where the ranks meet."""
        return int(self.meeting.getsockname()[1])

    def check(self) -> None:
        """
        Check that they all run.

        Raises:
            InternalError: One has ended.
        """
        for rank, process in self.processes.items():
            if (code := process.poll()) is not None:
                raise InternalError(
                    f"rank {rank} of the model ended with exit code {code} while it started"
                )


def start_children(place: RankPlace, argv: Sequence[str], environ: Mapping[str, str]) -> Children:
    """
    Start the other ranks with our flags, told by the variables of torchrun which they are.

    The main thread calls it: the kernel kills them once the thread that started them is gone.

    Args:
        place: Our own place.
        argv: Our command line, without the program.
        environ: Our environment.

    Raises:
        OSError: No process can be started.
    """
    children = Children(socket.create_server((LOOPBACK, 0), backlog=place.size))
    told = {
        "WORLD_SIZE": str(place.size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(children.port),
        PARENT_VARIABLE: str(os.getpid()),
    }
    for rank in range(1, place.size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        children.processes[rank] = subprocess.Popen(  # noqa: S603  # our own interpreter
            [sys.executable, "-m", "executor_svc", *argv],
            env={**environ, **told, **own},
            stdin=subprocess.DEVNULL,
            # Out of reach of Ctrl-C: rank 0 finishes its step first, which takes all ranks.
            process_group=0,
        )
    return children


def end_with(parent: int) -> None:
    """
    Have the kernel kill this process once its parent is gone, whatever it does then. Where that is
    not Linux, it ends when its connection to rank 0 does.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with rank 0
    die_with_parent()
    if os.getppid() != parent:  # it was gone before
        os._exit(EXIT_FAILED)


def kill_parent(parent: int) -> None:
    """
    Kill the rank 0 that started this process; it is silent, and would stay so while it is stopped.
    """
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
