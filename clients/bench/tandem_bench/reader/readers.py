"""Readers as processes: requests and commands go in, counts come out."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tandem.process.printing_commands import started_process
from tandem_bench.pipes import read_line, write_input
from tandem_bench.reader.counts import ReadCounts, added_up

_decode_counts = msgspec.json.Decoder(ReadCounts).decode


class ReaderFailed(Exception):
    """A reader's process ended before it was told to; its stderr says why."""


class Reader:
    """
    Streams that are being read, by one process or several.

    Attributes:
        pids: Process ids.
    """

    def __init__(
        self,
        command: Sequence[str],
        requests: Sequence[bytes],
        *,
        num_processes: int,
    ) -> None:
        """
        Open all streams; use `start_reader`.

        Raises:
            ReaderFailed: A process ended before it had its requests.
        """
        self._shares = [requests[first::num_processes] for first in range(num_processes)]
        self._processes = [
            started_process(
                lambda: subprocess.Popen(  # noqa: S603  # our own program
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            for _ in range(num_processes)
        ]
        self.pids = [process.pid for process in self._processes]
        try:
            for process, share in zip(self._processes, self._shares, strict=True):
                with _ending_told(process):
                    write_input(process, pack_requests(share))
        except BaseException:
            self.close()
            raise

    def report(self) -> ReadCounts:
        """
        Return the counts until now.

        Raises:
            ReaderFailed: A process has ended; `stall` and `resume` raise it too.
        """
        return self._ask([b"report\n"] * len(self._processes))

    def stall(self, num_streams: int) -> ReadCounts:
        """Stop reading this many streams, the last ones of each process; read on all others."""
        shares = [0] * len(self._shares)
        for index in range(num_streams):
            shares[index % len(shares)] += 1
        return self._ask([b"stall %d\n" % share for share in shares])

    def resume(self) -> ReadCounts:
        """Read the stalled streams again."""
        return self._ask([b"resume\n"] * len(self._processes))

    def close(self) -> None:
        """Close every stream and wait for the processes."""
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it ended by itself
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, commands: Sequence[bytes]) -> ReadCounts:
        for process, command in zip(self._processes, commands, strict=True):
            with _ending_told(process):
                write_input(process, command)
        reports = []
        for process in self._processes:
            with _ending_told(process):
                reports.append(_decode_counts(read_line(process)))
        return added_up(reports)


@contextlib.contextmanager
def _ending_told(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Raise ReaderFailed for the broken pipe of a process that has ended."""
    try:
        yield
    except BrokenPipeError:
        raise ReaderFailed(f"the reader ended with {process.wait()}") from None


def pack_requests(requests: Sequence[bytes]) -> bytes:
    """Encode requests as the beginning of a reader's standard input; see
    reader_process.
    """
    parts = [struct.pack("<I", len(requests))]
    for request in requests:
        parts += [struct.pack("<I", len(request)), request]
    return b"".join(parts)


def start_reader(
    address: str,
    requests: Sequence[bytes],
    *,
    connections: int = 4,
    num_processes: int | None = None,
    ca: Path | None = None,
) -> Reader:
    """
    Open a Generate stream per request, all at once, and count what comes.

    Args:
        address: host:port or unix:path of a public service.
        requests: Serialized GenerateRequests.
        connections: HTTP/2 connections per process; stream i is on connection i modulo this.
        num_processes: Number of processes that share the streams; by default one per two cores.
        ca: File of the certificates that sign the service's; None = plain text.

    Raises:
        ReaderFailed: A process ended before it had its requests.
    """
    num_processes = num_processes or max(1, (os.cpu_count() or 1) // 2)
    return Reader(
        [
            *(sys.executable, "-m", "tandem_bench.reader.reader_process"),
            *(address, str(connections)),
            *([] if ca is None else [f"ca={ca}"]),
        ],
        requests,
        num_processes=min(num_processes, max(1, len(requests))),
    )
