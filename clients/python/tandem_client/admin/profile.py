"""Profiler traces of the executor's steps: the request for one, and its result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from tandem.admin.v1 import admin_service_pb2 as admin
from tandem.errors import CorruptMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileProgress:
    """Progress of a recording; see tandem.common.v1.ProfileProgress."""

    num_steps: int
    elapsed_s: float
    is_recorded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """
    A finished recording.

    Attributes:
        trace: A file in Chrome's trace event format, compressed with gzip; chrome://tracing and
            ui.perfetto.dev open it.
        num_steps: Number of steps in the trace; 0 if no step ran in time.
        elapsed_s: Seconds from the first possible step to the end of the recording.
    """

    trace: bytes
    num_steps: int
    elapsed_s: float


def request_of(
    num_steps: int | None, duration_s: float | None, *, with_stack: bool, record_shapes: bool
) -> admin.ProfileRequest:
    """Return the request with these options; None leaves an option to the server."""
    request = admin.ProfileRequest()
    options = request.options
    options.with_stack, options.record_shapes = with_stack, record_shapes
    if num_steps is not None:
        options.num_steps = num_steps
    if duration_s is not None:
        options.duration_s = duration_s
    return request


class Recording:
    """The messages of one call, put together."""

    def __init__(self, on_progress: Callable[[ProfileProgress], None] | None) -> None:
        """
        Args:
            on_progress: Called with each progress of the recording.
        """
        self._on_progress = on_progress
        self._trace = bytearray()
        self._digest = ""
        self._last = ProfileProgress(num_steps=0, elapsed_s=0.0, is_recorded=False)

    def add(self, message: admin.ProfileResponse) -> None:
        """Read the next message."""
        if message.HasField("progress"):
            said = message.progress
            self._last = ProfileProgress(
                num_steps=said.num_steps, elapsed_s=said.elapsed_s, is_recorded=said.is_recorded
            )
            if self._on_progress is not None:
                self._on_progress(self._last)
        else:
            self._trace += message.trace.chunk
            self._digest = message.trace.sha256

    def profile(self) -> Profile:
        """
        Return the recording after its last message.

        Raises:
            CorruptMessage: The trace does not match its checksum, or has no checksum.
        """
        if hashlib.sha256(self._trace).hexdigest() != self._digest:
            raise CorruptMessage("the trace did not arrive whole: record it again")
        last = self._last
        return Profile(trace=bytes(self._trace), num_steps=last.num_steps, elapsed_s=last.elapsed_s)
