"""
Attention of decodes with lengths and block tables on the device: a plan made once reads their
contents each time it runs, as a captured graph needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import Deferred, Operation
from kernels.paged_attention.sequences import AttentionPlan, AttentionShape


@dataclass(frozen=True, slots=True)
class DensePlan:
    """
    The definition: every row attends to all positions of its table, and those past its length are
    masked.

    Shapes do not depend on lengths, and nothing is read on the host.
    """

    shape: AttentionShape
    window: int | None
    block_table: Tensor
    seq_len: Tensor

    @property
    def num_queries(self) -> int:
        """Number of queries, one per row."""
        return len(self.seq_len)

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """Compute attention; arguments and result are as in `paged_attention`, unchecked."""
        pages = kv_cache[self.block_table.long()]  # [R, M, block_size, 2, K, D]
        key_at = torch.arange(pages.shape[1] * pages.shape[2], device=query.device)
        seen = key_at < self.seq_len[:, None]
        if self.window is not None:
            seen &= key_at >= self.seq_len[:, None] - self.window
        # masked positions may hold anything, NaN included: they are replaced, never multiplied
        kv = torch.where(seen[:, :, None, None, None], pages.flatten(1, 2), 0).float()
        key, value = kv.unbind(2)
        heads = (len(query), self.shape.num_kv_heads, self.shape.group_size, self.shape.head_dim)
        grouped = query.float().reshape(heads)
        scores = torch.einsum("rkgd,rlkd->rkgl", grouped, key) * scale
        here = seen[:, None, None]
        weights = scores.masked_fill(~here, float("-inf")).softmax(dim=-1)
        weights = torch.where(here, weights, 0)  # a row that sees nothing gets zeros
        return torch.einsum("rkgl,rlkd->rkgd", weights, value).flatten(1, 2).to(query.dtype)


def _dense_plan(
    block_table: Tensor, seq_len: Tensor, shape: AttentionShape, window: int | None
) -> AttentionPlan:
    return DensePlan(shape, window, block_table, seq_len)


_operation: Operation[Callable[[Tensor, Tensor, AttentionShape, int | None], AttentionPlan]] = (
    Operation(
        "resident_decode_attention",
        _dense_plan,
        {
            "cuda": (
                "triton",
                Deferred("kernels.paged_attention.triton_plan", "plan_resident_decodes"),
            )
        },
    )
)


def plan_resident_decodes(
    block_table: Tensor, seq_len: Tensor, shape: AttentionShape, *, window: int | None = None
) -> AttentionPlan:
    """
    Prepare attention of rows with one query each, at each row's last position.

    Args:
        block_table: int32 ``[R, M]`` on the device, contiguous; entries past a row's length are
            any valid blocks.
        seq_len: int32 ``[R]`` on the device; 0 for rows of padding, with zeros as their result.
            Read when the plan runs, and at most ``M * block_size`` then.
        shape: Geometry of heads and cache, number type and device.
        window: Number of last positions that a query sees, its own included; None for all.

    Raises:
        ValueError: Shapes, types or strides are not as described, or the device's kernels do not
            take heads of this size.
        TritonMissing: The device is a GPU and Triton is not installed.
    """
    is_table = block_table.ndim == 2 and block_table.is_contiguous()
    if block_table.dtype != torch.int32 or not is_table:
        raise ValueError(
            f"block_table must be int32, contiguous, of shape [R, M], got {block_table.dtype} "
            f"{list(block_table.shape)}"
        )
    if seq_len.dtype != torch.int32 or seq_len.shape != block_table.shape[:1]:
        raise ValueError(
            f"seq_len must be int32 of shape [{len(block_table)}], got {seq_len.dtype} "
            f"{list(seq_len.shape)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    return _operation.on(shape.device)(block_table, seq_len, shape, window)
