"""Decode steps of a steady batch, computed by the executor's own runner."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from executor_svc.memory.kv_memory import KvMemory
from executor_svc.model.loader import LoadedModel
from executor_svc.step.graphs.capture import GraphDevice
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.runner import ModelRunner
from tandem.link.batch import ROW_SAMPLES, Admission, Batch
from tandem.link.results import StepResult
from tandem.sampling_params import SamplingParams
from tandem_bench.model.random_model import random_kv

WARM_UP_STEPS = 3
MIN_STEPS = 8
MAX_STEPS = 256
_IN_FLIGHT = 2
"""Steps in flight on a GPU, which works by itself."""

_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """
    Times of one decode step, in seconds; each is a median.

    Attributes:
        step_s: Wall time from one result to the next.
        forward_s: Part of it in the layers, by the runner's own timings.
        sample_s: Part of it after the forward pass; 0 where both are measured as one.
        graph: Rows of the captured graph that was replayed, 0 for none.
    """

    step_s: float
    forward_s: float
    sample_s: float
    graph: int


def measure_steps(
    model: LoadedModel,
    *,
    num_rows: int,
    context: int,
    block_size: int,
    budget_s: float,
    graphs: GraphDevice | None,
    batch_invariant: bool = False,
) -> StepTimes:
    """
    Decode greedily with `num_rows` rows of about `context` positions over a random KV cache.

    Args:
        model: Model that computes.
        num_rows: Rows of each step.
        context: Positions of each row, about, on average over the first eight measured steps; a
            row grows by one position per step.
        block_size: Tokens per KV block.
        budget_s: Seconds for which steps go on, about; from 8 to 256 steps are measured.
        graphs: Device that captures the step once for replays; None computes it eagerly.
        batch_invariant: As in the executor's settings.

    Raises:
        OutOfMemory: Cache or step do not fit.
    """
    start = max(1, context - WARM_UP_STEPS - MIN_STEPS // 2)
    longest = start + WARM_UP_STEPS + MAX_STEPS + 1
    blocks_per_row = -(-longest // block_size)
    kv = random_kv(model, num_rows * blocks_per_row, block_size)
    runner = _runner(model, kv, num_rows, longest, graphs, batch_invariant=batch_invariant)
    batches = decode_batches(num_rows, start, blocks_per_row, model.config.vocab_size)
    ended_s: list[float] = []
    results: list[StepResult] = []
    first_s = time.perf_counter()
    for result in _results(runner, batches, launches_ahead=model.device.type == "cuda"):
        now_s = time.perf_counter()
        results.append(result)
        ended_s.append(now_s)
        num_measured = len(results) - WARM_UP_STEPS
        if num_measured == 0:
            first_s = now_s
        if num_measured >= MIN_STEPS and now_s - first_s >= budget_s:
            break
    ended_s = ended_s[WARM_UP_STEPS - 1 :]
    timings = [result.timings for result in results[WARM_UP_STEPS:]]
    return StepTimes(
        step_s=statistics.median(np.diff(ended_s).tolist()),
        forward_s=statistics.median(each.forward_ns for each in timings) / 1e9,
        sample_s=statistics.median(each.sample_ns for each in timings) / 1e9,
        graph=results[-1].graph,
    )


def _runner(
    model: LoadedModel,
    kv: KvMemory,
    num_rows: int,
    longest: int,
    graphs: GraphDevice | None,
    *,
    batch_invariant: bool = False,
) -> ModelRunner:
    """Make a warm runner; on a GPU it uses static buffers, as the executor's does."""
    captured = None if graphs is None else GraphPlan(device=graphs, sizes=(num_rows,))
    runner = ModelRunner(
        model,
        kv,
        num_slots=num_rows,
        max_model_len=longest,
        boot_id="bench",
        batch_invariant=batch_invariant,
        static_rows=num_rows if graphs is not None or model.device.type == "cuda" else 0,
        graph_plan=captured,
    )
    runner.warm_up(every_kind=False)
    return runner


def decode_batches(
    num_rows: int, start: int, blocks_per_row: int, vocab_size: int
) -> Iterator[Batch]:
    """
    Yield the batches: the first admits all rows, and each decodes one token per row.

    Rows are admitted with `start` positions, all but the last of which are in the cache.
    """
    admits = greedy_admissions([(start, start - 1)] * num_rows, blocks_per_row, vocab_size)
    for step in range(WARM_UP_STEPS + MAX_STEPS):
        yield Batch(
            admits=admits if step == 0 else (),
            row_slot=np.arange(num_rows, dtype=np.int32),
            row_num_tokens=np.ones(num_rows, np.int32),
            row_start=np.full(num_rows, start - 1 + step, np.int32),
            row_flags=np.full(num_rows, ROW_SAMPLES, np.uint8),
        )


def greedy_admissions(
    lengths: Sequence[tuple[int, int]], blocks_per_row: int, vocab_size: int
) -> tuple[Admission, ...]:
    """
    Admit a greedy sequence of random ids to each slot, in blocks that are scattered.

    Args:
        lengths: Tokens of each, and how many of these are in the cache.
        blocks_per_row: KV blocks of each.
        vocab_size: Exclusive upper bound of ids.
    """
    generator = np.random.default_rng(0)
    blocks = generator.permutation(len(lengths) * blocks_per_row).astype(np.int32) + 1
    return tuple(
        Admission(
            slot=slot,
            generation=1,
            token_ids=generator.integers(0, vocab_size, length, dtype=np.int32),
            num_prompt_tokens=length,
            num_cached_tokens=num_cached,
            block_ids=blocks[slot * blocks_per_row : (slot + 1) * blocks_per_row],
            sampling=_GREEDY,
        )
        for slot, (length, num_cached) in enumerate(lengths)
    )


def _results(
    runner: ModelRunner, batches: Iterator[Batch], *, launches_ahead: bool
) -> Iterator[StepResult]:
    """Yield results in order; `launches_ahead` sends the next step before a result is known."""
    if not launches_ahead:
        for step_id, batch in enumerate(batches):
            yield runner.execute(batch, step_id)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="results") as pool:
        in_flight: list[Future[StepResult]] = []
        for step_id, batch in enumerate(batches):
            in_flight.append(pool.submit(runner.launch(batch, step_id)))
            if len(in_flight) >= _IN_FLIGHT:
                yield in_flight.pop(0).result()
        yield from _remaining(in_flight)


def _remaining(in_flight: Sequence[Future[StepResult]]) -> Iterator[StepResult]:
    for future in in_flight:
        yield future.result()
