"""A device's order of work as the host sees it: when steps begin and end, and what they leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Wait = Callable[[], list[Tensor]]
"""Waits for tensors on their way to the host; to be called once, on any thread."""


class Mark(Protocol):
    """A moment between two pieces of work."""

    def ns_since(self, earlier: Mark) -> int:
        """Nanoseconds between two marks of one queue that the device has passed."""


class DeviceQueue(Protocol):
    """What the runner needs of its device beside computing."""

    def mark(self) -> Mark:
        """The moment at which the device has done all it was given."""

    def fetch(self, tensors: Sequence[Tensor]) -> Wait:
        """
        Copy tensors as they are when the device has done all it was given, to the host, beside
        what it is given next.
        """


@dataclass(frozen=True, slots=True)
class HostMark:
    """A time of the host's clock."""

    at_ns: int

    def ns_since(self, earlier: Mark) -> int:
        """See `Mark`."""
        assert isinstance(earlier, HostMark), "marks of one queue are of one kind"
        return self.at_ns - earlier.at_ns


class HostQueue:
    """The CPU, which has done what it was given when the call is back."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns

    def mark(self) -> HostMark:
        """See `DeviceQueue`."""
        return HostMark(self._clock_ns())

    def fetch(self, tensors: Sequence[Tensor]) -> Wait:
        """See `DeviceQueue`."""
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies


@dataclass(frozen=True, slots=True)
class CudaMark:
    """An event with a time."""

    event: torch.cuda.Event

    def ns_since(self, earlier: Mark) -> int:
        """See `Mark`."""
        assert isinstance(earlier, CudaMark), "marks of one queue are of one kind"
        elapsed_ms = float(earlier.event.elapsed_time(self.event))
        return round(elapsed_ms * 1e6)


class CudaQueue:
    """
    The current stream of a CUDA device, and one beside it for what goes to the host.

    Neither call waits for the device. Of fetched tensors the device overwrites none as long as it
    is given at most `max_ahead` steps, of one fetch each, before it writes the same place again.
    """

    def __init__(self, device: torch.device, max_ahead: int) -> None:
        """Makes the device current in this thread: that is where Triton launches what it gets."""
        torch.cuda.set_device(device)
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._max_ahead = max_ahead
        self._fetched: deque[torch.cuda.Event] = deque()

    def mark(self) -> CudaMark:
        """See `DeviceQueue`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(torch.cuda.current_stream(self._device))
        return CudaMark(event)

    def fetch(self, tensors: Sequence[Tensor]) -> Wait:
        """See `DeviceQueue`."""
        steps = torch.cuda.current_stream(self._device)
        self._copies.wait_stream(steps)
        with torch.cuda.stream(self._copies):
            host = [_locked_like(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            done.record(self._copies)
        self._fetched.append(done)
        if len(self._fetched) >= self._max_ahead:
            steps.wait_event(self._fetched.popleft())

        def wait() -> list[Tensor]:
            done.synchronize()
            held.clear()
            return host

        held = list(tensors)  # their memory is not given to others while it is being read
        return wait


def _locked_like(tensor: Tensor) -> Tensor:
    """Page-locked memory, without which the copy would wait for the device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
