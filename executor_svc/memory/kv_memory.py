"""The paged KV memory: its size, its tensors, and their suspension."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from executor_svc.device.fixed_memory import FixedMemory, fixed_memory
from executor_svc.device.free_memory import available_bytes
from executor_svc.device.huge_pages import ask_for_huge_pages
from executor_svc.device.out_of_memory import in_one_line, is_out_of_memory
from executor_svc.memory.host_blocks import HostBlocks
from executor_svc.model.config import ModelConfig
from tandem.engine_config import MAX_GIB
from tandem.errors import InvalidConfig, OutOfMemory
from tandem.kv_memory.budget import block_bytes
from tandem.link.batch import Int32Column
from tandem.link.commands import KvMode
from tandem.wording import GIB, gib

UNTOUCHED_BYTES = 64 << 20
"""Size from which the C library takes new memory from the system and reuses none that was freed."""

_HOST = torch.device("cpu")

_HERE = {None, KvMode.PERSIST}
"""Suspension modes, None for no suspension, in which the device holds the memory."""


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """
    Return the bytes of one block: tokens x layers x key heads x head size x 2 (keys, values) x
    bytes per number.
    """
    return block_bytes(
        num_layers=config.num_layers,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bytes_per_number=dtype.itemsize,
    )


def host_blocks_within(swap_space_gb: float, bytes_per_block: int) -> int:
    """
    Return the number of host blocks that fit into so many GiB, rounded down.

    Raises:
        InvalidConfig: `swap_space_gb` is not from 0 to MAX_GIB.
    """
    if not 0 <= swap_space_gb <= MAX_GIB:
        message = f"swap_space_gb must be at least 0 and at most {MAX_GIB}, got {swap_space_gb}"
        raise InvalidConfig(message)
    return int(swap_space_gb * GIB) // bytes_per_block


class KvMemory:
    """
    One tensor per layer, ``[num_blocks + 1, block_size, 2, num_kv_heads, head_dim]``, keys before
    values.

    The scheduler assigns blocks 1 to `num_blocks` to slots. Block 0 is a dummy that no block table
    names. Contents are never cleared: no reader looks past a sequence's length. The scheduler
    assigns host blocks 1 to `num_host_blocks` too; suspensions leave them alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_host_blocks: int = 0,
        shares_layers: bool = False,
        keeps_addresses: bool = False,
        kv_knob: str = "max_num_blocks",
    ) -> None:
        """
        Allocate.

        Args:
            config: Geometry of layers and heads.
            num_blocks: Usable blocks.
            block_size: Tokens per block.
            dtype: Type of keys and values.
            device: Device of the tensors.
            num_host_blocks: Blocks that can be swapped out.
            shares_layers: All layers are one tensor, which takes less memory and is enough to
                measure what steps need.
            keeps_addresses: Layers keep their addresses over any suspension.
            kv_knob: The setting that sizes the KV memory, for advice in errors.

        Raises:
            OutOfMemory: The blocks do not fit; says how many would.
            InvalidConfig: The device cannot keep addresses.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_block = kv_bytes_per_block(config, block_size, dtype)
        num_tensors = 1 if shares_layers else config.num_layers
        per_block = self.bytes_per_block * num_tensors // config.num_layers
        _check_fits(num_blocks, per_block, device, kv_knob)
        shape = (num_blocks + 1, block_size, 2, config.num_kv_heads, config.head_dim)
        num_bytes = math.prod(shape) * dtype.itemsize
        zeros = partial(_zeros, num_bytes, device, keeps=keeps_addresses)
        try:
            memories = [zeros() for _ in range(num_tensors)]
        except (RuntimeError, OutOfMemory) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"{num_blocks} KV blocks of {per_block} bytes do not fit on {device} "
                f"({in_one_line(error)}): lower {kv_knob}"
            ) from error
        tensors = [memory.tensor.view(dtype).view(shape) for memory in memories]
        times = config.num_layers // num_tensors
        self.layers: tuple[Tensor, ...] = tuple(tensors * times)
        self._memories = tuple(memories * times)
        self.keeps_addresses = keeps_addresses
        self._kv_knob = kv_knob
        self._host = HostBlocks(num_host_blocks, self.layers) if num_host_blocks else None
        self._suspended: KvMode | None = None
        self._host_copies: dict[int, Tensor] = {}
        """Host copies of the offloaded layers, by index."""

    @property
    def device_bytes(self) -> int:
        """Bytes that the tensors take now, dummy block included; 0 while offloaded or dropped."""
        return sum(layer.nbytes for layer in self.layers) if self._suspended in _HERE else 0

    @property
    def num_host_blocks(self) -> int:
        """Blocks that can be swapped out."""
        return 0 if self._host is None else self._host.num_blocks

    @property
    def is_suspended(self) -> bool:
        """True between `suspend` and `resume`."""
        return self._suspended is not None

    def copy_blocks(self, source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks, int64 ``[C]`` to int64 ``[C]``; all are read before any is written."""
        for layer in self.layers:
            layer.index_copy_(0, destination, layer.index_select(0, source))

    def swap_out(self, block: Int32Column, host: Int32Column) -> None:
        """Copy device blocks to host blocks, ``[N]`` each; there must be host blocks."""
        assert self._host is not None, "the slot state lets no swap through without host blocks"
        self._host.write(block, host)

    def swap_in(self, host: Int32Column, block: Int32Column) -> None:
        """Copy host blocks to device blocks, ``[N]`` each; there must be host blocks."""
        assert self._host is not None, "the slot state lets no swap through without host blocks"
        self._host.read(host, block)

    def warm_up(self) -> None:
        """Swap a block out and in, where there are host blocks: the first copies take longer."""
        if self.num_host_blocks:
            one = np.ones(1, np.int32)
            self.swap_out(one, one)
            self.swap_in(one, one)

    def check_suspension(self, mode: KvMode) -> None:
        """
        Check that the host has room for what `suspend` copies to it. The system itself refuses no
        allocation: it ends a process that writes to more memory than there is.

        Raises:
            OutOfMemory: It has not; nothing has changed.
        """
        if mode is not KvMode.OFFLOAD or self.is_suspended:
            return
        is_on_host = self.layers[0].device.type == "cpu"  # which each copied layer is given back to
        needed = self.layers[0].nbytes if is_on_host else self.device_bytes
        free = available_bytes(_HOST)
        if free is not None and needed > free:
            raise OutOfMemory(
                f"the host has {gib(free)} GiB of free memory and not the {gib(needed)} GiB that a "
                "suspension with OFFLOAD copies to it: suspend with PERSIST or RECOMPUTE, free "
                f"memory of the host, or lower {self._kv_knob}"
            )

    def suspend(self, mode: KvMode) -> None:
        """
        Give memory back as `mode` says; a second suspension does nothing.

        OFFLOAD copies and frees layer by layer, so that at most one layer is held twice.

        Raises:
            OutOfMemory: As `check_suspension`.
        """
        if self.is_suspended:
            return
        self.check_suspension(mode)
        self._suspended = mode
        if mode is KvMode.PERSIST:
            return
        for index, (layer, memory) in enumerate(zip(self.layers, self._memories, strict=True)):
            if mode is KvMode.OFFLOAD:
                self._host_copies[index] = layer.to("cpu", copy=True)
            memory.give_back()
        if self.layers[0].device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self) -> None:
        """
        Undo `suspend`. Contents are the same, bit for bit, after PERSIST and OFFLOAD, and undefined
        after RECOMPUTE.

        Raises:
            OutOfMemory: Other programs have taken the memory. The KV memory stays suspended, and
                may be resumed later.
        """
        offloaded = self._suspended is KvMode.OFFLOAD
        gone = self._host_copies if offloaded else range(len(self.layers))
        for index in [] if self._suspended in _HERE else list(gone):
            _take_back(self._memories[index], self.layers[index])
            if offloaded:
                self.layers[index].copy_(self._host_copies.pop(index))
        self._suspended = None


def _zeros(num_bytes: int, device: torch.device, *, keeps: bool) -> FixedMemory:
    """
    Allocate zeros; with `keeps`, the address stays the same over suspensions.

    Large memory of a CPU is left untouched: the system gives pages of zeros when they are first
    written, so that unused KV blocks take none.
    """
    memory = fixed_memory(num_bytes, device) if keeps else _MovingMemory(num_bytes, device)
    ask_for_huge_pages(memory.tensor)
    if device.type != "cpu" or num_bytes < UNTOUCHED_BYTES:
        memory.tensor.zero_()
    return memory


class _MovingMemory:
    """As `FixedMemory`, but with another address each time it is taken back."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes = num_bytes
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give_back(self) -> None:
        self.tensor.untyped_storage().resize_(0)

    def take_back(self) -> None:
        self.tensor.untyped_storage().resize_(self._num_bytes)


def _take_back(memory: FixedMemory, layer: Tensor) -> None:
    try:
        memory.take_back()
    except (RuntimeError, OutOfMemory) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"no memory is left on {layer.device} for the KV that was given back "
            f"({in_one_line(error)}): free what was taken meanwhile, then resume again"
        ) from error
    ask_for_huge_pages(layer)


def _check_fits(num_blocks: int, bytes_per_block: int, device: torch.device, kv_knob: str) -> None:
    free = available_bytes(device)
    needed = (num_blocks + 1) * bytes_per_block
    if free is None or needed <= free:
        return
    fitting = max(0, free // bytes_per_block - 1)
    raise OutOfMemory(
        f"{num_blocks} KV blocks need {gib(needed)} GiB but only {gib(free)} GiB are "
        f"free on {device}: lower {kv_knob}, at most {fitting} blocks fit"
    )
