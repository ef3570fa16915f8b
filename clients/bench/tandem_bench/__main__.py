"""`python -m tandem_bench NAME [flags]`: run one benchmark in this process."""

from __future__ import annotations

import importlib
import os
import sys

from tandem.errors import TandemError
from tandem.process.exit_codes import EXIT_DONE, EXIT_REFUSED
from tandem.process.printing_commands import run_printing
from tandem.process.process_start import refuse

COMMANDS = {
    "serve": (
        "load.command",
        "Send requests to a server from as many processes as asked; latencies, throughput.",
    ),
    "scheduler": (
        "scheduler.command",
        "Print what a decode-only step costs the scheduler; needs no server.",
    ),
    "link": (
        "link.command",
        "Print how long an executor waits for its scheduler, with steps of a fixed time.",
    ),
    "stream": (
        "stream.command",
        "Print how many tokens reach how many clients, with steps of a fixed short time.",
    ),
    "offline": (
        "offline.command",
        "Compare whole engines on this CPU: same weights, threads, requests; takes minutes.",
    ),
    "kernels": (
        "kernels.command",
        "Measure each operation on a device, and compare it with the device's limits.",
    ),
    "model": (
        "model.decode_steps",
        "Measure decode steps of models with random weights, beside the least possible.",
    ),
    "roofline": (
        "model.roofline",
        "Measure bandwidth and matrix rate; derive the least time of decode steps.",
    ),
}
"""
Module of each benchmark, whose `main` takes the flags, and its line in the help. Modules are
imported on demand, since some import PyTorch, which takes seconds.
"""
ON_A_DEVICE = frozenset({"kernels", "model", "roofline"})
"""Benchmarks that compute with PyTorch in this process."""
HELP = "usage: tandem bench NAME [flags]; NAME --help lists the flags\n\n" + "".join(
    f"  {name:<10} {summary}\n" for name, (_, summary) in COMMANDS.items()
)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the first argument names; return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    name = given[0] if given else ""
    if name == "--help":
        sys.stdout.write(HELP)
        return EXIT_DONE
    if name not in COMMANDS:
        wrong = f"bench: there is no benchmark {name!r}\n\n" if given else ""
        sys.stderr.write(wrong + HELP)
        return EXIT_REFUSED
    if name in ON_A_DEVICE:
        # As the executor does, and before PyTorch is imported.
        from executor_svc.device.idle_threads import let_idle_threads_sleep  # noqa: PLC0415

        let_idle_threads_sleep(os.environ)
    try:
        code: int = importlib.import_module(f"tandem_bench.{COMMANDS[name][0]}").main(given[1:])
    except TandemError as error:
        return refuse(error)
    return code


if __name__ == "__main__":
    sys.exit(run_printing("bench", main))
