"""Capture of CUDA graphs, on a device that only notes what it is asked."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from executor_svc.device.choice import is_sticky
from executor_svc.device.out_of_memory import is_out_of_memory
from executor_svc.step.graphs.cuda import CudaGraphs


class Stream:
    """Stream of the fake device; notes when it waits and is waited for."""

    def __init__(self, device, done):
        self._done = done
        done.append("stream made")

    def wait_stream(self, other):
        self._done.append(f"wait for {other}")

    def synchronize(self):
        self._done.append("synchronize")


class Graph:
    """A captured graph; notes its replays."""

    def __init__(self, done, free):
        self._done = done
        self._free = free

    def replay(self):
        self._done.append("replay")
        self._free[0] -= 100


ENDING_ERRORS = (
    torch.AcceleratorError,
    torch.OutOfMemoryError,
    ValueError,
    KeyboardInterrupt,
)
"""Errors that end a capture here."""


@pytest.fixture
def done(monkeypatch):
    """Calls that the fake device got, in order; free memory falls by 1,000 bytes per graph, and 100 per launch."""
    found = []
    free = [10_000]
    pools = iter(["pool 1", "pool 2", "pool 3"])

    @contextmanager
    def on_stream(stream):
        found.append("on stream")
        yield
        found.append("off stream")

    @contextmanager
    def capturing(graph, *, pool, stream, capture_error_mode):
        found.append(f"begin in {pool}, {capture_error_mode}")
        try:
            yield
        except ENDING_ERRORS:
            # PyTorch ends the capture first, and leaves the stream only if that raises nothing.
            raise torch.AcceleratorError("CUDA error: failed during capture")  # noqa: B904  # as there
        free[0] -= 1000
        found.append("end")

    @contextmanager
    def on_device(device):
        yield

    fake = SimpleNamespace(
        Stream=lambda device: Stream(device, found),
        CUDAGraph=lambda: Graph(found, free),
        current_stream=lambda device=None: "current stream",
        set_stream=lambda stream: found.append(f"back on {stream}"),
        stream=on_stream,
        graph=capturing,
        graph_pool_handle=lambda: next(pools),
        device=on_device,
        synchronize=lambda device: None,
        empty_cache=lambda: None,
        mem_get_info=lambda device: (free[0], 20_000),
    )
    for name, value in vars(fake).items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def noting(done, name):
    def run():
        done.append(name if not gc.isenabled() else f"{name}, collected meanwhile")

    return run


@pytest.mark.slow
def test_each_call_is_warmed_up_twice_and_then_captured(done):
    """
    A call runs twice on the stream that it is captured on, which waits for what was there before;
    nothing is collected from the first call to the last, and only this thread can end a capture.
    Each graph is launched once at the end, before the memory that it takes is told.
    """
    graphs = CudaGraphs(torch.device("cuda:0"))
    captured = graphs.capture([noting(done, "large"), noting(done, "small")])
    expected = ["stream made"]
    for name in ("large", "small"):
        expected += ["wait for current stream", "on stream", name, name, "off stream"]
        expected += ["synchronize", "begin in pool 1, thread_local", name, "end"]
    assert [*expected, "replay", "replay"] == done
    assert gc.isenabled()
    assert (2, 2200) == (len(captured.graphs), captured.num_bytes)


@pytest.mark.slow
def test_graphs_share_a_pool_while_one_of_them_lives(done):
    """
    More graphs join the pool of those there are; when all are gone, the next begin another.
    """
    graphs = CudaGraphs(torch.device("cuda:0"))
    held = [graphs.capture([noting(done, "a")]), graphs.capture([noting(done, "b")])]
    held.clear()
    graphs.capture([noting(done, "c")])
    pools = [event for event in done if event.startswith("begin")]
    assert [f"begin in {pool}, thread_local" for pool in ("pool 1", "pool 1", "pool 2")] == pools
    assert 1 == done.count("stream made")


def test_failed_capture_leaves_the_collector_as_it_was(done):
    """
    An error in a call reaches the code that asked for the capture; garbage is collected again.
    """

    def run():
        raise RuntimeError("out of registers")

    with pytest.raises(RuntimeError, match="out of registers"):
        CudaGraphs(torch.device("cuda:0")).capture([run])
    assert gc.isenabled()
    assert 0 == gc.get_freeze_count()


ENDED = "^a graph's capture was ended by AcceleratorError: CUDA error: not permitted$"
ENDED_OTHERWISE = "^a graph's capture was ended by ValueError: not permitted$"
FULL = "^CUDA out of memory"


@pytest.mark.parametrize(
    ("error", "told", "is_lost"),
    [
        (torch.AcceleratorError("CUDA error: not permitted\nSearch for"), ENDED, True),
        (ValueError("not permitted"), ENDED_OTHERWISE, True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), FULL, False),
    ],
    ids=["synchronised", "no error of CUDA", "memory"],
)
def test_error_that_ends_a_capture_is_told_and_its_stream_left(done, error, told, is_lost):
    """
    Where PyTorch tells only that a capture was ended, the call's own error is told, and the thread is back on its stream. The device is lost, as PyTorch's allocator is left amid the capture, unless memory was short.
    """
    calls = []

    def run():
        calls.append(1)
        if len(calls) > 2:
            raise error

    with pytest.raises(RuntimeError, match=told) as caught:
        CudaGraphs(torch.device("cuda:0")).capture([run])
    assert "back on current stream" == done[-1]
    assert is_lost is is_sticky(caught.value)
    assert is_lost is not is_out_of_memory(caught.value)
    assert error in (caught.value, caught.value.__cause__)


def test_interruption_that_ends_a_capture_stays_one(done):
    """
    A signal that ends a capture is no error of the device: it is raised as it came, and the thread
    is back on its stream.
    """
    calls = []

    def run():
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CudaGraphs(torch.device("cuda:0")).capture([run])
    assert "back on current stream" == done[-1]
