"""
Core process without frontends, for the benchmark of the step link.

It runs the service's own loop, session and link on requests that are made here; their outputs are
encoded and dropped. It prints one line, `steady`, once as many requests decode as one executor has
rows, and ends when its input is closed, also before that.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from scheduler_svc.ipc.messages import (
    CoreMessage,
    FrontendMessage,
    Hello,
    Model,
    Update,
    encode,
)
from scheduler_svc.ipc.sockets import CoreSocket
from scheduler_svc.service.wakeup import Wakeup
from tandem.network.grpc_polling import poll_where_waited
from tandem.process.printing_commands import end_by_signals
from tandem.process.telemetry import configure_logging
from tandem_bench.link.requests import submits


class SilentSocket:
    """Socket in place of the frontends': delivers messages that are put, drops those it sends."""

    def __init__(self, rows: int) -> None:
        self.is_steady = threading.Event()
        self.has_model = threading.Event()
        self._full_bytes = 4 * rows
        self._waiting: deque[FrontendMessage] = deque()
        self._wakeup = Wakeup()

    def fileno(self) -> int:
        """Return the descriptor for a poller."""
        return self._wakeup.fileno()

    @property
    def has_messages(self) -> bool:
        """True when a message was put and not yet received."""
        return bool(self._waiting)

    def put(self, message: FrontendMessage) -> None:
        """Add a message for the core; any thread may call."""
        self._waiting.append(message)
        self._wakeup.set()

    def receive(self, at_most: int) -> Iterator[tuple[int, FrontendMessage]]:
        """Yield at most `at_most` messages that were put, each with frontend 0."""
        self._wakeup.clear()
        for _ in range(min(at_most, len(self._waiting))):
            yield 0, self._waiting.popleft()
        if self._waiting:
            self._wakeup.set()

    def try_send(self, _index: int, message: CoreMessage) -> bool:
        """Encode a message as the real socket does, and drop it."""
        encode(message)
        if isinstance(message, Update):
            if len(message.token) >= self._full_bytes and not self.is_steady.is_set():
                self.is_steady.set()
        elif isinstance(message, Model):
            self.has_model.set()
        return True

    def close(self) -> None:
        """Release the descriptor."""
        self._wakeup.close()


def main() -> int:
    """Run until the input is closed."""
    end_by_signals()
    given = _parser().parse_args()
    configure_logging("error", "console")
    poll_where_waited(os.environ)  # as the service does
    _serve(given)
    return 0


def _serve(given: argparse.Namespace) -> None:
    from tandem_bench.link.service import make_loop  # noqa: PLC0415  # this imports gRPC

    socket = SilentSocket(given.rows)
    num_executors = len(given.executor.split(","))
    loop = make_loop(
        given.executor,
        cast("CoreSocket", socket),
        given.directory,
        window=given.window,
        run_ahead=given.run_ahead,
        rows=given.rows * num_executors,
    )
    core = threading.Thread(target=loop.run, name="core", daemon=True)
    core.start()
    # Not on this thread, which has to notice the end of the input at any time.
    submit = threading.Thread(
        target=_submit, args=(socket, given.rows, num_executors), name="submit", daemon=True
    )
    submit.start()
    try:
        sys.stdin.read()
    finally:
        loop.stop(0.0)
        core.join(5.0)
        loop.stop_links(release=True)


def _submit(socket: SilentSocket, rows: int, executors: int) -> None:
    """Submit all requests, wait until every one of an executor decodes, and print `steady`."""
    socket.put(Hello(0, 0))
    socket.has_model.wait()
    for message in submits(rows, executors):
        socket.put(message)
    socket.is_steady.wait()
    sys.stdout.write("steady\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tandem_bench.link.worker")
    parser.add_argument("--executor", required=True, help="addresses of the executors")
    parser.add_argument(
        "--directory", type=Path, required=True, help="directory for tokenizer files"
    )
    parser.add_argument("--rows", type=int, required=True, help="requests that decode on each")
    parser.add_argument("--window", type=int, required=True, help="steps in flight")
    parser.add_argument(
        "--run-ahead", type=int, required=True, help="steps in flight while no request waits"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
