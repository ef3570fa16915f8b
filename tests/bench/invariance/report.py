"""
Measure what batch_invariant costs on the CPU and write README.md.

    python -m tests.bench.invariance.report

Takes two to three minutes; the page says how busy the machine was. Both ways of each line are
measured in turns, one right after the other, and the ratio is the median of those of the turns, so
that it holds where the times do not. Its quartiles tell how far to trust it.
"""

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from executor_svc.device.choice import choose_kernels
from executor_svc.device.threads import use_threads
from executor_svc.memory.kv_memory import KvMemory
from executor_svc.model.loader import LoadedModel
from executor_svc.step.runner import ModelRunner
from tandem.link.batch import ROW_SAMPLES, Admission, Batch
from tandem.sampling_params import SamplingParams
from tandem_bench.device.shapes import SHAPES
from tandem_bench.model.random_model import random_model
from tandem_bench.model.steady_decode import measure_steps
from tests.bench.machine import machine

HERE = Path(__file__).resolve().parent
MODEL = "llama-135m"
CONTEXT = 192
BATCHES = (1, 8, 32)
PROMPT_LEN = 256
TURNS = 5
BUDGET_S = 0.1
"""Seconds of a turn: eight steps at least are measured whatever they take."""
BLOCK_SIZE = 64
LIBRARIES = {"C++": "on", "PyTorch": "off"}
TEXT = """# What batch_invariant costs on a CPU

Written by `python -m tests.bench.invariance.report`; change that, not this page. A {model} shape
with random weights in float32, {threads} of {machine}: steps in which all rows decode at about
{context} positions, and one prompt of {prompt} tokens. "C++" is `cpu_extension = on`, "PyTorch" is `off`.
Load average before the run, from other work: **{load:.1f}**; niceness {niceness}. Medians of {turns} turns; the
ratio is the median of each turn's, with its quartiles.

| library | step | ms as it is | ms with batch_invariant | ratio |
|---|---|---:|---:|---:|
{rows}

Without the C++ library products take tiles of at least 16 rows, which is what few rows pay for, and
attention runs sequence by sequence. With it float32 products are the same either way, and attention
gives prompts up the library's products of many queries.
"""


def main() -> None:
    """Measure all lines and write the page."""
    load = os.getloadavg()[0]
    use_threads(None)
    threads = torch.get_num_threads()
    lines = []
    for library, step, plain_s, invariant_s in measured():
        times = " | ".join(
            f"{1e3 * statistics.median(each):.1f}" for each in (plain_s, invariant_s)
        )
        ratios = [with_it / plain for plain, with_it in zip(plain_s, invariant_s, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        lines.append(f"| {library} | {step} | {times} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
        print(lines[-1], flush=True)
    text = TEXT.format(
        model=MODEL,
        threads=threads,
        machine=machine(),
        context=CONTEXT,
        prompt=PROMPT_LEN,
        load=load,
        niceness=os.nice(0),
        turns=TURNS,
        rows="\n".join(lines),
    )
    (HERE / "README.md").write_text(text, encoding="utf-8")


def measured() -> Iterator[tuple[str, str, list[float], list[float]]]:
    """Yield the library, the step, and its seconds in each turn, as it is and with batch_invariant."""
    for library, extension in LIBRARIES.items():
        choose_kernels(torch.device("cpu"), extension)
        model = random_model(SHAPES[MODEL], torch.float32, torch.device("cpu"), packs=True)
        for num_rows in BATCHES:
            yield library, f"{num_rows} decode", *in_turns(model, num_rows)
        yield library, f"prompt of {PROMPT_LEN}", *in_turns(model, None)


def in_turns(model: LoadedModel, num_rows: int | None) -> tuple[list[float], list[float]]:
    """
    Return the seconds in each turn of a decode of so many rows, or of a prompt, as it is and with
    batch_invariant.
    """
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(TURNS):
        for batch_invariant, times in found.items():
            if num_rows is None:
                times.append(prompt_s(model, batch_invariant=batch_invariant))
                continue
            step = measure_steps(
                model,
                num_rows=num_rows,
                context=CONTEXT,
                block_size=BLOCK_SIZE,
                budget_s=BUDGET_S,
                graphs=None,
                batch_invariant=batch_invariant,
            )
            times.append(step.step_s)
    return found[False], found[True]


def prompt_s(model: LoadedModel, *, batch_invariant: bool) -> float:
    """Return the seconds of a prompt in one step, after one that warms up."""
    num_blocks = -(-PROMPT_LEN // BLOCK_SIZE) + 1
    kv = KvMemory(model.config, num_blocks, BLOCK_SIZE, model.dtype, model.device)
    runner = ModelRunner(
        model,
        kv,
        num_slots=1,
        max_model_len=PROMPT_LEN + 1,
        boot_id="bench",
        batch_invariant=batch_invariant,
    )
    admission = Admission(
        slot=0,
        generation=1,
        token_ids=np.arange(PROMPT_LEN, dtype=np.int32),
        num_prompt_tokens=PROMPT_LEN,
        num_cached_tokens=0,
        block_ids=np.arange(1, num_blocks + 1, dtype=np.int32),
        sampling=SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0),
    )
    step = Batch(
        admits=(admission,),
        row_slot=np.zeros(1, np.int32),
        row_num_tokens=np.array([PROMPT_LEN], np.int32),
        row_start=np.zeros(1, np.int32),
        row_flags=np.array([ROW_SAMPLES], np.uint8),
    )
    runner.execute(step, 0)
    runner.reset()
    started_s = time.perf_counter()
    runner.execute(step, 1)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
