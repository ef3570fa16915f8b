"""
`python -m tests.gpu.rates.sweep`: the tunings of Triton's kernels, timed, and the tables that
follow.

Every candidate is compiled for sm_90 first, by processes ahead of the measurement; those that spill
registers or do not fit are dropped. The others are compared with the kernel's definition, for each
model and kind of work that the entry is timed at, and then timed from captured graphs, on operands
that are in no cache. Rows are printed as they are found, in one JSON list: `compiled`, `time`, and
for each entry of a table `best`. There are about 1,340 measurements of 0.2 s each and 720 checks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests.gpu.parts import EXIT_NO_DEVICE

LIMIT_S = 400.0
OPERATIONS = (
    *("decode", "prefill_long", "prefill_short", "prefill_invariant"),
    *("linear", "sampling"),
)


def main(arguments: list[str] | None = None) -> int:
    """Sweep and print; return the exit code."""
    given = _parser().parse_args(arguments)
    started_s = time.monotonic()
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch  # noqa: PLC0415  # after the mode of Triton is chosen

    if given.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("sweep: no CUDA device was found; --device cpu --tiny tries it without\n")
        return EXIT_NO_DEVICE
    return _sweep(given, started_s)


def _sweep(given: argparse.Namespace, started_s: float) -> int:
    """Sweep as the options say, print, and return the exit code."""
    import torch  # noqa: PLC0415  # after the mode of Triton is chosen, like the rest

    from tandem.process.telemetry import configure_logging  # noqa: PLC0415  # likewise
    from tandem_bench.device.json_rows import JsonRows  # noqa: PLC0415
    from tests.gpu.rates.sweep.compiling import Compiling  # noqa: PLC0415
    from tests.gpu.rates.sweep.points import POINTS, TINY  # noqa: PLC0415
    from tests.gpu.rates.sweep.run import Options, Sweep  # noqa: PLC0415
    from tests.gpu.rates.sweep.tables import sources  # noqa: PLC0415
    from tests.gpu.rates.sweep.work import Place  # noqa: PLC0415

    configure_logging("warning", "console")
    all_points = TINY if given.tiny else POINTS
    points = {
        key: shapes
        for key, shapes in all_points.items()
        if not given.operation or key.operation in given.operation
    }
    # The interpreter cannot multiply bfloat16; both types have the same entries.
    dtype = torch.float16 if given.device == "cpu" and not given.compile_only else torch.bfloat16
    options = Options(
        budget_s=given.seconds,
        deadline_s=started_s + given.limit_s,
        most=given.most,
        most_copies=64 if given.device != "cpu" else 1,  # the interpreter uses no cache's speed
        compiles_only=given.compile_only,
    )
    compiling = Compiling(given.processes, str(dtype).removeprefix("torch."))
    try:
        with JsonRows() as rows:
            place = Place(torch.device(given.device), dtype)
            winners = Sweep(place, compiling, options, rows.add).run(points)
    finally:
        compiling.close()
    if given.write is not None:
        text = sources(winners) + "\n"
        if given.write == "-":
            sys.stdout.write(text)
        else:
            Path(given.write).write_text(text)
    return 0 if winners or given.compile_only else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.rates.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for Triton's interpreter")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for the interpreter")
    parser.add_argument(
        "--operation",
        nargs="+",
        choices=OPERATIONS,
        help="only these",
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="when nothing more begins")
    parser.add_argument("--seconds", type=float, default=0.05, help="for one measurement, about")
    parser.add_argument("--most", type=int, help="candidates of a round beside the present entry")
    parser.add_argument("--compile-only", action="store_true", help="neither check nor time")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile")
    parser.add_argument(
        "--write", metavar="PATH", help="file for the tables as Python source; - prints them"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
