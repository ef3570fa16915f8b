"""silu_mul in C++ on the CPU: one pass and one call."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from kernels.cpu_extension import load_library
from kernels.cpu_extension.library import NUMBER_TYPES


def silu_mul(gate_up: Tensor) -> Tensor:
    """Apply the gate; arguments are as in the package's `silu_mul`, unchecked."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype)
    _library().tandem_silu_mul(
        NUMBER_TYPES[gate_up.dtype],
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        num_rows,
        width,
        torch.get_num_threads(),
    )
    return out


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library and declare the types of the functions called here."""
    library = load_library()
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.tandem_silu_mul.argtypes = (count, pointer, count, pointer, count, count, count)
    library.tandem_silu_mul.restype = None
    return library
