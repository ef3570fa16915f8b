"""
Causal attention over a paged KV cache: prefill chunks and decodes of one batch together, with keys
and values found through block tables only.

A plan is made once per step from lengths and block tables, and used by every layer with the same
window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import structlog
from torch import Tensor

from kernels.cpu_extension import ExtensionUnavailable, load_library
from kernels.dispatch import CPU_EXTENSION, Deferred, Operation
from kernels.paged_attention import cpu, cpu_extension, reference
from kernels.paged_attention.resident import plan_resident_decodes
from kernels.paged_attention.sequences import AttentionPlan, AttentionShape, PagedSequences

__all__ = [
    "AttentionPlan",
    "AttentionShape",
    "CpuExtension",
    "PagedSequences",
    "paged_attention",
    "plan_paged_attention",
    "plan_resident_decodes",
    "use_cpu_extension",
]


_log = structlog.get_logger(__name__)

CpuExtension = Literal["auto", "on", "off"]
"""Setting for attention in C++ on a CPU: if the library is available ("auto"), always, or never."""

_Planner = Callable[[PagedSequences, AttentionShape, int | None], AttentionPlan]

_operation: Operation[_Planner] = Operation(
    "paged_attention",
    reference.plan,
    {
        "cpu": ("cpu", cpu.plan),
        "cuda": ("triton", Deferred("kernels.paged_attention.triton_plan", "plan")),
    },
)


def use_cpu_extension(wanted: CpuExtension) -> str | None:
    """
    Let the CPU attend in C++ or not, from the next plan on and for the whole process.

    The library is built here if this machine has not built it yet, which takes seconds.

    Args:
        wanted: "on", "off" or "auto", which means "on" if the library is available; otherwise the
            reason is logged as a warning, and PyTorch computes.

    Returns:
        The reason why the library is not available, if "auto" asks for it; else None.

    Raises:
        ExtensionUnavailable: `wanted` is "on", and the library is not available.
    """
    if wanted == "off":
        _operation.withdraw("cpu", CPU_EXTENSION)
        return None
    try:
        load_library()
    except ExtensionUnavailable as error:
        _operation.withdraw("cpu", CPU_EXTENSION)
        if wanted == "on":
            raise
        _log.warning("cpu_extension_unavailable", reason=str(error), instead="cpu")
        return str(error)
    _operation.offer("cpu", CPU_EXTENSION, cpu_extension.plan)
    return None


def plan_paged_attention(
    sequences: PagedSequences,
    shape: AttentionShape,
    *,
    window: int | None = None,
) -> AttentionPlan:
    """
    Prepare one step's attention.

    Args:
        sequences: Lengths and block tables of the batch's rows.
        shape: Geometry of heads and cache, number type and device.
        window: Number of last positions that a query sees, its own included; None for all.

    Raises:
        ValueError: Lengths or tables contradict each other, or the device's kernels do not take
            heads of this size.
        TritonMissing: The device is a GPU and Triton is not installed.
    """
    query_len, seq_len = sequences.query_len, sequences.seq_len
    if len(query_len) != len(seq_len) or len(seq_len) != len(sequences.block_table):
        raise ValueError(
            f"{len(query_len)} query lengths, {len(seq_len)} sequence lengths and "
            f"{len(sequences.block_table)} block tables"
        )
    if len(query_len) and (query_len.min() < 1 or (seq_len < query_len).any()):
        raise ValueError("every row needs 1 <= query_len <= seq_len")
    capacity = sequences.block_table.shape[1] * shape.block_size
    if len(seq_len) and seq_len.max() > capacity:
        raise ValueError(f"a sequence of {seq_len.max()} exceeds its table of {capacity} positions")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    return _operation.on(shape.device)(sequences, shape, window)


def paged_attention(query: Tensor, kv_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """
    Compute attention; the keys and values of the queries' own positions must be in the cache
    already.

    Cache positions at or past a row's length are never used, whatever they hold.

    Args:
        query: Shape ``[T, H, D]``, rows of the plan one after another; last stride 1.
        kv_cache: Contiguous, shape ``[blocks, block_size, 2, K, D]``, keys before values; type of
            `query`.
        plan: Plan of this batch.
        scale: Factor of the scores, usually ``D ** -0.5``; positive.

    Returns:
        Shape ``[T, H, D]``, contiguous.

    Raises:
        ValueError: Shapes, types or strides are not those of the plan, or the scale is not
            positive.
    """
    shape = plan.shape
    if query.shape != (plan.num_queries, shape.num_heads, shape.head_dim) or query.stride(2) != 1:
        raise ValueError(
            f"query must have shape [{plan.num_queries}, {shape.num_heads}, {shape.head_dim}] and "
            f"last stride 1, got {list(query.shape)} with strides {list(query.stride())}"
        )
    expected = (shape.block_size, 2, shape.num_kv_heads, shape.head_dim)
    if kv_cache.shape[1:] != expected or not kv_cache.is_contiguous():
        raise ValueError(
            f"kv_cache must be contiguous of shape [blocks, {', '.join(map(str, expected))}], "
            f"got {list(kv_cache.shape)}"
        )
    if query.dtype != shape.dtype or kv_cache.dtype != shape.dtype:
        raise ValueError(f"planned for {shape.dtype}, got {query.dtype} and {kv_cache.dtype}")
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    return plan.attend(query, kv_cache, scale)
