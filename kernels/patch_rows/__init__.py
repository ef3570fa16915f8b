"""Changes scattered words of a tensor on a device, such as packed inputs of decode rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import Deferred, Operation
from kernels.patch_rows import reference
from kernels.patch_rows.packed_rows import PackedRows, RowField, RowPatch

__all__ = ["PackedRows", "RowField", "RowPatch", "patch_rows"]

_operation = Operation(
    "patch_rows",
    reference.patch_rows,
    {"cuda": ("triton", Deferred("kernels.patch_rows.triton_kernel", "patch_rows"))},
)


def patch_rows(words: Tensor, patch: Tensor) -> None:
    """
    Write some words in place, without reading on the host.

    Args:
        words: int32, contiguous, shape ``[W]``.
        patch: int32, contiguous, shape ``[2, N]`` on the device of `words`: the place of each word,
            distinct and in [0, W), then the words. A negative place is skipped, so that a patch of
            fixed size may hold fewer. Places are checked by `RowPatch`, not here.

    Raises:
        ValueError: Shapes, types, strides or devices are not as described.
    """
    if words.dtype != torch.int32 or words.ndim != 1 or not words.is_contiguous():
        raise ValueError(
            f"words must be int32, contiguous, of shape [W], got {words.dtype} {list(words.shape)}"
        )
    is_shaped = patch.ndim == 2 and patch.shape[0] == 2 and patch.is_contiguous()
    if patch.dtype != torch.int32 or not is_shaped or patch.device != words.device:
        raise ValueError(
            f"patch must be int32, contiguous, of shape [2, N], on {words.device}, "
            f"got {patch.dtype} {list(patch.shape)} on {patch.device}"
        )
    _operation.on(words.device)(words, patch)
