"""
`tandem bench model [flags]`: decode steps of models with random weights, and their least time.

Models of known sizes are decoded greedily by the executor's own runner, in this process, over a KV
cache of random numbers; there is no scheduler, no server and no tokenizer. The time of a step is
compared with its floor, which is that of `tandem bench roofline` for a bandwidth and a matrix rate
measured in the same run. On a GPU a captured graph is replayed, unless --eager is given;
--beside-eager measures steps of some numbers of rows both ways, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from executor_svc.device.out_of_memory import is_out_of_memory
from executor_svc.model.loader import LoadedModel
from executor_svc.step.graphs.capture import GraphDevice
from executor_svc.step.graphs.cuda import CudaGraphs
from tandem.errors import OutOfMemory
from tandem_bench.command_line import BenchParser, at_least_one, print_line, time_above_zero
from tandem_bench.device.case import significant
from tandem_bench.device.ceilings import measure_ceilings
from tandem_bench.device.floors import Ceilings, step_floor
from tandem_bench.device.json_rows import JsonRows
from tandem_bench.device.options import (
    Table,
    Where,
    add_block_size,
    chosen,
    complain,
    parser,
    place,
    time_limit_s,
)
from tandem_bench.device.shapes import SHAPES
from tandem_bench.device.timing import timer_of
from tandem_bench.model.random_model import forget_memory, random_model
from tandem_bench.model.steady_decode import StepTimes, measure_steps

TIME_LIMIT_S = 33.0
"""Seconds after which no measurement begins, without --full and --time-limit."""
_CEILING_S = 0.5
"""Seconds for each of the two ceilings, at most."""

_HEADINGS = (
    ("model", -12),
    ("rows", 5),
    ("context", 8),
    ("step ms", 9),
    ("forward ms", 10),
    ("sample ms", 10),
    ("graph", 6),
    ("tokens/s", 10),
    ("floor ms", 9),
    ("% of floor", 10),
    ("eager ms", 9),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """
    Points to measure.

    Attributes:
        models: Names of `SHAPES`.
        batches: Numbers of rows of a step.
        contexts: Positions of each row.
        budget_s: Seconds for each measurement, about.
        is_eager: No graphs are captured on a GPU.
        beside_eager: Numbers of rows whose steps are measured a second time, without a graph.
        batch_invariant: Rows give the same bits in any batch.
    """

    models: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    budget_s: float
    is_eager: bool = False
    beside_eager: tuple[int, ...] = ()
    batch_invariant: bool = False


_BATCHES = (1, 8, 32, 64, 128, 256)
GRIDS = {
    ("cpu", False): Grid(
        models=("tiny", "llama-135m"), batches=(1, 8, 32), contexts=(192,), budget_s=1
    ),
    ("cpu", True): Grid(
        models=("tiny", "llama-135m", "qwen3-0.6b", "llama-1b"),
        batches=(1, 2, 4, 8, 16, 32),
        contexts=(192, 1024),
        budget_s=4,
    ),
    ("cuda", False): Grid(
        models=("qwen3-0.6b", "llama-1b", "llama-8b"),
        batches=(1, 32, 256),
        contexts=(1024,),
        budget_s=0.5,
    ),
    ("cuda", True): Grid(
        models=("qwen3-0.6b", "llama-1b", "qwen3-4b", "llama-8b"),
        batches=_BATCHES,
        contexts=(1024, 4096),
        budget_s=0.5,
    ),
}
"""Points by kind of device, and by whether `--full` was asked for."""

Row = dict[str, str | int | float]


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Measure and print; return the exit code, which is 1 if no point could be measured.

    Raises:
        InvalidConfig: There is no such device, number type or model.
    """
    given = _parser().parse_args(arguments)
    names = chosen(given.model, SHAPES, "model")
    where = place(given)
    started_s = time.monotonic()  # not before: the CPU's library may have been compiled, once
    grid = GRIDS[where.device.type, given.full]
    grid = Grid(
        models=tuple(names) if given.model else grid.models,
        batches=tuple(given.batch or grid.batches),
        contexts=tuple(given.context or grid.contexts),
        budget_s=given.seconds or grid.budget_s,
        is_eager=given.eager,
        beside_eager=tuple(given.beside_eager or ()),
        batch_invariant=given.batch_invariant,
    )
    limit_s = time_limit_s(given, TIME_LIMIT_S)
    deadline_s = None if limit_s is None else started_s + limit_s
    found = measured_rows(grid, where, block_size=given.block_size, deadline_s=deadline_s)
    num_found = 0
    if given.json:
        with JsonRows() as rows:
            for row in found:
                rows.add(row)
                num_found += 1
        return 0 if num_found else 1
    print_line(where.text)
    table = Table(_HEADINGS)
    for row in found:
        table.row(_cells(row))
        num_found += 1
    return 0 if num_found else 1


def measured_rows(
    grid: Grid, where: Where, *, block_size: int, deadline_s: float | None
) -> Iterator[Row]:
    """
    Measure all points of a grid in turn and yield a row for each.

    Points that do not fit, or for which there is no time, are named on stderr.

    Args:
        grid: Points to measure.
        where: Device, number type and threads.
        block_size: Tokens per KV block.
        deadline_s: Time by `time.monotonic` after which no point begins; None for no limit.
    """
    ceilings = measure_ceilings(
        where.device, where.dtype, timer_of(where.device), min(_CEILING_S, grid.budget_s)
    )
    captures = where.device.type == "cuda" and not grid.is_eager
    graphs = CudaGraphs(where.device) if captures else None
    points = [(rows, context) for context in grid.contexts for rows in grid.batches]
    for name in grid.models:
        forget_memory(where.device)
        try:
            model = random_model(SHAPES[name], where.dtype, where.device, packs=True)
        except OutOfMemory as error:
            complain("model", f"{name} left out: {error}")
            continue
        for num_rows, context in points:
            point = f"{name} with {num_rows} rows of {context}"
            if deadline_s is not None and time.monotonic() > deadline_s:
                complain("model", f"{point} left out, the machine is slow")
                continue
            row = _point(
                model,
                grid,
                ceilings,
                graphs,
                num_rows=num_rows,
                context=context,
                block_size=block_size,
            )
            if row is None:
                complain("model", f"{point} does not fit")
            else:
                place: Row = {"model": name, "rows": num_rows, "context": context}
                yield place | row
        del model


def _point(
    model: LoadedModel,
    grid: Grid,
    ceilings: Ceilings,
    graphs: GraphDevice | None,
    *,
    num_rows: int,
    context: int,
    block_size: int,
) -> Row | None:
    """Return the rates of one point; None where it does not fit."""
    measure = partial(
        _times,
        model,
        num_rows=num_rows,
        context=context,
        block_size=block_size,
        budget_s=grid.budget_s,
        batch_invariant=grid.batch_invariant,
    )
    if (times := measure(graphs=graphs)) is None:
        return None
    floor = step_floor(model.config, model.dtype.itemsize, ceilings, [context] * num_rows)
    row = _rates(times, num_rows, floor.total_s)
    if num_rows in grid.beside_eager and (eager := measure(graphs=None)) is not None:
        row["eager_step_ms"] = significant(1e3 * eager.step_s)
        row["times_eager"] = significant(eager.step_s / times.step_s)
    return row


def _times(model: LoadedModel, **options: Any) -> StepTimes | None:
    """Return the times of `measure_steps`; None where cache or step do not fit."""
    forget_memory(model.device)
    try:
        return measure_steps(model, **options)
    except (OutOfMemory, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        return None


def _rates(times: StepTimes, num_rows: int, floor_s: float) -> Row:
    return {
        "step_ms": significant(1e3 * times.step_s),
        "forward_ms": significant(1e3 * times.forward_s),
        "sample_ms": significant(1e3 * times.sample_s),
        "graph": times.graph,
        "tokens_per_s": significant(num_rows / times.step_s),
        "floor_ms": significant(1e3 * floor_s),
        "percent_of_floor": significant(100 * floor_s / times.step_s),
    }


def _cells(row: Row) -> list[str]:
    return [
        str(row["model"]),
        str(row["rows"]),
        str(row["context"]),
        *(f"{row[key]:.3f}" for key in ("step_ms", "forward_ms", "sample_ms")),
        str(row["graph"]),
        f"{row['tokens_per_s']:.0f}",
        f"{row['floor_ms']:.3f}",
        f"{row['percent_of_floor']:.1f}",
        f"{row['eager_step_ms']:.3f}" if "eager_step_ms" in row else "-",
    ]


def _parser() -> BenchParser:
    made = parser("model", __doc__)
    made.add_list(
        "--model",
        help=f"models: {', '.join(SHAPES)}; default: tiny and llama-135m on a CPU, with --full "
        "qwen3-0.6b and llama-1b too; these two and llama-8b on a GPU, with --full qwen3-4b too",
    )
    made.add_list(
        "--batch",
        type=at_least_one,
        help="rows of a step; default: 1, 8 and 32 on a CPU, 1, 32 and 256 on a GPU, more with "
        "--full",
    )
    made.add_list(
        "--context",
        type=at_least_one,
        help="positions of each row; default: 192 on a CPU, with --full 1024 too; 1024 on a GPU, "
        "with --full 4096 too",
    )
    add_block_size(made)
    made.add_argument(
        "--batch-invariant",
        action="store_true",
        help="compute each row to the same bits in any batch, which is slower",
    )
    made.add_argument("--eager", action="store_true", help="capture no graphs on a GPU")
    made.add_list(
        "--beside-eager",
        type=at_least_one,
        help="rows of those steps that are measured without a graph as well, which adds "
        "eager_step_ms and times_eager to their rows; default: none",
    )
    made.add_argument(
        "--seconds",
        type=time_above_zero,
        help="seconds for each measurement, about; default: 1 on a CPU, with --full 4; 0.5 on a "
        "GPU",
    )
    return made
