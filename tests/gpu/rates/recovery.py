"""
`python -m tests.gpu.rates.recovery`: an executor that is killed again and again under streams of its clients. Prints a JSON list: a
row for each kill, and one that compares all tokens with those of an undisturbed run.

A kill is SIGKILL; the next executor is started at once. Executors are batch invariant, so that tokens must be equal whatever was
computed again. Without a GPU the device's memory is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tandem.process.printing_commands import end_by_signals
from tandem_bench.device.json_rows import JsonRows
from tests.gpu.rates.device_memory import TOLERANCE_BYTES, DeviceMemory, first_with
from tests.gpu.rates.live_streams import LiveStreams, num_different, went_on_s
from tests.gpu.rates.offline import write_model
from tests.gpu.rates.services import Services, services_parser

_LONGEST_PROMPT = 256
_MAX_TOKENS = 4096
"""Tokens of a stream that is not left: far more than come between a few kills."""
_PATIENCE = ("--recovery-timeout-s=600", "--lost-after-s=600")
"""Timeouts that no start of an executor reaches: what is measured is how long it takes."""


def main() -> int:
    """Measure and print; 1 if a stream failed or has other tokens."""
    given = _parser().parse_args()
    ends_s = time.monotonic() + given.limit_s
    model = write_model(given.models, tiny=given.tiny)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        rows = stack.enter_context(JsonRows())
        memory = None if given.device == "cpu" else stack.enter_context(DeviceMemory())
        free_bytes = 0 if memory is None else memory.free_bytes
        services = stack.enter_context(
            Services(
                folder,
                model,
                given.device,
                rows=given.streams,
                longest=_LONGEST_PROMPT + _MAX_TOKENS,
                executor=["--batch-invariant"],
                scheduler=_PATIENCE,
            )
        )
        streams = LiveStreams(services.address, [_MAX_TOKENS] * given.streams)
        streams.wait_for_more(given.tokens)
        num_kills = 0
        while num_kills < given.kills and (not num_kills or time.monotonic() < ends_s):
            num_kills += 1
            rows.add({"kill": num_kills, **_kill(services, streams, memory, free_bytes, given)})
        row = _compare(services, streams, num_kills)
        rows.add(row)
    return 1 if row["failed"] or row["different"] else 0


def _kill(
    services: Services,
    streams: LiveStreams,
    memory: DeviceMemory | None,
    free_bytes: int,
    given: argparse.Namespace,
) -> dict[str, Any]:
    """Kill the executor, start another, and wait until all streams go on."""
    held_gb = None if memory is None else (free_bytes - memory.free_bytes) / 1e9
    killed_s = time.monotonic()
    services.executor.kill()
    gone_s = time.monotonic() - killed_s
    services.start_executor()
    listens_s = time.monotonic() - killed_s
    streams.wait_for_more(given.tokens)
    times = [went_on_s(stream.came_s, killed_s) for stream in streams.streams]
    went_on = [seconds for seconds in times if seconds is not None]
    back = None
    if memory is not None:
        back = first_with(memory.looks, free_bytes - TOLERANCE_BYTES, since_s=killed_s)
    return {
        "process_gone_s": gone_s,
        "device_gb_held": held_gb,
        "memory_back_s": None if back is None else back.at_s - killed_s,
        "next_listens_s": listens_s,
        "first_goes_on_s": min(went_on, default=None),
        "all_go_on_s": max(went_on) if len(went_on) == len(times) else None,
        "streams": len(times),
        "failed": streams.num_failed,
    }


def _compare(services: Services, streams: LiveStreams, num_kills: int) -> dict[str, Any]:
    """Leave the streams, have the same ones run undisturbed, and compare their tokens."""
    found = streams.leave()
    for problem in sorted({stream.problem for stream in found if stream.problem}):
        sys.stderr.write(f"{problem}\n")
    expected = LiveStreams(services.address, [max(1, len(each.tokens)) for each in found]).finish()
    return {
        "kills": num_kills,
        "streams": len(found),
        "compared_tokens": sum(len(stream.tokens) for stream in found),
        "different": num_different(found, expected),
        "failed": streams.num_failed,
    }


def _parser() -> argparse.ArgumentParser:
    parser = services_parser(__doc__)
    parser.add_argument("--streams", type=int, default=16, help="requests that run")
    parser.add_argument("--kills", type=int, default=5, help="most kills")
    parser.add_argument("--tokens", type=int, default=32, help="of each stream between kills")
    parser.add_argument(
        "--limit-s", type=float, default=100.0, help="time after which there is no further kill"
    )
    return parser


if __name__ == "__main__":
    end_by_signals()  # so that what it started is ended too
    sys.exit(main())
