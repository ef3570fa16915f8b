"""Cost of a step in which every row decodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.link.batch import Batch
from tandem_bench.scheduler.service import BLOCK_SIZE, BenchService, TurnCost

WARM_UP_TURNS = 50
_SHORTEST_PROMPT = 64
_TOKENS_LEFT = 64
"""Spare output tokens of each request, so that none ends during the measurement."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """
    Costs of decode-only turns; times in microseconds of CPU but for `wall_median_us`.

    Attributes:
        parts_us: Median of each part of a turn, by its name; empty where they are not asked for.
    """

    running: int
    waiting: int
    turns: int
    mean_us: float
    median_us: float
    p99_us: float
    wall_median_us: float
    parts_us: dict[str, float]

    def as_json(self) -> dict[str, int | float]:
        """Return the row for `--json`."""
        return {
            "running": self.running,
            "waiting": self.waiting,
            "mean_us": round(self.mean_us, 1),
            "median_us": round(self.median_us, 1),
            "p99_us": round(self.p99_us, 1),
            **{f"{name}_us": round(part_us, 1) for name, part_us in self.parts_us.items()},
        }


def measure_decode_step(
    num_running: int,
    num_waiting: int,
    *,
    num_turns: int,
    window: int = 1,
    has_parts: bool = False,
) -> StepCosts:
    """
    Run requests of staggered lengths until all decode, then measure turns.

    In each turn a sixteenth of the rows begin a new block. All slots are taken, so waiting requests
    cannot be admitted.
    """
    service = _decoding_service(num_running, num_waiting, num_turns, window, has_parts=has_parts)
    costs: list[TurnCost] = []
    for _ in range(WARM_UP_TURNS):
        service.turn()
    while len(costs) < num_turns:
        batch, cost = service.turn()
        assert _is_decode_only(batch, num_running)
        costs.append(cost)
    cpu_us = np.array([cost.cpu_us for cost in costs])
    return StepCosts(
        running=num_running,
        waiting=num_waiting,
        turns=num_turns,
        mean_us=float(cpu_us.mean()),
        median_us=float(np.median(cpu_us)),
        p99_us=float(np.percentile(cpu_us, 99)),
        wall_median_us=float(np.median([cost.wall_us for cost in costs])),
        parts_us={
            name: float(np.median([cost.parts_us[name] for cost in costs]))
            for name in costs[0].parts_us
        },
    )


def _decoding_service(
    num_running: int, num_waiting: int, num_turns: int, window: int, *, has_parts: bool
) -> BenchService:
    longest_prompt = _SHORTEST_PROMPT + BLOCK_SIZE - 1
    # Many prompts take several steps, in which the first requests already decode.
    prompt_steps = num_running * longest_prompt // _step_tokens(num_running) + 2
    max_tokens = prompt_steps + WARM_UP_TURNS + num_turns + _TOKENS_LEFT
    max_model_len = longest_prompt + max_tokens
    service = BenchService(
        num_slots=num_running,
        max_model_len=max_model_len,
        num_blocks=2 * num_running * (max_model_len // BLOCK_SIZE + 1),
        max_num_seqs=num_running + num_waiting,
        max_total_tokens=_step_tokens(num_running),
        window=window,
        has_parts=has_parts,
    )
    for number in range(num_running + num_waiting):
        prompt_len = _SHORTEST_PROMPT + number % BLOCK_SIZE
        service.submit(service.request(prompt_len, max_tokens))
    while True:
        batch, _ = service.turn()
        if _is_decode_only(batch, num_running):
            return service


def _step_tokens(num_running: int) -> int:
    return max(8192, 2 * num_running)


def _is_decode_only(batch: Batch | None, num_running: int) -> bool:
    return (
        batch is not None
        and not batch.admits
        and len(batch.row_slot) == num_running
        and batch.num_tokens == num_running
    )
