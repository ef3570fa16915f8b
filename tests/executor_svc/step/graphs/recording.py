"""
Record of a call: operations on tensors and the memory they used, comparable with another call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions


class NotCapturable(RuntimeError):
    """A call does what no graph can hold."""


class GraphChanged(RuntimeError):
    """A replay differs from the capture: a real graph would have done something else."""


class Memory:
    """A tensor's memory, held weakly, as a graph does: it may go, its identity stays taken."""

    def __init__(self, tensor: Tensor) -> None:
        ref: Any = reductions.StorageWeakRef  # has no types
        self._ref = ref(tensor.untyped_storage())
        self.identity = int(self._ref.cdata)

    @staticmethod
    def identity_of(tensor: Tensor) -> int:
        """
        Return the identity of a tensor's memory; no other memory gets it while it is held, even
        weakly.
        """
        return int(tensor.untyped_storage()._cdata)

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage; None once it is freed."""
        revive: Any = torch.UntypedStorage._new_with_weak_ptr
        found: torch.UntypedStorage | None = revive(self.identity)
        return found


@dataclass(frozen=True, slots=True)
class Buffer:
    """
    Memory that was there before the call.

    `value` is that of a tensor with one number and no dimension: where it is gone afterwards, it
    was a number in the code, and a graph repeats it.
    """

    memory: Memory
    data_ptr: int
    num_bytes: int
    value: object
    what: str

    def is_number(self) -> bool:
        """Return whether the tensor was only ever a number in the code."""
        return self.value is not None and self.memory.storage() is None

    def problem(self) -> str | None:
        """Return the reason that a graph could not use it now; None if it could."""
        if self.is_number():
            return None
        storage = self.memory.storage()
        if storage is None:
            return "is gone"
        if storage.nbytes() != self.num_bytes or storage.data_ptr() != self.data_ptr:
            return "has moved"
        return None


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as an operation got it: of a buffer, or of memory that the call allocated itself."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    buffer: Buffer | None

    def repeats(self, other: Operand) -> bool:
        """Return whether a graph that was given `other` would have worked on this one."""
        same = (self.shape, self.stride, self.offset, self.dtype) == (
            other.shape,
            other.stride,
            other.offset,
            other.dtype,
        )
        if not same or (self.buffer is None) != (other.buffer is None):
            return False
        if self.buffer is None or other.buffer is None:
            return True
        if other.buffer.is_number():
            return self.buffer.value == other.buffer.value
        return self.buffer.memory.identity == other.buffer.memory.identity

    def __str__(self) -> str:
        where = "made by the call" if self.buffer is None else "a buffer"
        return f"{self.dtype} {list(self.shape)} ({where})"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch with what it was given: tensors as `Operand`, all else as it is."""

    name: str
    operands: tuple[object, ...]

    def repeats(self, other: Operation) -> bool:
        """Return whether a graph would have repeated `other` as this operation."""
        if self.name != other.name or len(self.operands) != len(other.operands):
            return False
        pairs = zip(self.operands, other.operands, strict=True)
        return all(
            mine.repeats(theirs)
            if isinstance(mine, Operand) and isinstance(theirs, Operand)
            else repr(mine) == repr(theirs)  # NaN does not equal itself
            for mine, theirs in pairs
        )

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.operands))})"


@dataclass(slots=True)
class Recording:
    """
    Operations and memory of one call.

    Attributes:
        operations: Operations in order.
        buffers: Memory it used that was there before, by the identity of its storage.
        allocated_bytes: Bytes of all memory that it allocated.
    """

    operations: list[Operation] = field(default_factory=list)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    allocated_bytes: int = 0

    def check_buffers(self) -> None:
        """
        Look whether all buffers are where they were.

        Raises:
            GraphChanged: One is not.
        """
        for buffer in self.buffers.values():
            problem = buffer.problem()
            if problem is not None:
                raise GraphChanged(
                    f"the buffer {buffer.what} {problem} since the graph was captured"
                )
