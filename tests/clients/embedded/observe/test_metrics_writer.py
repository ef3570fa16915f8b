"""Numbers of steps for a metrics writer, with writers that keep what they get."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from tandem_embedded import ConfigError, GenerationParams, InferenceEngine
from tests.clients.embedded.fake_backend import engine_and_runner

STEP = "inference/inference_step"
KEYS = {"inference_step", "step_time_s", "waiting_queue_len", "total_requests_dict_size"}


class Wandb:
    """Writer with the calls of Weights & Biases; a resumed run has a summary."""

    def __init__(self, last_step=None):
        self.run = SimpleNamespace(summary={} if last_step is None else {STEP: last_step})
        self.axes, self.written = [], []

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, numbers):
        self.written.append(numbers)


class Board:
    """Writer with the call of TensorBoard's SummaryWriter."""

    def __init__(self):
        self.written = []

    def add_scalar(self, key, value, step):
        self.written.append((step, key, value))


class Broken(Wandb):
    """Writer that fails at its second call."""

    def log(self, numbers):
        super().log(numbers)
        if len(self.written) == 2:
            raise OSError("the disk is full")


def served(writer, interval, max_tokens=9):
    """Serve a request of as many steps as tokens, one block after the other in use."""
    engine, _ = engine_and_runner(metrics_writer=writer, logging_step_interval=interval)
    engine.submit_request([5] * 9, GenerationParams(max_tokens=max_tokens))
    (request,) = engine.run()
    assert max_tokens == request.generated_tokens
    return engine


def test_numbers_come_every_nth_step():
    """
    Steps 3, 6, ... are written under Megatron's keys, the step number being the x-axis.
    """
    writer = Wandb()
    served(writer, 3)
    assert [3, 6, 9] == [numbers[STEP] for numbers in writer.written]
    assert [(STEP, None), ("inference/*", STEP)] == writer.axes
    first = writer.written[0]
    assert {f"inference/{key}" for key in KEYS} < set(first)
    assert 1 == first["inference/total_requests_dict_size"]
    share = 100 * first["inference/active_unique_blocks"] / first["inference/total_blocks"]
    assert share == first["inference/active_utilization"] > 0


def test_steps_of_a_resumed_run_go_on():
    """
    The x-axis continues after the last step of a run that is resumed.
    """
    writer = Wandb(last_step=60)
    served(writer, 3)
    assert [63, 66, 69] == [numbers[STEP] for numbers in writer.written]


def test_tensorboard_gets_a_scalar_for_each_key():
    """
    A SummaryWriter gets each number with the step.
    """
    writer = Board()
    served(writer, 4)
    assert {4, 8} == {step for step, _, _ in writer.written}
    assert (4, STEP, 4) in writer.written


@pytest.mark.parametrize("interval", [0, 100])
def test_without_a_step_that_is_due_nothing_is_written(interval):
    """
    An interval of 0, or one longer than what runs, writes nothing.
    """
    writer = Wandb()
    served(writer, interval)
    assert [] == writer.written


def test_failing_writer_ends_no_request():
    """
    A writer that raises is logged and not called again, and the request goes on.
    """
    writer = Broken()
    with capture_logs() as logs:
        served(writer, 2)
    assert 2 == len(writer.written)
    assert 1 == [line["event"] for line in logs].count("metrics_writer_failed")


def test_writer_that_is_slow_holds_up_no_other_thread():
    """
    While a writer is called, other threads use the engine.
    """
    waiting = []

    class Slow(Wandb):
        def log(self, numbers):
            super().log(numbers)
            other = Thread(target=engine.has_pending_work, daemon=True)
            other.start()
            other.join(10)
            waiting.append(other.is_alive())

    engine, _ = engine_and_runner(metrics_writer=Slow(), logging_step_interval=1)
    engine.submit_request([5] * 9, GenerationParams(max_tokens=2))
    engine.run()
    assert {False} == set(waiting)


def test_wrong_writer_is_told_before_the_model_is_loaded(tmp_path):
    """
    A writer that cannot be used is refused before the directory of the model is looked at.
    """
    with pytest.raises(ConfigError, match="Unsupported metrics writer type"):
        InferenceEngine(None, tmp_path, metrics_writer=[], logging_step_interval=1)


def test_writer_that_refuses_its_first_calls_is_told():
    """
    Weights & Biases before its `init` is an error of the configuration that says what to do.
    """

    class Early(Wandb):
        def define_metric(self, name, step_metric=None):
            raise RuntimeError("You must call wandb.init() first")

    with pytest.raises(ConfigError, match=r"wandb.init\(\) before the engine") as caught:
        served(Early(), 3)
    assert "metrics_writer" == caught.value.field


def test_unknown_writer_and_interval_are_refused():
    """
    A writer of another type, or an interval that is negative or no whole number, is an error that names it.
    """
    with pytest.raises(ConfigError, match=r"Unsupported metrics writer type: list; give"):
        served([], 3)
    for wrong in (-1, 1.5, "x"):
        with pytest.raises(ConfigError, match="logging_step_interval must be a whole number"):
            served(Wandb(), wrong)
