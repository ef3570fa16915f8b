"""rms_norm and add_rms_norm in C++ on the CPU: one pass and one call."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from kernels.cpu_extension import load_library
from kernels.cpu_extension.library import NUMBER_TYPES


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows; arguments are as in the package's `rms_norm`, unchecked."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    _library().tandem_rms_norm(
        NUMBER_TYPES[x.dtype],
        rows.data_ptr(),
        rows.stride(0),
        weight.contiguous().data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        width,
        eps,
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add and normalise rows; arguments are as in the package's `add_rms_norm`, unchecked."""
    return rms_norm(residual.add_(x), weight, eps)


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library and declare the types of the functions called here."""
    library = load_library()
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.tandem_rms_norm.argtypes = (
        *(count, pointer, count, pointer, pointer, count, count, ctypes.c_float, count),
    )
    library.tandem_rms_norm.restype = None
    return library
