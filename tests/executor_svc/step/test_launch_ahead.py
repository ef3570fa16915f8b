"""Steps given to the device before the tokens of those before them are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from executor_svc.device import queue as device_queue
from executor_svc.device.queue import CudaQueue, HostQueue, Wait
from tandem.link.results import RowErrorKind
from tests.executor_svc.step.test_static_step import (
    BLOCK_SIZE,
    FILTERED,
    GREEDY,
    NOISY,
    NUM_SLOTS,
    PENALISED,
    TOLD,
    Traffic,
    is_same,
    joins_and_leaves,
)
from tests.executor_svc.stepping import Bench
from tests.model_zoo import VOCAB_SIZE

Zoo = Callable[[str], Path]


class LateQueue(HostQueue):
    """
    A device with results that are unknown until they are waited for; keeps the order of both.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self.order: list[str] = []
        self._num_fetched = 0
        super().__init__(self._tick)

    def _tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Wait:
        self._num_fetched += 1
        step = self._num_fetched
        self.order.append(f"launched {step}")
        wait = super().fetch(tensors)

        def late() -> list[torch.Tensor]:
            self.order.append(f"known {step}")
            return wait()

        return late


def benches(directory: Path, static_rows: int) -> tuple[Bench, Bench, LateQueue]:
    """The same model twice, one waiting for every step, one on a late device."""
    same = {"block_size": BLOCK_SIZE, "num_blocks": 64, "num_slots": NUM_SLOTS, "max_model_len": 64}
    queue = LateQueue()
    late = Bench.build(directory, queue=queue, static_rows=static_rows, **same)
    return Bench.build(directory, **same), late, queue


@pytest.mark.parametrize("static_rows", [0, NUM_SLOTS], ids=["inputs-sent", "static"])
class TestLaunch:
    @pytest.mark.parametrize(
        "samplings", [[GREEDY, FILTERED, NOISY], [PENALISED, NOISY, TOLD]], ids=["plain", "edited"]
    )
    def test_no_launch_needs_the_tokens_of_steps_before(self, zoo: Zoo, static_rows, samplings):
        """
        Prompts, joins, leaves and decodes launched all before the first result is asked for get the tokens of steps waited for one by one.
        """
        waiting, late, queue = benches(zoo("llama_mha"), static_rows)
        steps = list(joins_and_leaves(waiting.block_ids, samplings))[:8]
        expected = [waiting.runner.execute(each, step) for step, each in enumerate(steps)]
        collects = [late.runner.launch(each, step) for step, each in enumerate(steps)]
        assert [f"launched {step}" for step in range(1, 9)] == queue.order
        for result, collect in zip(expected, collects, strict=True):
            assert is_same(result, collect())
        assert [f"known {step}" for step in range(1, 9)] == queue.order[8:]

    def test_result_is_told_by_the_slots_of_its_own_time(self, zoo: Zoo, static_rows):
        """
        A result asked for after its slot went to another sequence names the generation that it belongs to, in errors too.
        """
        _, late, _ = benches(zoo("llama_mha"), static_rows)
        traffic = Traffic(late.block_ids)
        first = traffic.join(2, 5, GREEDY)
        first.admits[0].token_ids[3] = VOCAB_SIZE
        second = traffic.join(1, 5, GREEDY)
        traffic.leave(2)
        third = traffic.join(2, 6, GREEDY)
        collects = [
            late.runner.launch(each, step) for step, each in enumerate((first, second, third))
        ]
        failed, both, other = (collect() for collect in collects)
        (error,) = failed.row_errors
        assert (2, 1, RowErrorKind.TOKEN_OUT_OF_RANGE) == (error.slot, error.generation, error.kind)
        assert [1] == both.slot.tolist()
        assert ([1, 2], [1, 2]) == (other.slot.tolist(), other.generation.tolist())

    def test_times_are_those_of_the_device(self, zoo: Zoo, static_rows):
        """
        A step lasts from where the device began it to where it had its tokens, whenever these were asked for.
        """
        _, late, queue = benches(zoo("llama_mha"), static_rows)
        traffic = Traffic(late.block_ids)
        collects = [late.runner.launch(traffic.join(slot, 4, GREEDY), slot) for slot in (0, 1)]
        collects.append(late.runner.launch(traffic.decode(), 2))
        assert 9 == queue.ticks
        for collect in collects:
            times = collect().timings
            assert (1, 1, 2) == (times.forward_ns, times.sample_ns, times.total_ns)


class FakeCuda:
    """Streams and events that note what they are asked, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.current = "steps"
        self.num_events = 0
        self.chosen: list[torch.device] = []

    def make_stream(self, _device: torch.device) -> Stream:
        return Stream(self, "copies")

    def make_event(self, *, enable_timing: bool = False) -> Event:
        self.num_events += 1
        return Event(self, f"{'time' if enable_timing else 'copied'} {self.num_events}")

    def current_stream(self, _device: torch.device) -> Stream:
        return Stream(self, self.current)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream.name, self.current
        yield
        self.current = before


class Stream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.done.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._cuda.done.append(f"{self.name} waits for {event.name}")


class Event:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def record(self, stream: Stream) -> None:
        self._cuda.done.append(f"{self.name} in {stream.name}")

    def synchronize(self) -> None:
        self._cuda.done.append(f"host waits for {self.name}")

    def elapsed_time(self, later: Event) -> float:
        return 1.5 if (self.name, later.name) == ("time 1", "time 2") else -1.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Takes the place of torch.cuda; memory is not locked."""
    fake = FakeCuda()
    for name, value in {
        "Stream": fake.make_stream,
        "Event": fake.make_event,
        "current_stream": fake.current_stream,
        "stream": fake.on_stream,
        "set_device": fake.chosen.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(device_queue, "_locked_like", torch.empty_like)
    return fake


class TestCudaQueue:
    def test_copies_go_beside_the_steps(self, cuda: FakeCuda):
        """
        A copy waits for the steps before it, on a stream of its own; the host waits for the copy, and only when asked.
        """
        queue = CudaQueue(torch.device("cuda", 0), max_ahead=3)
        token = torch.tensor([3, 1])
        wait = queue.fetch([token])
        token.fill_(0)
        assert ["copies waits for steps", "copied 1 in copies"] == cuda.done
        assert [[3, 1]] == [tensor.tolist() for tensor in wait()]
        assert "host waits for copied 1" == cuda.done[-1]

    def test_steps_do_not_overtake_the_copies(self, cuda: FakeCuda):
        """
        Before a step that may write over what an old copy reads, the device waits for that copy.
        """
        queue = CudaQueue(torch.device("cuda", 0), max_ahead=3)
        for _ in range(4):
            queue.fetch([torch.zeros(1)])
        waits = [each for each in cuda.done if each.startswith("steps waits")]
        assert ["steps waits for copied 1", "steps waits for copied 2"] == waits
        assert cuda.done.index(waits[0]) > cuda.done.index("copied 3 in copies")

    def test_marks_are_events_of_the_steps(self, cuda: FakeCuda):
        """
        Time between marks is the device's, in nanoseconds, and not from one copy to another.
        """
        queue = CudaQueue(torch.device("cuda", 0), max_ahead=3)
        first, second = queue.mark(), queue.mark()
        assert 1_500_000 == second.ns_since(first)
        assert ["time 1 in steps", "time 2 in steps"] == cuda.done

    def test_its_device_becomes_the_current_one(self, cuda: FakeCuda):
        """
        Everything that the runner's thread launches goes to the device of the model.
        """
        CudaQueue(torch.device("cuda", 1), max_ahead=3)
        assert [torch.device("cuda", 1)] == cuda.chosen

    def test_what_another_device_sends_is_waited_for_beside_the_steps(self, cuda: FakeCuda):
        """
        Tokens that arrive are waited for where copies go, so that later steps do not wait; the step
        ends when they are there.
        """
        queue = CudaQueue(torch.device("cuda", 0), max_ahead=3)
        arriving = queue.after(lambda: cuda.done.append(f"arrived in {cuda.current}"))
        arriving.mark()
        wait = arriving.fetch([torch.tensor([4])])
        beside = ["arrived in copies", "time 1 in copies", "copies waits for steps"]
        assert [*beside, "copied 2 in copies"] == cuda.done
        assert [[4]] == [tensor.tolist() for tensor in wait()]


class TestHostQueue:
    def test_step_ends_when_the_tokens_of_another_process_are_there(self):
        """
        Tokens are waited for when a result is asked for, and not before; the step's last moment is
        the one at which they were first known.
        """
        token, ticks = torch.zeros(1), iter(range(1, 9))
        queue = HostQueue(lambda: next(ticks))
        started = queue.mark()
        arriving = queue.after(lambda: token.fill_(6))
        ended, waits = arriving.mark(), [arriving.fetch([token]), arriving.fetch([token])]
        assert [0] == token.tolist()
        assert [[6], [6]] == [wait()[0].tolist() for wait in waits]
        assert 1 == ended.ns_since(started)
