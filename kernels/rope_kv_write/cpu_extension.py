"""rope_kv_write in C++ on the CPU: each token's row is read and written once, in one call."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from kernels.cpu_extension import load_library
from kernels.cpu_extension.library import NUMBER_TYPES


def rope_kv_write(
    qkv: Tensor,
    rotation: Tensor,
    kv_position: Tensor,
    kv_cache: Tensor,
    *,
    qk_norm: Tensor | None,
    norm_eps: float,
) -> Tensor:
    """
    Rotate and store; arguments are as in the package's `rope_kv_write`, unchecked. Overwrites
    `qkv`.

    Raises:
        IndexError: A position is past the end of the cache.
    """
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    num_positions = kv_cache.shape[0] * kv_cache.shape[1]
    outside = _library().tandem_rope_kv_write(
        NUMBER_TYPES[qkv.dtype],
        qkv.data_ptr(),
        qkv.stride(0),
        rotation.contiguous().data_ptr(),
        kv_position.contiguous().data_ptr(),
        kv_cache.data_ptr(),
        num_positions,
        None if qk_norm is None else qk_norm.contiguous().data_ptr(),
        norm_eps,
        *(num_tokens, num_heads, num_kv_heads, head_dim),
        torch.get_num_threads(),
    )
    if outside >= 0:
        raise IndexError(f"position {outside} is outside a cache of {num_positions} positions")
    return qkv[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library and declare the types of the functions called here."""
    library = load_library()
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.tandem_rope_kv_write.argtypes = (
        *(count, pointer, count, pointer, pointer, pointer, count, pointer, ctypes.c_float),
        *(count, count, count, count, count),
    )
    library.tandem_rope_kv_write.restype = count
    return library
