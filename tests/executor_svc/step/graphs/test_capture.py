"""Captured steps by their key."""

from __future__ import annotations

import itertools

import pytest
import structlog
import torch

from executor_svc.step.graphs.capture import Graphs
from tandem.errors import InternalError, OutOfMemory
from tests.executor_svc.step.graphs.recorded import RecordedGraphs


class Steps:
    """Steps of several sizes over one buffer; `done` lists the sizes that ran."""

    def __init__(self):
        self.numbers = torch.zeros(8)
        self.done = []

    def forget(self):
        """Do nothing: each size touches numbers of its own."""

    def run(self, size):
        self.done.append(size)
        self.numbers[:size].add_(1)


class FullDevice(RecordedGraphs):
    """A device without memory for graphs."""

    def capture(self, runs):
        super().capture(runs)
        raise torch.AcceleratorError("CUDA error: out of memory\nSearch for the error")


@pytest.fixture
def steps():
    return Steps()


def graphs_of(steps, sizes=(8, 4, 2)):
    clock = itertools.count(100.0, 0.25)
    return Graphs(
        RecordedGraphs(), sizes, steps.run, forget=steps.forget, clock_s=lambda: next(clock)
    )


class TestGraphs:
    def test_largest_is_captured_first(self, steps):
        """
        Steps are captured in the order given, and none but those.
        """
        graphs = graphs_of(steps)
        graphs.capture()
        assert [8, 4, 2] == steps.done
        assert (8, 4, 2) == graphs.keys

    def test_replays_come_in_any_order(self, steps):
        """
        Each key replays its own step.
        """
        graphs = graphs_of(steps)
        graphs.capture()
        steps.numbers.zero_()
        for size in (2, 8, 4, 2):
            graphs.replay(size)
        assert [4, 4, 2, 2, 1, 1, 1, 1] == steps.numbers.tolist()

    def test_capture_reports_and_logs_what_it_cost(self, steps):
        """
        The number of graphs, seconds and bytes are told and logged.
        """
        with structlog.testing.capture_logs() as logs:
            report = graphs_of(steps).capture()
        assert (3, 0.25, 0) == (report.num_graphs, report.seconds, report.num_bytes)
        assert [
            {
                "event": "graphs_captured",
                "log_level": "info",
                "count": 3,
                "seconds": 0.25,
                "bytes": 0,
            }
        ] == logs

    def test_what_is_not_captured_is_not_replayed(self, steps):
        """
        Before a capture, for another key and after a drop there is nothing to replay.
        """
        graphs = graphs_of(steps)
        with pytest.raises(InternalError, match="No CUDA graph captured"):
            graphs.replay(8)
        graphs.capture()
        with pytest.raises(InternalError, match="No CUDA graph captured for 3"):
            graphs.replay(3)
        graphs.drop()
        with pytest.raises(InternalError, match="No CUDA graph captured for 8"):
            graphs.replay(8)
        assert () == graphs.keys

    def test_capture_anew_takes_the_buffers_as_they_are(self, steps):
        """
        After buffers moved, another capture makes replays good again.
        """
        graphs = graphs_of(steps)
        graphs.capture()
        steps.numbers = torch.zeros(8)
        graphs.capture()
        graphs.replay(2)
        assert [4, 4, 2, 2, 1, 1, 1, 1] == steps.numbers.tolist()
        assert 2 == graphs.num_captures

    def test_more_is_captured_and_remembered(self, steps):
        """
        Keys can be added to those captured; each is captured once, and again with the others.
        """
        graphs = graphs_of(steps)
        graphs.capture()
        graphs.add([3])
        graphs.add([4, 3])
        assert [8, 4, 2, 3] == steps.done
        graphs.replay(3)
        graphs.capture()
        assert (8, 4, 2, 3) == graphs.keys

    def test_graphs_that_do_not_fit_are_out_of_memory(self, steps):
        """
        A device that has no memory for a graph, which CUDA tells as of any failed call, is named with the settings that make graphs fewer; nothing is captured.
        """
        graphs = Graphs(FullDevice(), [8, 4], steps.run, forget=steps.forget)
        with pytest.raises(OutOfMemory, match="lower num_cuda_graphs or max_batch_size") as caught:
            graphs.capture()
        assert "CUDA error: out of memory" in caught.value.message
        assert "\n" not in caught.value.message
        assert () == graphs.keys
