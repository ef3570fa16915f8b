"""What records steps: PyTorch's profiler in an executor with a model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class Recorder(Protocol):
    """
    One recording: started, stopped and written, each once and in this order.

    `start`, `mark` and `stop` belong to the thread that runs steps, of which alone is recorded what
    it does; `write` may take seconds and belongs to another.
    """

    def start(self) -> None:
        """Record from here on."""

    def mark(self) -> AbstractContextManager[object]:
        """A span of the trace for one step."""

    def stop(self) -> None:
        """Record no more; waits for the device."""

    def write(self, path: Path) -> None:
        """Write what was recorded as a Chrome trace (JSON)."""
