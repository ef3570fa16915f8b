"""`tandem bench`: measurements, each by a program of its own in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType

import typer

from tandem.process.printing_commands import started_process
from tandem_client.cli.shared.failures import fail, signal_name
from tandem_client.cli.shared.help_texts import PASS_ON

COMMANDS = {
    "serve": "Send requests to a server from as many processes as asked; latencies, throughput.",
    "scheduler": "Print what a decode-only step costs the scheduler; needs no server.",
    "link": "Print how long an executor waits for its scheduler, with steps of a fixed time.",
    "stream": "Print how many tokens reach how many clients, with steps of a fixed short time.",
    "offline": "Compare whole engines on this CPU: same weights, threads, requests; takes minutes.",
    "kernels": "Measure each operation on a device, and compare it with the device's limits.",
    "model": "Measure decode steps of models with random weights, beside the least possible.",
    "roofline": "Measure bandwidth and matrix rate; derive the least time of decode steps.",
}
"""Benchmarks of the package `tandem_bench`, which reads their options, `--help` too."""

bench = typer.Typer(help="Measure a running server, or its parts alone.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    pass


def _passing_on(name: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        run_bench([name, *context.args])

    return command


for _name, _summary in COMMANDS.items():
    bench.command(_name, help=_summary, context_settings=PASS_ON)(_passing_on(_name))


def run_bench(arguments: list[str]) -> None:
    """
    Measure in a process of its own: clients never import services, and benchmarks do.

    The process writes to our output itself, so that Ctrl-C loses none of the printed text.
    """
    command = [sys.executable, "-m", "tandem_bench", *arguments]
    # A SIGTERM for this command alone must end the benchmark with all its processes.
    before = signal.signal(signal.SIGTERM, _end)
    process = None
    try:
        process = started_process(
            lambda: subprocess.Popen(command)  # noqa: S603  # our own interpreter
        )
        try:
            process.wait()
        except (KeyboardInterrupt, SystemExit):
            process.terminate()
            process.wait()  # it prints what it has measured until then
            raise
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, before)
    if process.returncode < 0:
        raise fail(f"bench {arguments[0]} was killed by {signal_name(-process.returncode)}")
    if process.returncode:  # it has said why
        raise typer.Exit(process.returncode)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
