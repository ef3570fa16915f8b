"""
`tandem bench roofline [flags]`: a device's ceilings, and the least time of decode steps with them.

The ceilings are the bandwidth of a copy within the device's memory and the rate of a large matrix
product; they are measured, unless --tb-per-s and --tflop-per-s give them. The least time of a step
follows from them and from the sizes of known models; no step is run. It is the time to read the
weights once, or to multiply by them if that takes longer, plus the time to read the rows' keys and
values.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from tandem_bench.command_line import BenchParser, above_zero, at_least_one, print_line
from tandem_bench.device.case import significant
from tandem_bench.device.ceilings import measure_ceilings
from tandem_bench.device.floors import Ceilings, step_floor
from tandem_bench.device.options import Table, chosen, parser, place
from tandem_bench.device.shapes import SHAPES
from tandem_bench.device.timing import timer_of

BATCHES = {False: (1, 32, 128, 256), True: (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)}
CONTEXTS = {False: (1024, 4096), True: (256, 1024, 4096, 16384, 65536)}
"""Positions of each row, like the rows above by whether `--full` was asked for."""
_BUDGET_S = 1.0
"""Seconds for each of the two ceilings, about."""

_HEADINGS = (
    ("model", -12),
    ("context", 8),
    ("rows", 6),
    ("weights ms", 11),
    ("KV ms", 9),
    ("step ms", 9),
    ("tokens/s", 10),
)

Row = dict[str, str | int | float]


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Measure and print; return the exit code.

    Raises:
        InvalidConfig: There is no such device, number type or model.
    """
    given = _parser().parse_args(arguments)
    names = chosen(given.model, SHAPES, "model")
    where = place(given, attends=False)
    ceilings = _ceilings(given, where.device, where.dtype)
    rows = floor_rows(
        names,
        given.batch or BATCHES[given.full],
        given.context or CONTEXTS[given.full],
        where.dtype.itemsize,
        ceilings,
    )
    if given.json:
        first: Row = {
            "bytes_per_s": round(ceilings.bytes_per_s),
            "flop_per_s": round(ceilings.flop_per_s),
        }
        print_line(json.dumps([first, *rows]))
        return 0
    print_line(where.text)
    print_line(f"copy    {ceilings.bytes_per_s / 1e9:12.1f} GB/s")
    print_line(f"matmul  {ceilings.flop_per_s / 1e12:12.3f} TFLOP/s")
    table = Table(_HEADINGS)
    for row in rows:
        table.row(
            [
                str(row["model"]),
                str(row["context"]),
                str(row["rows"]),
                *(f"{row[key]:.3f}" for key in ("weights_ms", "kv_ms", "step_ms")),
                f"{row['tokens_per_s']:.0f}",
            ]
        )
    return 0


def floor_rows(
    names: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    itemsize: int,
    ceilings: Ceilings,
) -> list[Row]:
    """Compute a row per model, context and batch: least times of a decode step, milliseconds."""
    rows: list[Row] = []
    for name in names:
        for context in contexts:
            for num_rows in batches:
                floor = step_floor(SHAPES[name], itemsize, ceilings, [context] * num_rows)
                rows.append(
                    {
                        "model": name,
                        "context": context,
                        "rows": num_rows,
                        "weights_ms": significant(1e3 * floor.weights_s),
                        "kv_ms": significant(1e3 * floor.kv_s),
                        "step_ms": significant(1e3 * floor.total_s),
                        "tokens_per_s": significant(num_rows / floor.total_s),
                    }
                )
    return rows


def _ceilings(given: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return the given ceilings, and measured ones in place of those not given."""
    if given.tb_per_s is None or given.tflop_per_s is None:
        measured = measure_ceilings(device, dtype, timer_of(device), _BUDGET_S)
    else:
        measured = Ceilings(bytes_per_s=0.0, flop_per_s=0.0)
    return Ceilings(
        bytes_per_s=measured.bytes_per_s if given.tb_per_s is None else 1e12 * given.tb_per_s,
        flop_per_s=measured.flop_per_s if given.tflop_per_s is None else 1e12 * given.tflop_per_s,
    )


def _parser() -> BenchParser:
    made = parser("roofline", __doc__)
    made.add_list("--model", help=f"models: {', '.join(SHAPES)}; default: all")
    made.add_list(
        "--batch",
        type=at_least_one,
        help="rows of a step; default: 1, 32, 128 and 256, more with --full",
    )
    made.add_list(
        "--context",
        type=at_least_one,
        help="positions of each row; default: 1024 and 4096, more with --full",
    )
    made.add_argument(
        "--tb-per-s", type=above_zero, help="memory bandwidth in TB/s; default: measured"
    )
    made.add_argument(
        "--tflop-per-s", type=above_zero, help="matrix rate in TFLOP/s; default: measured"
    )
    return made
