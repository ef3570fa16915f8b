"""`python -m tandem_bench NAME [flags]`: run one benchmark in this process."""

from __future__ import annotations

import importlib
import os
import sys

from tandem.errors import TandemError
from tandem.process.printing_commands import run_printing
from tandem.process.process_start import refuse

COMMANDS = {
    "serve": "tandem_bench.load.command",
    "scheduler": "tandem_bench.scheduler.command",
    "link": "tandem_bench.link.command",
    "stream": "tandem_bench.stream.command",
    "kernels": "tandem_bench.kernels.command",
    "model": "tandem_bench.model.decode_steps",
    "roofline": "tandem_bench.model.roofline",
    "offline": "tandem_bench.offline.command",
}
"""
Module of each benchmark; its `main` takes the flags. Modules are imported on demand, since some
import PyTorch, which takes seconds.
"""
ON_A_DEVICE = frozenset({"kernels", "model", "roofline"})
"""Benchmarks that compute with PyTorch in this process."""
_EXIT_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the first argument names; return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    name = given[0] if given else ""
    if name not in COMMANDS:
        sys.stderr.write(f"usage: python -m tandem_bench {'|'.join(COMMANDS)} [flags]\n")
        return _EXIT_USAGE
    if name in ON_A_DEVICE:
        # As the executor does, and before PyTorch is imported.
        from executor_svc.device.idle_threads import let_idle_threads_sleep  # noqa: PLC0415

        let_idle_threads_sleep(os.environ)
    try:
        code: int = importlib.import_module(COMMANDS[name]).main(given[1:])
    except TandemError as error:
        return refuse(error)
    return code


if __name__ == "__main__":
    sys.exit(run_printing("bench", main))
