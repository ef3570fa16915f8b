"""Running out of memory in a step: the errors that mean it, and the settings to lower."""

from __future__ import annotations

import torch

from tandem.errors import OutOfMemory
from tandem.link.batch import Batch

_UNTYPED = (
    "DefaultCPUAllocator",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
)
"""
Message texts: PyTorch has no error type for a host out of memory, nor Triton for a device.
PyTorch's type for a device is its allocator's alone: of what CUDA and cuBLAS allocate (graphs,
pinned memory, modules of kernels, workspaces) it tells as of any other failed call.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that the device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _UNTYPED)


def in_one_line(error: BaseException) -> str:
    """Return the first line of PyTorch's message, without its stack frames."""
    return str(error).partition("\n")[0]


def step_out_of_memory(error: BaseException, batch: Batch, kv_knob: str) -> OutOfMemory:
    """
    Return the error to report: what the step was doing and which settings make such steps smaller.

    Args:
        error: PyTorch's or Triton's error.
        batch: The step's batch.
        kv_knob: The setting that sizes the KV memory; less of it leaves activations more room.
    """
    num_rows, num_tokens = len(batch.row_slot), batch.num_tokens
    if (batch.row_num_tokens > 1).any():
        doing = f"computing {num_tokens} tokens, prompts among them,"
        advice = "lower chunked_prefill_size or max_total_tokens"
    else:
        doing = f"decoding {num_rows} sequences"
        advice = "lower max_batch_size"
    return OutOfMemory(
        f"out of memory while {doing} ({in_one_line(error)}): {advice}, or lower {kv_knob} so "
        "that the KV leaves more room"
    )
