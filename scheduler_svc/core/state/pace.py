"""Speed at which an executor computes prompts, from the timings of its steps."""

from __future__ import annotations

import math

from scheduler_svc.core.invariants import require
from scheduler_svc.core.slots.planned_rows import PlannedRows
from tandem.link.results import StepTimings

START_S = 1e-4
"""Seconds per prompt token before any was measured."""
MIN_TOKENS = 64
"""Fewest prompt tokens of a step that says how long one takes: others wait for memory instead."""
WEIGHT = 0.2
"""Weight of the latest step."""


class Pace:
    """
    Seconds that one prompt token takes, as a moving average.

    Attributes:
        prefill_s: Seconds per prompt token.
    """

    __slots__ = ("prefill_s",)

    def __init__(self) -> None:
        self.prefill_s = START_S

    def note_step(self, rows: PlannedRows, timings: StepTimings) -> None:
        """Note how long a step took, where most of its tokens were of prompts."""
        num_prompt = int(rows.num_tokens[rows.num_decodes :].sum())
        took_ns = timings.compute_ns
        if took_ns > 0 and num_prompt >= max(MIN_TOKENS, rows.num_decodes):
            per_token_s = took_ns / 1e9 / (num_prompt + rows.num_decodes)
            self.prefill_s += WEIGHT * (per_token_s - self.prefill_s)

    def check_integrity(self) -> None:
        """
        Check the average.

        Raises:
            InternalError: It is no positive number.
        """
        is_positive = math.isfinite(self.prefill_s) and self.prefill_s > 0
        require(is_positive, "a prompt token takes no time")
