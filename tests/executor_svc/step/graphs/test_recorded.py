"""The graphs that a CPU pretends to capture, and what they do not let through."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.executor_svc.step.graphs.recorded import RecordedGraphs
from tests.executor_svc.step.graphs.recording import GraphChanged, NotCapturable


class Counter:
    """Adds 2 to each of four numbers and notes the sum: a step with buffers of its own."""

    def __init__(self):
        self.numbers = torch.arange(4.0)
        self.total = torch.zeros(())
        self.addend = 2.0
        self.kept = None

    def __call__(self):
        added = self.numbers + self.addend
        self.numbers.copy_(added)
        self.total.copy_(added.sum())


def captured(run):
    (graph,) = RecordedGraphs().capture([run]).graphs
    return graph


class TestWhatIsLetThrough:
    def test_replays_go_on_from_the_buffers(self):
        """
        A replay works on what the buffers hold then, whatever wrote it.
        """
        counter = Counter()
        graph = captured(counter)
        assert [2, 3, 4, 5] == counter.numbers.tolist()
        graph.replay()
        assert 22 == counter.total.item()
        counter.numbers.zero_()
        graph.replay()
        assert [2, 2, 2, 2] == counter.numbers.tolist()

    def test_graphs_are_replayed_in_any_order(self):
        """
        One graph's replay does not disturb another's.
        """
        first, second = Counter(), Counter()
        graphs = RecordedGraphs().capture([first, second]).graphs
        for index in (1, 1, 0, 1, 0):
            graphs[index].replay()
        assert (6 + 8 * 3, 6 + 8 * 4) == (first.total.item(), second.total.item())

    def test_numbers_in_the_code_may_be_tensors_inside(self):
        """
        Operations that turn a number into a tensor of their own are captured with its value.
        """
        numbers = torch.tensor([1.0, float("nan")])
        graph = captured(lambda: numbers.copy_(torch.where(numbers.isnan(), 7.0, numbers)))
        numbers.fill_(float("nan"))
        graph.replay()
        assert [7, 7] == numbers.tolist()

    def test_memory_is_that_of_the_largest_call(self):
        """
        The memory of several calls is that of the largest, in bytes: they share the pool.
        """
        small, large = torch.zeros(4), torch.zeros(100)
        runs = [lambda: large.add_(large * 2), lambda: small.add_(small * 2)]
        assert 400 == RecordedGraphs().capture(runs).num_bytes

    def test_nothing_to_capture_is_nothing(self):
        """
        Without calls there are no graphs and no memory.
        """
        found = RecordedGraphs().capture([])
        assert ((), 0) == (found.graphs, found.num_bytes)


class TestWhatNoGraphCanHold:
    @pytest.mark.parametrize(
        "look",
        [
            lambda x: x.sum().item(),
            lambda x: x.tolist(),
            lambda x: x.numpy(),
            np.asarray,
            lambda x: bool(x.sum() > 0),
            lambda x: int(x[0]),
            lambda x: x.cpu(),
            lambda x: torch.equal(x, x),
        ],
        ids=["item", "tolist", "numpy", "asarray", "bool", "int", "cpu", "equal"],
    )
    def test_looking_at_a_value_is_refused(self, look):
        """
        A call that brings a value to the host is refused: it would end a capture.
        """
        numbers = torch.ones(3)
        with pytest.raises(NotCapturable, match="waits for the device"):
            captured(lambda: look(numbers))

    @pytest.mark.parametrize(
        "select",
        [
            lambda x: x.nonzero(),
            lambda x: x[x > 0],
            lambda x: x.masked_select(x > 0),
            lambda x: x.index_put_((x > 0,), torch.zeros(3)),
            lambda x: x.unique(),
            lambda x: x.long().repeat_interleave(x.long()),
        ],
        ids=["nonzero", "mask", "masked_select", "index_put", "unique", "repeat_interleave"],
    )
    def test_shapes_that_depend_on_values_are_refused(self, select):
        """
        A graph's shapes are those of its capture.
        """
        numbers = torch.ones(3)
        with pytest.raises(NotCapturable, match="shape that depends on values"):
            captured(lambda: select(numbers))

    def test_random_generators_are_refused(self):
        """
        Noise is computed, not drawn from a generator's state.
        """
        with pytest.raises(NotCapturable, match="draws from a generator"):
            captured(lambda: torch.rand(3))

    @pytest.mark.slow
    def test_kept_allocation_is_refused(self):
        """
        A tensor that a call allocates and keeps is refused: the next graph overwrites its memory.
        """
        counter = Counter()

        def run():
            counter.kept = counter.numbers * 2

        with pytest.raises(NotCapturable, match=r"keeps torch.float32 \[4\] of aten.mul.Tensor"):
            captured(run)

    def test_host_data_made_in_the_call_is_refused(self):
        """
        A column made on the host during the call is gone when the graph is replayed.
        """
        numbers = torch.zeros(3)
        with pytest.raises(NotCapturable, match="does not outlive it"):
            captured(lambda: numbers.add_(torch.from_numpy(np.ones(3, np.float32))))

    def test_uninitialised_memory_is_nan(self):
        """
        A call that reads memory it has not written computes NaN, not what happened to be there.
        """
        numbers = torch.zeros(3)
        captured(lambda: numbers.copy_(torch.empty(3)))
        assert numbers.isnan().all()


class TestWhatAReplayNotices:
    def test_moved_buffer(self):
        """
        A buffer that was allocated anew is elsewhere: its graph is stale.
        """
        counter = Counter()
        graph = captured(counter)
        storage = counter.numbers.untyped_storage()
        storage.resize_(2 * storage.nbytes())
        with pytest.raises(GraphChanged, match="has moved since the graph was captured"):
            graph.replay()

    def test_replaced_buffer(self):
        """
        A buffer that was freed is noticed even if another has its name.
        """
        counter = Counter()
        graph = captured(counter)
        counter.numbers = torch.zeros(4)
        with pytest.raises(GraphChanged, match="is gone since the graph was captured"):
            graph.replay()

    def test_other_buffer(self):
        """
        Working on another buffer than the captured one is noticed, though both still exist.
        """
        counter = Counter()
        before = counter.numbers
        graph = captured(counter)
        counter.numbers = torch.zeros(4)
        with pytest.raises(GraphChanged, match="a graph would have repeated"):
            graph.replay()
        assert 4 == len(before)

    def test_number_that_changed(self):
        """
        A number in the code is captured: another one afterwards would not reach the device.
        """
        counter = Counter()
        graph = captured(counter)
        counter.addend = 3.0
        with pytest.raises(GraphChanged, match=r"aten.add.Tensor\(.*3.0\)"):
            graph.replay()

    def test_shape_that_changed(self):
        """
        A length that the host chose is captured.
        """
        numbers, length = torch.zeros(4), [2]
        graph = captured(lambda: numbers[: length[0]].add_(1))
        length[0] = 3
        with pytest.raises(GraphChanged):
            graph.replay()

    @pytest.mark.parametrize(
        ("at_first", "later", "message"),
        [(2, 3, "a graph would have ended"), (3, 2, "ended before")],
    )
    def test_other_number_of_operations(self, at_first, later, message):
        """
        A branch on the host's state that goes another way is noticed.
        """
        numbers, times = torch.zeros(4), [at_first]

        def run():
            for _ in range(times[0]):
                numbers.add_(1)

        graph = captured(run)
        times[0] = later
        with pytest.raises(GraphChanged, match=message):
            graph.replay()
