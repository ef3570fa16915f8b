"""
A device's queue of work as the host sees it: times at which steps begin and end, and fetching of
their results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Wait = Callable[[], list[Tensor]]
"""Function that waits for tensors on their way to the host; called once, on any thread."""


class Mark(Protocol):
    """A moment between two pieces of work."""

    def ns_since(self, earlier: Mark) -> int:
        """Return the nanoseconds between two marks of one queue that the device has passed."""


class DeviceQueue(Protocol):
    """Operations that the runner needs of its device beside computing."""

    def mark(self) -> Mark:
        """Mark the moment at which the device has done all work queued so far."""

    def fetch(self, tensors: Sequence[Tensor]) -> Wait:
        """
        Copy tensors to the host as they are once all work queued so far is done; the copy runs
        beside work that is queued later.
        """

    def after(self, arrive: Callable[[], None]) -> DeviceQueue:
        """
        Return a queue beside this one, for one step whose tensors come from another device: it
        fetches and marks once `arrive`, which makes this thread or the device wait for them, has
        returned. Work that is queued here later does not wait.
        """


@dataclass(slots=True, eq=False)
class HostMark:
    """A time of the host's clock; 0 until it is known."""

    at_ns: int

    def ns_since(self, earlier: Mark) -> int:
        """See `Mark`."""
        assert isinstance(earlier, HostMark), "marks of one queue are of one kind"
        return self.at_ns - earlier.at_ns


class HostQueue:
    """Queue of the CPU, which has done its work when a call returns."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns

    def mark(self) -> HostMark:
        """See `DeviceQueue`."""
        return HostMark(self._clock_ns())

    def fetch(self, tensors: Sequence[Tensor]) -> Wait:
        """See `DeviceQueue`."""
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies

    def after(self, arrive: Callable[[], None]) -> DeviceQueue:
        """See `DeviceQueue`."""
        return _ArrivingHostQueue(self._clock_ns, arrive)


class _ArrivingHostQueue(HostQueue):
    """A step's tensors that other processes of a CPU send."""

    def __init__(self, clock_ns: Callable[[], int], arrive: Callable[[], None]) -> None:
        super().__init__(clock_ns)
        self._arrive = arrive
        self._arrived = HostMark(0)

    def mark(self) -> HostMark:
        """See `DeviceQueue`; the time is known once a function of `fetch` has waited."""
        return self._arrived

    def fetch(self, tensors: Sequence[Tensor]) -> Wait:
        """See `DeviceQueue`; nothing else writes the tensors."""

        def wait() -> list[Tensor]:
            self._arrive()
            self._arrived.at_ns = self._arrived.at_ns or self._clock_ns()
            return list(tensors)

        return wait


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
    The current stream of a CUDA device, and a second stream for copies to the host.

    Neither call waits for the device. The device overwrites no tensor that is still being fetched,
    as long as it writes a place again `max_ahead` steps later at the earliest, with one fetch per
    step.
    """

    def __init__(self, device: torch.device, max_ahead: int) -> None:
        """Make the device current in this thread, because Triton launches kernels there."""
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

        held = list(tensors)  # keeps the allocator from reusing their memory while it is read
        return wait

    def after(self, arrive: Callable[[], None]) -> DeviceQueue:
        """See `DeviceQueue`."""
        return _ArrivingCudaQueue(self, self._copies, arrive)


class _ArrivingCudaQueue:
    """A step's tensors that another GPU sends; the stream of copies waits for them."""

    def __init__(
        self, queue: CudaQueue, copies: torch.cuda.Stream, arrive: Callable[[], None]
    ) -> None:
        self._queue = queue
        self._copies = copies
        with torch.cuda.stream(copies):
            arrive()

    def mark(self) -> CudaMark:
        """See `DeviceQueue`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(self._copies)
        return CudaMark(event)

    def fetch(self, tensors: Sequence[Tensor]) -> Wait:
        """See `DeviceQueue`."""
        return self._queue.fetch(tensors)

    def after(self, arrive: Callable[[], None]) -> DeviceQueue:
        """See `DeviceQueue`."""
        return _ArrivingCudaQueue(self._queue, self._copies, arrive)


def queue_of(
    device: torch.device, clock_ns: Callable[[], int], max_ahead: int
) -> CudaQueue | HostQueue:
    """Make the queue of a device; the clock is for a CPU, `max_ahead` for CUDA."""
    return CudaQueue(device, max_ahead) if device.type == "cuda" else HostQueue(clock_ns)


def _locked_like(tensor: Tensor) -> Tensor:
    """Allocate page-locked memory, without which the copy would wait for the device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
