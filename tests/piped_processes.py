"""Processes that answer what a test asks through their pipes, in order, or tell what failed."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

PRELOADED = ["executor_svc.engine", "torch.distributed"]
"""Modules that are imported once, by the process that all others are forked from; it takes seconds."""


class PipedProcesses:
    """Processes of one test, or of many."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._processes: list[BaseProcess] = []

    def start(self, main: Callable[..., None], *args: object) -> Connection:
        """Start a process that runs a module's function with its pipe; returns the other end."""
        here, there = self._context.Pipe()
        process = self._context.Process(target=main, args=(there, *args), daemon=True)
        process.start()
        there.close()
        self._processes.append(process)
        return here

    def stop(self) -> None:
        """End all processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []


def serve(pipe: Connection, answer: Callable[..., Any]) -> None:
    """Answer what the test sends, a tuple of arguments each time, until its end is closed."""
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        try:
            found = answer(*asked)
        except Exception:  # noqa: BLE001  # the test reports it
            tell(pipe, None, traceback.format_exc())
        else:
            tell(pipe, found)


def tell(pipe: Connection, answer: Any, error: str | None = None) -> None:
    """Send the test an answer, or the text of an error."""
    pipe.send((answer, error))


def answers(pipes: Sequence[Connection], timeout_s: float, *, num_each: int = 1) -> list[Any]:
    """
    Return the last of so many answers of each process, in the order of the pipes. The first error
    fails the test at once, as other processes may wait for the one that has it.
    """
    left = dict.fromkeys(pipes, num_each)
    found: dict[Connection, Any] = {}
    while left:
        ready = [pipe for pipe in connection.wait(left, timeout_s) if isinstance(pipe, Connection)]
        assert ready, f"{len(left)} of {len(pipes)} processes do not answer"
        for pipe in ready:
            found[pipe], error = pipe.recv()
            assert error is None, error
            left[pipe] -= 1
            if not left[pipe]:
                del left[pipe]
    return [found[pipe] for pipe in pipes]
