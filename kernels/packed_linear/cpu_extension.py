"""packed_linear in C++ on the CPU."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from kernels.cpu_extension import load_library
from kernels.cpu_extension.library import NUMBER_TYPES

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


def panel() -> int:
    """Return the columns of a panel in the library; they depend on the processor's registers."""
    return int(_library().tandem_linear_panel())


def packed_linear(
    x: Tensor,
    packed: Tensor,
    num_columns: int,
    bias: Tensor | None,
    residual: Tensor | None,
    num_chunks: int,
    dtype: torch.dtype,
) -> Tensor:
    """
    Multiply; arguments are as in the package's `packed_linear`, unchecked. `packed` has panels of
    `panel` columns, in bfloat16 or float32.
    """
    num_rows, width = x.shape
    out = torch.empty((num_rows, num_columns), dtype=dtype) if residual is None else residual
    _library().tandem_linear(
        NUMBER_TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        packed.data_ptr(),
        packed.dtype == torch.bfloat16,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_columns,
        num_rows,
        width,
        num_columns,
        residual is not None,
        num_chunks,
        NUMBER_TYPES[dtype],
        torch.get_num_threads(),
    )
    return out


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library and declare the types of the functions called here."""
    library = load_library()
    library.tandem_linear_panel.restype = _COUNT
    library.tandem_linear.argtypes = (
        *(_COUNT, _POINTER, _COUNT, _POINTER, ctypes.c_int, _POINTER, _POINTER, _COUNT),
        *(_COUNT, _COUNT, _COUNT, ctypes.c_int, _COUNT, _COUNT, _COUNT),
    )
    library.tandem_linear.restype = None
    return library
