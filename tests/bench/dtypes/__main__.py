"""
`python -m tests.bench.dtypes [flags]`: which number type serves a mix of requests soonest on this
CPU, and whether `--dtype auto` takes it.

A mix is requests of 512 tokens in and 128 out, 1, 8 or 32 at once, answered by the embedded engine.
Types take turns, each in a process of its own; compared are the times of whole mixes, of prompts
until all decode, and decode rates, each as the median over rounds of the ratio to float32 in the
same round: a shared machine that slows down for a while disturbs those least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from executor_svc.device.choice import choose_kernels, dtype_name, resolve_dtype
from executor_svc.device.threads import default_num_threads
from executor_svc.model.config import read_model_config
from tandem_bench.device.sizes import MODEL_SIZES
from tandem_bench.offline.checkpoints import random_model
from tandem_bench.offline.rounds import run_engine
from tandem_bench.offline.workload import Task
from tests.bench.machine import machine
from tests.bench.shapes import HALF_A_BILLION

SHAPES = {**MODEL_SIZES, **HALF_A_BILLION}
DTYPES = ("float32", "bfloat16")
BASE = "float32"
WITHIN = 0.05
"""Share of a mix's time that `auto` may lose against the best type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One type and number of requests; ratios are to float32, over 1 is better than that."""

    dtype: str
    concurrency: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    decode_tokens_per_s: float
    mix_ratio: float
    prompts_ratio: float
    decode_ratio: float
    is_auto: bool


def main(arguments: list[str]) -> int:
    """Measure; 1 if `auto` loses more than it may."""
    given = _parser().parse_args(arguments)
    task = _task(given)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(given.rounds):
        for dtype in DTYPES:
            for line in run_engine(replace(task, dtype=dtype)):
                said = json.loads(line)
                found.setdefault((dtype, said["concurrency"]), []).append(said)
                rate = said["output_tokens_per_s"]
                sys.stderr.write(f"{number + 1} {dtype} {said['concurrency']}: {rate:.1f}/s\n")
    rows = _rows(found, task)
    text = _page(given.shape, task, rows, given.rounds)
    sys.stdout.write(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        name = f"{given.shape}-{given.cpu_extension}"
        report = {"machine": machine(), "threads": task.num_threads, "rounds": given.rounds}
        rows_as_json = [asdict(row) for row in rows]
        (given.out / f"{name}.json").write_text(json.dumps(report | {"rows": rows_as_json}) + "\n")
        (given.out / f"{name}.md").write_text(text)
    return 1 if _losses(rows) else 0


def _task(given: argparse.Namespace) -> Task:
    """Return the task to measure; its type is the one that `auto` takes."""
    model = random_model(given.shape, SHAPES[given.shape])
    stored = read_model_config(model).checkpoint_dtype
    cpu = torch.device("cpu")
    choose_kernels(cpu, given.cpu_extension)
    auto = resolve_dtype("auto", stored, cpu)
    return Task(
        engine="tandem",
        model=model,
        dtype=dtype_name(auto),
        num_threads=given.threads or default_num_threads(),
        concurrency=tuple(given.concurrency),
        input_len=given.input_len,
        output_len=given.output_len,
        cpu_extension=given.cpu_extension,
    )


def _rows(found: dict[tuple[str, int], list[dict[str, float]]], task: Task) -> list[Row]:
    rows = []
    for (dtype, concurrency), rounds in sorted(found.items(), key=lambda item: item[0][1]):
        base = found[BASE, concurrency]

        def ratio(of: str, *, is_time: bool, ours=rounds, base=base) -> float:
            pairs = [(one[of], other[of]) for one, other in zip(ours, base, strict=True)]
            return statistics.median(b / a if is_time else a / b for a, b in pairs)

        rows.append(
            Row(
                dtype=dtype,
                concurrency=concurrency,
                output_tokens_per_s=statistics.median(r["output_tokens_per_s"] for r in rounds),
                prompt_tokens_per_s=statistics.median(
                    concurrency * task.input_len / r["prompts_s"] for r in rounds
                ),
                decode_tokens_per_s=statistics.median(r["decode_tokens_per_s"] for r in rounds),
                mix_ratio=ratio("whole_s", is_time=True),
                prompts_ratio=ratio("prompts_s", is_time=True),
                decode_ratio=ratio("decode_tokens_per_s", is_time=False),
                is_auto=dtype == task.dtype,
            )
        )
    return rows


def _losses(rows: list[Row]) -> list[str]:
    """Return sentences for people about each case in which `auto` loses more than it may."""
    losses = []
    for auto in (row for row in rows if row.is_auto):
        best = max(row.mix_ratio for row in rows if row.concurrency == auto.concurrency)
        if auto.mix_ratio < (1 - WITHIN) * best:
            share = auto.mix_ratio / best
            losses.append(f"{auto.concurrency} at once: {auto.dtype} {share:.2f} of the best")
    return losses


def _page(shape: str, task: Task, rows: list[Row], num_rounds: int) -> str:
    lines = [
        (
            f"{shape} on {machine()}, {task.num_threads} threads, cpu_extension {task.cpu_extension}: "
            f"requests of {task.input_len} tokens in and {task.output_len} out, {num_rounds} rounds. "
            f"`auto` is {task.dtype}."
        ),
        "",
        "| requests | type | output tokens/s | of prompts | while all decode | mix | prompts | decode |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.concurrency} | {row.dtype}{' (auto)' if row.is_auto else ''} | "
        f"{row.output_tokens_per_s:.1f} | {row.prompt_tokens_per_s:.0f} | "
        f"{row.decode_tokens_per_s:.1f} | {row.mix_ratio:.2f} | {row.prompts_ratio:.2f} | "
        f"{row.decode_ratio:.2f} |"
        for row in rows
    ]
    losses = _losses(rows)
    verdict = "; ".join(losses) if losses else f"within {WITHIN:.0%} of the best everywhere"
    return "\n".join([*lines, "", f"`auto`: {verdict}.", ""])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dtypes", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-135m")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-extension", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--out", type=Path, help="folder for results as JSON and Markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
