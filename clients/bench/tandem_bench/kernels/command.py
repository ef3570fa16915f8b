"""
`tandem bench kernels [flags]`: the time of single operations at shapes that models have.

Each operation is measured alone. Its time, its rates and its percentage of the device's ceiling are
printed; the ceilings, a copy within the device's memory and a large matrix product, are measured in
the same run. The work runs on several sets of buffers in turn, so that what it reads is not still
in a cache; on a GPU it is replayed from a captured graph. Attention is also measured with PyTorch
on dense keys and, on a GPU where it is installed, with FlashInfer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from executor_svc.device.out_of_memory import is_out_of_memory
from executor_svc.model.config import ModelConfig
from kernels.paged_attention import AttentionShape
from tandem_bench.command_line import BenchParser, print_line, time_above_zero
from tandem_bench.device.case import Case, measure
from tandem_bench.device.ceilings import ceiling_rows, measure_ceilings
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
from tandem_bench.kernels import flashinfer_peer
from tandem_bench.kernels.attention_cases import (
    Rows,
    attention_cases,
    decode_rows,
    prompt_rows,
    ragged_rows,
)
from tandem_bench.kernels.row_cases import patch_case, row_cases
from tandem_bench.kernels.sampling_cases import sampling_cases
from tandem_bench.model.random_model import forget_memory

OPERATIONS = ("decode", "prefill", "rows", "sampling", "patch")
TIME_LIMIT_S = 36.0
"""Seconds after which no measurement begins, without --full and --time-limit."""

_HEADINGS = (
    ("operation", -18),
    ("shape", -36),
    ("implementation", -23),
    ("us", 10),
    ("GB/s", 9),
    ("TFLOP/s", 9),
    ("% of ceiling", 12),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """
    Points to measure.

    Attributes:
        models: Names of models in `SHAPES`.
        decodes: Number of rows and positions of each, per decode batch.
        prompts: Number of rows, new positions and cached positions, per prompt batch.
        tokens: Tokens of a step, for operations that work row by row.
        sampled: Numbers of rows that sample.
        budget_s: Seconds for each measurement, about.
    """

    models: tuple[str, ...]
    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int, int], ...]
    tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    budget_s: float


_BATCHES = (1, 8, 32, 64, 128, 256)
GRIDS = {
    ("cpu", False): Grid(
        models=("llama-135m",),
        decodes=((1, 256), (8, 256), (32, 256)),
        prompts=((1, 512, 0), (4, 128, 128)),
        tokens=(1, 32),
        sampled=(1, 32),
        budget_s=0.15,
    ),
    ("cpu", True): Grid(
        models=("llama-135m", "qwen3-0.6b", "llama-1b"),
        decodes=tuple((rows, ctx) for ctx in (256, 1024, 4096) for rows in (1, 8, 32)),
        prompts=((1, 128, 0), (1, 512, 0), (1, 2048, 0), (4, 128, 128), (1, 256, 2048)),
        tokens=(1, 8, 32, 512),
        sampled=(1, 8, 32),
        budget_s=0.5,
    ),
    ("cuda", False): Grid(
        models=("llama-8b",),
        decodes=tuple((rows, ctx) for ctx in (1024, 4096) for rows in (1, 32, 256)),
        prompts=((1, 4096, 0), (16, 512, 512)),
        tokens=(1, 32, 256, 4096),
        sampled=(1, 32, 256),
        budget_s=0.1,
    ),
    ("cuda", True): Grid(
        models=("llama-8b", "llama-1b", "qwen3-0.6b"),
        decodes=tuple((rows, ctx) for ctx in (1024, 4096, 16384) for rows in _BATCHES),
        prompts=((1, 512, 0), (1, 4096, 0), (1, 16384, 0), (4, 4096, 0), (16, 512, 512)),
        tokens=(1, 32, 256, 4096),
        sampled=_BATCHES,
        budget_s=0.1,
    ),
}
"""Points by kind of device, and by whether `--full` was asked for."""


def cases(
    grid: Grid, operations: Sequence[str], where: Where, *, block_size: int, with_peers: bool
) -> Iterator[Case]:
    """Yield all cases of a grid, model by model; then the case that has no model, patch."""
    for name in grid.models:
        yield from _model_cases(
            grid, SHAPES[name], operations, where, block_size=block_size, with_peers=with_peers
        )
    if "patch" in operations:
        for rows in grid.sampled:
            yield patch_case(rows, where.device)


def _model_cases(
    grid: Grid,
    config: ModelConfig,
    operations: Sequence[str],
    where: Where,
    *,
    block_size: int,
    with_peers: bool,
) -> Iterator[Case]:
    shape = _attention_shape(config, where, block_size)
    for operation, batch in _batches(grid):
        if operation in operations:
            yield from attention_cases(operation, shape, batch, with_peers=with_peers)
    if "rows" in operations:
        for num_tokens in grid.tokens:
            yield from row_cases(config, num_tokens, where, block_size=block_size)
    if "sampling" in operations:
        for rows in grid.sampled:
            yield from sampling_cases(rows, config.vocab_size, where.device)


def _batches(grid: Grid) -> Iterator[tuple[str, Rows]]:
    """Yield the batches of attention, each with the name of its operation."""
    for num_rows, context in grid.decodes:
        yield "decode", decode_rows(num_rows, context)
        if num_rows > 1:
            yield "decode", ragged_rows(num_rows, context)
    for num_rows, length, cached in grid.prompts:
        yield "prefill", prompt_rows(num_rows, length, cached)


def _attention_shape(config: ModelConfig, where: Where, block_size: int) -> AttentionShape:
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=where.dtype,
        device=where.device,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Measure and print; return the exit code, which is 1 if any case failed.

    Raises:
        InvalidConfig: There is no such device, number type or name.
    """
    given = _parser().parse_args(arguments)
    operations = chosen(given.operation, OPERATIONS, "operation")
    models = chosen(given.model, SHAPES, "model")
    where = place(given)
    grid = GRIDS[where.device.type, given.full]
    if given.model:
        grid = replace(grid, models=tuple(models))
    if given.seconds is not None:
        grid = replace(grid, budget_s=given.seconds)
    with_peers = not given.no_peers
    if where.device.type == "cuda" and with_peers and not flashinfer_peer.is_installed():
        complain("kernels", "FlashInfer is not installed: nothing is compared with it")
    found = cases(grid, operations, where, block_size=given.block_size, with_peers=with_peers)
    with JsonRows() if given.json else nullcontext() as rows:
        run = _Run(where, grid.budget_s, time_limit_s(given, TIME_LIMIT_S), rows)
        for case in found:
            run.add(case)
    return run.finish()


class _Run:
    """One run: measures the ceilings and then cases, and prints each result as it comes."""

    def __init__(
        self, where: Where, budget_s: float, limit_s: float | None, rows: JsonRows | None
    ) -> None:
        """Measure the ceilings; results go to `rows` as JSON, or for None into a table."""
        started_s = time.monotonic()
        self._deadline_s = None if limit_s is None else started_s + limit_s
        self._budget_s = budget_s
        self._device = where.device
        self._timer = timer_of(where.device)
        self._ceilings = measure_ceilings(where.device, where.dtype, self._timer, budget_s)
        self._rows = rows
        self._num_failed = self._num_left = 0
        if rows is None:
            print_line(where.text)
            self._table = Table(_HEADINGS)
        for row in ceiling_rows(self._ceilings):
            self._add_row(row)

    def add(self, case: Case) -> None:
        """Measure one more case, if there is time."""
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            self._num_left += 1
            return
        try:
            measured = measure(case, self._ceilings, self._timer, self._budget_s)
        except RuntimeError as error:  # of torch or Triton: others may still be measured
            fits = not is_out_of_memory(error)
            self._num_failed += fits
            what = str(error).partition("\n")[0] if fits else "does not fit"
            complain("kernels", f"{case.operation} {case.shape} {case.implementation}: {what}")
            forget_memory(self._device)
        else:
            self._add_row(measured.as_json())

    def finish(self) -> int:
        """Say how much was left out; return the exit code."""
        if self._num_left:
            complain("kernels", f"{self._num_left} measurements left out, the machine is slow")
        return 1 if self._num_failed else 0

    def _add_row(self, row: dict[str, str | float]) -> None:
        if self._rows is not None:
            self._rows.add(row)
        else:
            names = [str(row[name]) for name in ("operation", "shape", "implementation")]
            rates = (("time_us", 1), ("gb_per_s", 2), ("tflop_per_s", 3), ("percent_of_ceiling", 1))
            numbers = [f"{row[name]:.{digits}f}" if row[name] else "-" for name, digits in rates]
            self._table.row(names + numbers)


def _parser() -> BenchParser:
    made = parser("kernels", __doc__)
    made.add_list("--operation", help=f"operations: {', '.join(OPERATIONS)}; default: all")
    made.add_list(
        "--model",
        help=f"models that give the sizes: {', '.join(SHAPES)}; default: llama-135m on a CPU, "
        "llama-8b on a GPU, three models with --full",
    )
    add_block_size(made)
    made.add_argument("--no-peers", action="store_true", help="measure our implementation alone")
    made.add_argument(
        "--seconds",
        type=time_above_zero,
        help="seconds for each measurement, about; default: 0.15 on a CPU, with --full 0.5; 0.1 on "
        "a GPU",
    )
    return made
