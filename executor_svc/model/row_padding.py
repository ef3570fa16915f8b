"""
Padding of a matrix product's rows to few sizes, where each new number of rows costs memory and
time.
"""

from __future__ import annotations

import torch

_SMALLEST = (0, 1, 2, 4)
_STEP = 4
_STEPS_PER_DOUBLING = 8


def pads_rows(dtype: torch.dtype, device: torch.device) -> bool:
    """
    Tell whether matrix products of this type keep something for each number of rows.

    On the CPU products of 16-bit types generate code for each number of rows and keep it, about
    half a megabyte and a millisecond each; a CPU without float16 arithmetic does so for bfloat16
    alone. Products of float32, and those on other devices, keep nothing.
    """
    return device.type == "cpu" and dtype.itemsize == 2


def padded_rows(num_rows: int) -> int:
    """
    Return the smallest size that is at least `num_rows`.

    Sizes are 0, 1, 2, 4, then multiples of 4 up to 64, then 8 sizes between each power of two and
    the next: there are few, and beyond 32 rows less than an eighth is added.
    """
    for size in _SMALLEST:
        if num_rows <= size:
            return size
    power_below = 1 << ((num_rows - 1).bit_length() - 1)
    step = max(_STEP, power_below // _STEPS_PER_DOUBLING)
    return -(-num_rows // step) * step
