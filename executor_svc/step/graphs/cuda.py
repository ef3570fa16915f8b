"""Graphs on a CUDA device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from executor_svc.device.choice import CaptureBroken
from executor_svc.device.out_of_memory import in_one_line, is_out_of_memory
from executor_svc.step.graphs.capture import Captured

_WARM_UPS = 2
"""
Number of runs before a capture: the first compiles and loads kernels and chooses algorithms, the
second finds all ready.
"""


class CudaGraphs:
    """
    Capture of graphs on one stream, into one memory pool.

    Each call is warmed up by itself, not by a similar one, because loading or compiling a kernel
    during a capture would end it. For the same reason garbage collection is off meanwhile, as
    unloading a kernel's module would end it too; compiled kernels themselves stay in Triton's
    caches for as long as the process lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._living: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def capture(self, runs: Sequence[Callable[[], None]]) -> Captured:
        """
        As in `GraphDevice`; `num_bytes` is the loss of free memory on the device, what it holds of
        graphs once they have been launched included.
        """
        before = self._free_bytes()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's own
        if not self._living:  # a pool is freed with the last of its graphs
            self._pool = torch.cuda.graph_pool_handle()
        graphs = []
        with torch.cuda.device(self._device), _uncollected():
            for run in runs:
                self._warm_up(run, self._stream)
                graphs.append(_captured(run, self._pool, self._stream))
            for graph in graphs:
                graph.replay()  # the first launch sends the graph to the device
        self._living.update(graphs)
        return Captured(graphs=tuple(graphs), num_bytes=max(0, before - self._free_bytes()))

    def drain(self) -> None:
        """As in `GraphDevice`."""
        torch.cuda.synchronize(self._device)

    def _warm_up(self, run: Callable[[], None], stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        stream.synchronize()

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _total = torch.cuda.mem_get_info(self._device)
        return int(free)


def _captured(
    run: Callable[[], None], pool: Any, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    errors: list[BaseException] = []
    try:
        # Only calls of this thread may end the capture; other threads wait for earlier steps'
        # events.
        with (
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            _noted(errors),
        ):
            run()
    except Exception as error:
        # If the call's error has ended the capture, PyTorch raises another that tells of that
        # alone, and leaves the thread on the stream of captures.
        torch.cuda.set_stream(before)
        if not errors or errors[0] is error:
            raise
        first = errors[0]
        if is_out_of_memory(first) or not isinstance(first, Exception):
            raise first from error
        words = f"{type(first).__name__}: {in_one_line(first)}"
        raise CaptureBroken(f"a graph's capture was ended by {words}") from first
    return graph


@contextmanager
def _noted(errors: list[BaseException]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        errors.append(error)
        raise


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect garbage now, then turn collection off for the body."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
