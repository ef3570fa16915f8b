"""Recording with PyTorch's profiler: operations, a GPU's kernels, spans for the parts of steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import device as torch_device
from torch.autograd.profiler import profile, record_function

from executor_svc.step.runner import ModelRunner
from tandem.profile import ProfileOptions

Arguments = ParamSpec("Arguments")
Outcome = TypeVar("Outcome")

PREFIX = "tandem."
"""Prefix of the names of our spans, which tells them from PyTorch's."""


class TorchRecorder:
    """
    A recorder of the thread that starts it, and of all work on a GPU.

    PyTorch keeps one profiler per thread and process; the code that makes recorders ensures that
    there is one at a time. Spans are put around the parts of a step only during a recording: steps
    that are not recorded pay nothing for them.
    """

    def __init__(self, runner: ModelRunner, device: torch_device, options: ProfileOptions) -> None:
        """
        Args:
            runner: Runner of the steps to record.
            device: Device of the runner.
            options: Details to record of each operation: stacks and shapes.
        """
        self._runner = runner
        # torch.profiler wraps this class, but first imports the compiler, which takes seconds and
        # 100 MiB. The type is Any because the methods have no types.
        self._profile: Any = profile(
            use_kineto=True,
            use_device="cuda" if device.type == "cuda" else None,
            with_stack=options.with_stack,
            record_shapes=options.record_shapes,
        )

    def start(self) -> None:
        """Begin to record this thread."""
        self._profile.__enter__()  # `stop` exits
        self._runner.mark_parts(marked)

    def mark(self) -> AbstractContextManager[object]:
        """Return a context manager that marks one step as a span of the trace."""
        return record_function(f"{PREFIX}step")

    def stop(self) -> None:
        """Stop recording: wait for the device, then sort the recorded events."""
        self._runner.unmark_parts()
        self._profile.__exit__(None, None, None)

    def write(self, path: Path) -> None:
        """Write the trace as JSON."""
        self._profile.export_chrome_trace(str(path))


def begin_in_this_thread() -> None:
    """
    Start PyTorch's profiler once, in the thread that imported PyTorch, and record nothing.

    Its library prints an error of its own if another thread is the first to record. If there is a
    CUDA device, do nothing: a profiler first started without CUDA would never see the device.
    """
    if not torch.cuda.is_available():
        with profile(use_kineto=True):
            pass


def marked(name: str, part: Callable[Arguments, Outcome]) -> Callable[Arguments, Outcome]:
    """Return a function that runs `part` inside a span of this name."""

    @wraps(part)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Outcome:
        with record_function(PREFIX + name):
            return part(*args, **kwargs)

    return run
