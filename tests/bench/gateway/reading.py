"""Reader's process of a measured turn, and the CPU time of the processes that serve it."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.e2e.cluster import ROOT, Process, environment


def cpu_s(process: Process) -> float:
    """Return the CPU time of a process and its children so far."""
    times = [member.cpu_times() for member in process.family()]
    return sum(one.user + one.system for one in times)


def read(way: str, address: str, streams: int, tokens: int) -> dict[str, float]:
    """
    Read so many streams at once in a process of its own, which decodes nothing while it takes time.

    Args:
        way: "http" or "grpc".
        address: Host and port.
        streams: Number of streams.
        tokens: Tokens of each.

    Returns:
        `took_s`, `cpu_s` of the reader, and `messages`, the number of deltas.
    """
    command = [sys.executable, "-m", "tests.bench.gateway.raw_reader", way, address]
    command += [str(streams), str(tokens)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found
