"""One operation at one shape that `bench kernels` measures, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem_bench.device.floors import Ceilings
from tandem_bench.device.timing import Call, Timer, num_copies

TANDEM = "tandem"
"""Our implementation, as the executor would choose it on the device; the log names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """
    One operation at one shape.

    Attributes:
        operation: Name of the folder under `kernels`, and which part of it.
        shape: Sizes, as text.
        implementation: `TANDEM` or a peer.
        num_bytes: Bytes that must be moved: inputs read once and outputs written once. For
            attention the keys and values alone, as other projects count it.
        num_flop: Operations in matrix products; 0 where there are none worth counting.
        make: Function that takes a seed and returns the work on buffers of its own.
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
    Time of a case, compared with the ceiling that bounds it.

    Attributes:
        case: Case that was measured.
        seconds: Time of one call.
        percent: Percentage of the ceiling that is reached: the least time by `Ceilings.floor_s`
            over the measured time.
        bound: "memory" or "compute", the ceiling that bounds the case.
    """

    case: Case
    seconds: float
    percent: float
    bound: str

    def as_json(self) -> dict[str, str | float]:
        """Return the row for `--json`; rates use decimal units, `num_flop` 0 gives a rate of 0."""
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
    """Round a measurement to five significant digits."""
    return float(f"{number:.5g}")


def measure(case: Case, ceilings: Ceilings, timer: Timer, budget_s: float) -> Measured:
    """
    Time a case on so many sets of buffers that no call finds its buffers in a cache.

    Args:
        case: Case to time.
        ceilings: Ceilings of the device for the number type of the case.
        timer: Timer of the device.
        budget_s: Seconds for which the case is repeated, about.
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
