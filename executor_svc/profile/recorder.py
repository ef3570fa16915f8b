"""The interface of a recorder of steps: PyTorch's profiler in an executor with a model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class Recorder(Protocol):
    """
    One recording: started, stopped and written, each once and in this order.

    `start`, `mark` and `stop` are called by the thread that runs steps, the only one recorded;
    `write` may take seconds and is called by another thread.
    """

    def start(self) -> None:
        """Begin to record."""

    def mark(self) -> AbstractContextManager[object]:
        """Return a context manager that marks one step as a span of the trace."""

    def stop(self) -> None:
        """Stop recording, once the device has finished its work."""

    def write(self, path: Path) -> None:
        """Write the recording as a Chrome trace (JSON)."""
