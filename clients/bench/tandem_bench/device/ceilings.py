"""Ceilings of a device: copy bandwidth and matrix rate, measured in the run they judge."""

from __future__ import annotations

import torch

from tandem_bench.device.case import significant
from tandem_bench.device.floors import Ceilings
from tandem_bench.device.operands import random_numbers
from tandem_bench.device.timing import Timer

_COPY_BYTES = {"cuda": 2 * 1024**3, "cpu": 128 * 1024**2}
"""Bytes of a buffer that is copied, by kind of device: several times the size of any cache."""
_SQUARE = {"cuda": 8192, "cpu": 1536}
"""Rows, columns and depth of the matrix product, by kind of device."""


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, timer: Timer, budget_s: float
) -> Ceilings:
    """
    Measure a copy within the device's memory and a large square matrix product.

    A copy writes as much as it reads, and both count. Work that only reads can be a little faster
    than a copy, so more than 100 percent of this ceiling is no mistake.

    Args:
        device: Device to measure.
        dtype: Number type of the product.
        timer: Timer of the device.
        budget_s: Seconds for each of the two measurements, about.
    """
    return Ceilings(
        bytes_per_s=_copy_rate(device, timer, budget_s),
        flop_per_s=_product_rate(device, dtype, timer, budget_s),
    )


def ceiling_rows(ceilings: Ceilings) -> list[dict[str, str | float]]:
    """Return the ceilings as two rows of the table of measurements; their `time_us` is 0."""
    return [
        {
            "operation": operation,
            "shape": "ceiling",
            "implementation": "torch",
            "time_us": 0.0,
            "gb_per_s": gb_per_s,
            "tflop_per_s": tflop_per_s,
            "bound": bound,
            "percent_of_ceiling": 100.0,
        }
        for operation, bound, gb_per_s, tflop_per_s in (
            ("copy", "memory", significant(ceilings.bytes_per_s / 1e9), 0.0),
            ("matmul", "compute", 0.0, significant(ceilings.flop_per_s / 1e12)),
        )
    ]


def _copy_rate(device: torch.device, timer: Timer, budget_s: float) -> float:
    num_bytes = _COPY_BYTES[device.type]
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer.seconds([lambda: target.copy_(source)], budget_s)


def _product_rate(device: torch.device, dtype: torch.dtype, timer: Timer, budget_s: float) -> float:
    size = _SQUARE[device.type]
    left, right = (random_numbers((size, size), dtype, device, seed=seed) for seed in (0, 1))
    out = torch.empty_like(left)
    return 2.0 * size**3 / timer.seconds([lambda: torch.matmul(left, right.t(), out=out)], budget_s)
