"""
Record what a function does to tensors, operation by operation, and compare a second run with it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.executor_svc.step.graphs.recording import (
    Buffer,
    GraphChanged,
    Memory,
    NotCapturable,
    Operand,
    Operation,
    Recording,
)

_HOST_READS = frozenset(
    {"item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__"}
)
"""Methods that wait for the device; some look at memory without an operation of their own."""

_SELECTIONS = frozenset({"index", "index_put", "index_put_impl"})
_OF_VALUES = "has a shape that depends on values"
_UNCAPTURABLE = {
    torch.Tag.data_dependent_output: "waits for the device",
    torch.Tag.dynamic_output_shape: _OF_VALUES,
    torch.Tag.nondeterministic_seeded: "draws from a generator",
}

_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})


def recorded(run: Callable[[], None]) -> Recording:
    """
    Run a call and record what it does.

    Raises:
        NotCapturable: It does what no graph can hold.
    """
    recording, made = Recording(), _Made()
    with _HostReads(), _Recorder(recording, made, expected=None):
        run()
    made.check_gone()
    for buffer in recording.buffers.values():
        if buffer.problem() is not None:
            raise NotCapturable(f"the call reads {buffer.what}, which does not outlive it")
    return recording


def recorded_again(run: Callable[[], None], recording: Recording) -> None:
    """
    Run a call that was recorded.

    Raises:
        GraphChanged: A buffer has moved or gone, or the call does anything else than before.
        NotCapturable: It does what no graph can hold.
    """
    recording.check_buffers()
    again, made = Recording(), _Made()
    with _HostReads(), _Recorder(again, made, expected=recording.operations):
        run()
    if len(again.operations) < len(recording.operations):
        missing = recording.operations[len(again.operations)]
        raise GraphChanged(f"the call ended before {missing}, which a graph would have done")
    made.check_gone()


class _Made:
    """Memory that a call allocates."""

    def __init__(self) -> None:
        self._what: dict[int, tuple[Memory, str]] = {}

    def __contains__(self, identity: int) -> bool:
        return identity in self._what

    def add(self, tensor: Tensor, operation: str) -> None:
        memory = Memory(tensor)
        self._what[memory.identity] = (memory, f"{_described(tensor)} of {operation}")

    def check_gone(self) -> None:
        """
        Look whether the call kept anything.

        Raises:
            NotCapturable: It did: the next graph of the pool would overwrite it.
        """
        if self._kept() is None:
            return
        gc.collect()
        kept = self._kept()
        if kept is not None:
            raise NotCapturable(f"the call keeps {kept}, whose memory other graphs use as well")

    def _kept(self) -> str | None:
        return next(
            (what for memory, what in self._what.values() if memory.storage() is not None), None
        )


class _HostReads(TorchFunctionMode):
    """Refuses methods that look at values."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS and isinstance(args[0], Tensor):
            raise NotCapturable(f"Tensor.{name} of {_described(args[0])} waits for the device")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Records operations; compares each with what is expected there, where something is."""

    def __init__(
        self, recording: Recording, made: _Made, *, expected: list[Operation] | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # has none
        self._recording = recording
        self._made = made
        self._expected = expected

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """
        Return False: nothing is compiled here, and True would import torch's compiler for seconds.
        """
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _selects(func):
            _refuse_masks(func, args[1])
        elif (why := _why_not(func)) is not None:
            raise NotCapturable(f"{func} {why}")
        self._add(
            Operation(_name(func), tuple(map(self._operand, _leaves((*args, *kwargs.values())))))
        )
        result = func(*args, **kwargs)
        for tensor in _leaves((result,)):
            if isinstance(tensor, Tensor):
                self._note_result(tensor, func)
        return result

    def _add(self, operation: Operation) -> None:
        operations = self._recording.operations
        if self._expected is not None:
            index = len(operations)
            if index >= len(self._expected):
                raise GraphChanged(f"the call goes on with {operation}, a graph would have ended")
            if not operation.repeats(self._expected[index]):
                raise GraphChanged(
                    f"the call does {operation}, a graph would have repeated "
                    f"{self._expected[index]}"
                )
        operations.append(operation)

    def _operand(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return Operand(
            shape=tuple(leaf.shape),
            stride=tuple(leaf.stride()),
            offset=int(leaf.storage_offset()),
            dtype=leaf.dtype,
            buffer=self._buffer(leaf),
        )

    def _buffer(self, tensor: Tensor) -> Buffer | None:
        identity = Memory.identity_of(tensor)
        if identity in self._made:
            return None
        known = self._recording.buffers.get(identity)
        if known is not None:
            return known
        memory, storage = Memory(tensor), tensor.untyped_storage()
        buffer = Buffer(
            memory=memory,
            data_ptr=storage.data_ptr(),
            num_bytes=storage.nbytes(),
            value=tensor.item() if tensor.ndim == 0 else None,
            what=_described(tensor),
        )
        self._recording.buffers[memory.identity] = buffer
        return buffer

    def _note_result(self, tensor: Tensor, func: Any) -> None:
        """Take up memory that an operation allocated; its operands' is known already."""
        identity = Memory.identity_of(tensor)
        if identity in self._made or identity in self._recording.buffers:
            return
        self._made.add(tensor, _name(func))
        self._recording.allocated_bytes += tensor.untyped_storage().nbytes()
        if func.overloadpacket.__name__ in _UNINITIALISED:
            is_float = tensor.is_floating_point()
            tensor.fill_(float("nan") if is_float else _most(tensor.dtype))


@functools.cache
def _name(func: Any) -> str:
    return str(func)


@functools.cache
def _selects(func: Any) -> bool:
    """Return whether an operation's shapes depend on values only where an index is a mask."""
    return func.overloadpacket.__name__.strip("_") in _SELECTIONS


@functools.cache
def _why_not(func: Any) -> str | None:
    """Return the reason that an operation cannot be captured; None if it can."""
    return next((why for tag, why in _UNCAPTURABLE.items() if tag in func.tags), None)


def _refuse_masks(func: Any, indices: object) -> None:
    masks = (leaf for leaf in _leaves((indices,)) if isinstance(leaf, Tensor))
    if any(mask.dtype in {torch.bool, torch.uint8} for mask in masks):
        raise NotCapturable(f"{func} with a mask {_OF_VALUES}")


def _leaves(values: Iterable[object]) -> Iterator[object]:
    """Yield the tensors and numbers of nested lists, as operations take and give them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _most(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else int(torch.iinfo(dtype).max)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
