"""One thing that `bench kernels` measures, and what came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem_bench.device.floors import Ceilings
from tandem_bench.device.timing import Call, Timer, num_copies

TANDEM = "tandem"
"""Ours, as the executor would choose it on the device; the log says which that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """
    One operation at one shape.

    Attributes:
        operation: Name of the folder under `kernels`, and which part of it.
        shape: Sizes, as text.
        implementation: `TANDEM` or a peer.
        num_bytes: That must be moved: inputs read and outputs written once. Of attention the keys
            and values alone, as others count it.
        num_flop: In matrix products; 0 where there are none worth counting.
        make: Gives the work on buffers of its own, drawn from a seed.
    """

    operation: str
    shape: str
    implementation: str
    num_bytes: int
    num_flop: int
    make: Callable[[int], Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """
    A case's time and what it comes to.

    Attributes:
        case: What was measured.
        seconds: Of one call.
        percent: Of the ceiling that bounds the case: the least time by `Ceilings.floor_s` over
            the measured one.
        bound: "memory" or "compute", the ceiling that is.
    """

    case: Case
    seconds: float
    percent: float
    bound: str

    def as_json(self) -> dict[str, str | float]:
        """What programs get; rates are decimal, `num_flop` 0 gives a rate of 0."""
        return {
            "operation": self.case.operation,
            "shape": self.case.shape,
            "implementation": self.case.implementation,
            "time_us": significant(1e6 * self.seconds),
            "gb_per_s": significant(self.case.num_bytes / self.seconds / 1e9),
            "tflop_per_s": significant(self.case.num_flop / self.seconds / 1e12),
            "bound": self.bound,
            "percent_of_ceiling": significant(self.percent),
        }


def significant(number: float) -> float:
    """What is worth telling of a measurement: five digits."""
    return float(f"{number:.5g}")


def measure(case: Case, ceilings: Ceilings, timer: Timer, budget_s: float) -> Measured:
    """
    Time a case on as many sets of buffers as keep it from finding its own in a cache.

    Args:
        case: What to time.
        ceilings: Of the device, for the number type of the case.
        timer: Of the device.
        budget_s: How long to repeat it, about.
    """
    with torch.inference_mode():
        calls = [case.make(seed) for seed in range(num_copies(timer, case.num_bytes))]
    seconds = timer.seconds(calls, budget_s)
    of_memory = ceilings.is_memory_bound(case.num_bytes, case.num_flop)
    return Measured(
        case=case,
        seconds=seconds,
        percent=100 * ceilings.floor_s(case.num_bytes, case.num_flop) / seconds,
        bound="memory" if of_memory else "compute",
    )
