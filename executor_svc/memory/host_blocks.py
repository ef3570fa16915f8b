"""Host copies of KV blocks, to which preempted sequences are swapped instead of recomputed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from executor_svc.device.free_memory import available_bytes
from executor_svc.device.out_of_memory import in_one_line, is_out_of_memory
from executor_svc.device.upload import upload
from tandem.errors import OutOfMemory
from tandem.link.batch import Int32Column
from tandem.wording import gib

_STAGING_BYTES = 32 << 20
"""Most bytes of device memory that one transfer may borrow; one block may always be borrowed."""

_CPU = torch.device("cpu")
_CUDA_SUCCESS = 0


class HostBlocks:
    """
    One tensor ``[num_blocks, num_layers, block_size, 2, num_kv_heads, head_dim]`` on the host, so
    that all layers of a block, and neighbouring blocks, travel in one transfer.

    Host blocks are numbered from 1. Transfers are queued on the device's current stream, in order
    with the steps' kernels: a block may be read or overwritten by the next call without waiting.
    On CUDA the memory is page-locked, without which the transfers would wait for each other.

    Source: swapping as in vLLM 0.2 (PagedAttention, arXiv:2309.06180 4.5); there every layer is a
    transfer of its own.
    """

    def __init__(self, num_blocks: int, layers: Sequence[Tensor]) -> None:
        """
        Allocate.

        Args:
            num_blocks: Number of host blocks.
            layers: KV tensors of the device, ``[B, block_size, 2, num_kv_heads, head_dim]`` each.

        Raises:
            OutOfMemory: The host has not enough memory, or refuses to lock it.
        """
        self.num_blocks = num_blocks
        self._layers = layers
        block = layers[0].shape[1:]
        shape = (num_blocks, len(layers), *block)
        self._block_bytes = len(layers) * block.numel() * layers[0].element_size()
        _check_fits(num_blocks * self._block_bytes)
        try:
            self._host = torch.zeros(shape, dtype=layers[0].dtype)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"{num_blocks} host blocks of {self._block_bytes} bytes do not fit the host "
                f"({in_one_line(error)}): lower swap_space_gb"
            ) from error
        if num_blocks and layers[0].device.type == "cuda":
            _lock_pages(self._host)

    @property
    def is_pinned(self) -> bool:
        """True if the pages are locked, so that transfers need no copy through another buffer."""
        return self._host.is_pinned()

    def write(self, block: Int32Column, host: Int32Column) -> None:
        """Copy device blocks to host blocks, ``[N]`` each; host blocks are distinct."""
        for part in self._parts(len(block)):
            source = upload(block[part], self._layers[0].device)
            staging = torch.stack([layer.index_select(0, source) for layer in self._layers], 1)
            for here, there in _runs(host[part]):
                self._host[there].copy_(staging[here], non_blocking=True)

    def read(self, host: Int32Column, block: Int32Column) -> None:
        """Copy host blocks to device blocks, ``[N]`` each; device blocks are distinct."""
        first = self._layers[0]
        for part in self._parts(len(block)):
            shape = (len(block[part]), *self._host.shape[1:])
            staging = torch.empty(shape, dtype=first.dtype, device=first.device)
            for here, there in _runs(host[part]):
                staging[here].copy_(self._host[there], non_blocking=True)
            destination = upload(block[part], first.device)
            for index, layer in enumerate(self._layers):
                layer.index_copy_(0, destination, staging[:, index])

    def _parts(self, num_blocks: int) -> Iterator[slice]:
        step = max(1, _STAGING_BYTES // self._block_bytes)
        return (slice(start, start + step) for start in range(0, num_blocks, step))


def _runs(host: Int32Column) -> Iterator[tuple[slice, slice]]:
    """Yield runs of neighbouring host blocks, as slices of the column and of host memory."""
    ends = np.flatnonzero(np.diff(host) != 1) + 1
    start = 0
    for end in [*ends.tolist(), len(host)]:
        first = int(host[start]) - 1
        yield slice(start, end), slice(first, first + end - start)
        start = end


def _check_fits(needed: int) -> None:
    free = available_bytes(_CPU)
    if free is not None and needed > free:
        raise OutOfMemory(
            f"the swap space of {gib(needed)} GiB does not fit the host's free memory of "
            f"{gib(free)} GiB: lower swap_space_gb"
        )


def _lock_pages(memory: Tensor) -> None:
    """
    Lock exactly these pages until the tensor is gone; PyTorch's own pinned tensors would round
    their size up to a power of two.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # bound in C++
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code != _CUDA_SUCCESS:
        raise OutOfMemory(
            f"the host refuses to lock {gib(memory.nbytes)} GiB of swap space (CUDA error "
            f"{code}): lower swap_space_gb or raise the limit of locked memory (ulimit -l)"
        )
    unlock = weakref.finalize(
        memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr()
    )
    unlock.atexit = False  # by then CUDA may be gone; the end of the process unlocks
