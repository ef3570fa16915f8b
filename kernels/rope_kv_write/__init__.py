"""
Per-head normalisation, rotary positions and the write of keys and values into the paged cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import CPU_EXTENSION, Deferred, Operation
from kernels.rope_kv_write import cpu, cpu_extension, reference

__all__ = ["rope_kv_write", "use_cpu_extension"]


_operation = Operation(
    "rope_kv_write",
    reference.rope_kv_write,
    {
        "cpu": ("cpu", cpu.rope_kv_write),
        "cuda": ("triton", Deferred("kernels.rope_kv_write.triton_kernel", "rope_kv_write")),
    },
)


def use_cpu_extension(*, wanted: bool) -> None:
    """Let a CPU do this in C++ or not, for the whole process; C++ needs the library loaded."""
    _operation.withdraw("cpu", CPU_EXTENSION)
    if wanted:
        _operation.offer("cpu", CPU_EXTENSION, cpu_extension.rope_kv_write)


def rope_kv_write(
    qkv: Tensor,
    rotation: Tensor,
    kv_position: Tensor,
    kv_cache: Tensor,
    *,
    qk_norm: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """
    Rotate queries and keys, and store keys and values at their cache positions.

    Args:
        qkv: Shape ``[T, (H + 2 * K) * D]``: H query heads, K key heads, K value heads; rotary pairs
            are neighbours ``(2i, 2i + 1)``. May be overwritten.
        rotation: float32 ``[T, D / 2, 2]``, cosine and sine of each token's position and pair.
        kv_position: int64 ``[T]``, block * block_size + offset in block; no two equal. Tokens of
            padding have positions in block 0, which is never read and where equal ones are allowed,
            or negative positions: their keys and values are lost.
        kv_cache: Type of `qkv`, contiguous, shape ``[blocks, block_size, 2, K, D]``, keys before
            values.
        qk_norm: Type of `qkv`, ``[H + K, D]``, scale of a per-head rms_norm before the rotation;
            None for no normalisation.
        norm_eps: Added to the mean square of that normalisation.

    Returns:
        Rotated queries, shape ``[T, H, D]``; possibly a view of `qkv`.

    Raises:
        ValueError: Shapes, types or strides are not as described.
    """
    _check(qkv, rotation, kv_position, kv_cache, qk_norm)
    run = _operation.on(qkv.device)
    return run(qkv, rotation, kv_position, kv_cache, qk_norm=qk_norm, norm_eps=norm_eps)


def _check(
    qkv: Tensor,
    rotation: Tensor,
    kv_position: Tensor,
    kv_cache: Tensor,
    qk_norm: Tensor | None,
) -> None:
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"qkv of shape {list(qkv.shape)} does not fit a cache of shape {list(kv_cache.shape)}"
        )
    if qkv.dtype != kv_cache.dtype or not kv_cache.is_contiguous() or kv_cache.shape[2] != 2:
        raise ValueError(
            f"kv_cache must be {qkv.dtype}, contiguous, of shape [blocks, block_size, 2, K, D], "
            f"got {kv_cache.dtype} {list(kv_cache.shape)}"
        )
    if rotation.dtype != torch.float32 or rotation.shape != (num_tokens, head_dim // 2, 2):
        raise ValueError(
            f"rotation must be float32 of shape [{num_tokens}, {head_dim // 2}, 2], "
            f"got {rotation.dtype} {list(rotation.shape)}"
        )
    if kv_position.dtype != torch.int64 or kv_position.shape != (num_tokens,):
        raise ValueError(
            f"kv_position must be int64 of shape [{num_tokens}], "
            f"got {kv_position.dtype} {list(kv_position.shape)}"
        )
    if qk_norm is not None and (
        qk_norm.dtype != qkv.dtype or qk_norm.shape != (num_heads + num_kv_heads, head_dim)
    ):
        raise ValueError(
            f"qk_norm must be {qkv.dtype} of shape [{num_heads + num_kv_heads}, {head_dim}], "
            f"got {qk_norm.dtype} {list(qk_norm.shape)}"
        )
