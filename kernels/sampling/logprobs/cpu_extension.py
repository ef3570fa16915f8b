"""Logprobs in C++ on the CPU: one call for all rows that ask for them."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from kernels.cpu_extension import load_library
from kernels.cpu_extension.library import NUMBER_TYPES
from kernels.sampling.logprobs.reference import Logprobs


class _Telling(ctypes.Structure):
    """The struct `Telling` of sampling/logprobs.cpp, where the fields are described."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "row_stride")),
        *((name, ctypes.c_int64) for name in ("num_threads", "type", "num_top")),
        *((name, ctypes.c_void_p) for name in ("logits", "row", "token")),
        *((name, ctypes.c_void_p) for name in ("chosen", "top_token", "top")),
    )


def logprobs(logits: Tensor, token: Tensor, num_top: Tensor) -> Logprobs | None:
    """
    Compute the same as `logprobs.reference.logprobs`, in C++; logits must be of one of
    `NUMBER_TYPES`, with adjacent elements of a row.

    Raises:
        MemoryError: No memory is left to rank logits in.
    """
    row = (num_top >= 0).nonzero()[:, 0].contiguous()
    if len(row) == 0:
        return None
    asked = num_top[row].clamp(max=logits.shape[1])
    shape = len(row), int(asked.max())
    chosen, top = torch.empty(len(row)), torch.empty(shape)
    top_token = torch.empty(shape, dtype=torch.int64)
    telling = _Telling(
        num_rows=len(row),
        vocab_size=logits.shape[1],
        row_stride=logits.stride(0),
        num_threads=torch.get_num_threads(),
        type=NUMBER_TYPES[logits.dtype],
        num_top=shape[1],
        logits=logits.data_ptr(),
        row=row.data_ptr(),
        token=token.data_ptr(),
        chosen=chosen.data_ptr(),
        top_token=top_token.data_ptr(),
        top=top.data_ptr(),
    )
    if not _library().tandem_sampling_tell(ctypes.byref(telling)):
        raise MemoryError(f"no memory to rank {shape[1]} of {logits.shape[1]} logits")
    return Logprobs(row=row, num_top=asked, chosen=chosen, top_token=top_token, top=top)


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library and declare the types of the functions called here."""
    library = load_library()
    library.tandem_sampling_telling_bytes.restype = ctypes.c_int64
    assert library.tandem_sampling_telling_bytes() == ctypes.sizeof(_Telling)
    library.tandem_sampling_tell.argtypes = (ctypes.POINTER(_Telling),)
    library.tandem_sampling_tell.restype = ctypes.c_bool
    return library
