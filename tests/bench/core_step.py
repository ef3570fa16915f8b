"""How long the scheduler core takes to plan and apply one decode step; run as a script."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from scheduler_svc.core.geometry import ExecutorGeometry
from scheduler_svc.core.request import NewRequest
from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.link.batch import ROW_SAMPLES, Batch, RowSampling, StepResult

_SAMPLING = RowSampling(temperature=1.0, top_k=0, top_p=0.9, seed=0)


def _core(num_running: int, num_steps: int) -> tuple[Scheduler, dict[int, int]]:
    max_model_len = 128 + num_steps + 64
    config = EngineConfig(
        max_num_blocks=num_running * (max_model_len // 16 + 1) * 2,
        max_batch_size=num_running,
        max_num_seqs=num_running * 2,
        max_model_len=max_model_len,
        max_total_tokens=8192,
    )
    geometry = ExecutorGeometry(
        num_blocks=config.max_num_blocks,
        block_size=16,
        num_slots=num_running,
        max_batch_size=num_running,
        max_total_tokens=8192,
        max_model_len=max_model_len,
    )
    core = Scheduler(config, geometry)
    for handle in range(num_running):
        core.submit(
            NewRequest(
                request_id=str(handle),
                handle=handle,
                # Spread so that block boundaries fall evenly over steps.
                prompt=np.arange(64 + handle % 16, dtype=np.int32),
                sampling=_SAMPLING,
                max_tokens=num_steps + 60,
                arrival_s=0.0,
                eos_token_ids=frozenset({2}),
            ),
            0.0,
        )
    return core, {}


def _result(batch: Batch, generation: dict[int, int], step_id: int) -> StepResult:
    for admission in batch.admits:
        generation[admission.slot] = admission.generation
    rows = np.flatnonzero(batch.row_flags == ROW_SAMPLES)
    slot = batch.row_slot[rows]
    return StepResult(
        boot_id="bench",
        step_id=step_id,
        slot=slot,
        generation=np.array([generation[s] for s in slot.tolist()], np.uint32),
        position=batch.row_start[rows] + batch.row_num_tokens[rows],
        token=np.full(len(rows), 100, np.int32),
    )


def measure(num_running: int, num_steps: int) -> dict[str, float]:
    """Microseconds of CPU time per decode-only step, block growth included."""
    core, generation = _core(num_running, num_steps)
    plan_us, apply_us = [], []
    for step_id in range(1, num_steps + 1):
        start = time.thread_time_ns()
        batch = core.schedule(float(step_id))
        planned = time.thread_time_ns()
        assert batch is not None
        result = _result(batch, generation, step_id)
        before = time.thread_time_ns()
        core.apply(result, float(step_id))
        core.take_events()
        applied = time.thread_time_ns()
        if not batch.admits and len(batch.row_slot) == num_running:
            plan_us.append((planned - start) / 1e3)
            apply_us.append((applied - before) / 1e3)
    both = np.array(plan_us) + np.array(apply_us)
    return {
        "running": num_running,
        "steps": len(both),
        "plan_mean_us": round(float(np.mean(plan_us)), 1),
        "apply_mean_us": round(float(np.mean(apply_us)), 1),
        "step_mean_us": round(float(both.mean()), 1),
        "step_median_us": round(float(np.median(both)), 1),
        "step_p99_us": round(float(np.percentile(both, 99)), 1),
    }


def main() -> None:
    """Print one JSON object per batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    for num_running in arguments.running:
        print(json.dumps(measure(num_running, arguments.steps)))


if __name__ == "__main__":
    main()
