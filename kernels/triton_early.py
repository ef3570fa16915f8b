"""The first statement of kernels that can be launched early (`early_launch`)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_early(EARLY: tl.constexpr) -> None:
    """
    If EARLY, wait until the kernel before has ended, then let the next one's programs start.

    No memory may be read or written before: the kernel before may still be writing it, or reading
    what is written here.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
