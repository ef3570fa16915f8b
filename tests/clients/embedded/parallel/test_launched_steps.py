"""Runners that launch steps before earlier results are known, in one process, without a model."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from tandem.errors import OutOfMemory
from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tandem_embedded import ConfigError, InferenceEngine, SimpleTokenizer
from tandem_embedded.backend import geometry_of
from tandem_embedded.parallel.accord import Accord
from tests.clients.embedded.fake_backend import FakeRunner
from tests.clients.embedded.parallel.fleet import CONFIG, backend_of, check_all, submit_all


class LaunchingRunner(FakeRunner):
    """A runner that launches; each error in `fail_at_end` is raised where a result is asked for."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.fail_at_end: list[Exception | None] = []
        self.num_under_way = self.most_under_way = 0

    def launch(self, batch: Batch, step_id: int) -> Callable[[], StepResult]:
        result = self.execute(batch, step_id)
        error = self.fail_at_end.pop(0) if self.fail_at_end else None
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)

        def collect() -> StepResult:
            self.num_under_way -= 1
            if error is not None:
                raise error
            return result

        return collect


class NotingRunner(LaunchingRunner):
    """A runner that notes columns of each batch, those that no two batches share."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.columns: list[weakref.ref[object]] = []

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        columns = (batch.row_start, batch.release_slot)
        self.columns += [weakref.ref(column) for column in columns if len(column)]
        return super().execute(batch, step_id)


class StoppedAccord(Accord):
    """An accord of ranks that stopped at different places."""

    has_stopped = True


def staged(
    runner: type[FakeRunner] = LaunchingRunner, num_stages: int = 2, **settings
) -> tuple[InferenceEngine, FakeRunner]:
    """Return an engine over one fake runner of so many stages."""
    made = runner(geometry_of(CONFIG))
    settings = {"tokenizer": SimpleTokenizer()} | settings
    return InferenceEngine(CONFIG, backend=backend_of(made, num_stages), **settings), made


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("window", [1, 2])
def test_steps_of_all_lanes_are_under_way_at_once(num_stages, window):
    """
    Of a model of several stages as many steps are launched ahead as keep all of them busy, and
    every request gets its tokens.
    """
    engine, runner = staged(num_stages=num_stages, window=window)
    submit_all(engine)
    check_all(engine)
    assert num_stages <= runner.most_under_way <= num_stages * window
    assert 0 == runner.num_under_way


@pytest.mark.parametrize("num_stages", [1, 2])
def test_batch_is_let_go_once_its_result_is_applied(num_stages):
    """
    An engine without work keeps no batch of a step that is over.
    """
    engine, runner = staged(NotingRunner, num_stages)
    submit_all(engine)
    check_all(engine)
    gc.collect()
    assert runner.columns
    assert not any(column() is not None for column in runner.columns)


@pytest.mark.parametrize("error", [RuntimeError("device"), OutOfMemory("full")])
@pytest.mark.parametrize("is_late", [False, True])
def test_step_that_fails_costs_no_request(error, is_late):
    """
    Where a step fails as it is launched, or later with others launched behind it, all that is under
    way is waited for, and its requests are computed again.
    """
    engine, runner = staged()
    submit_all(engine)
    for _ in range(4):
        engine.step()
    if is_late:
        runner.fail_at_end = [error]
    else:
        runner.fail_next = [error]
    check_all(engine)
    assert 1 == runner.num_resets
    assert 0 == runner.num_under_way


def test_closing_waits_for_what_is_launched():
    """
    An engine that is closed with steps under way leaves none behind.
    """
    engine, runner = staged()
    submit_all(engine)
    engine.step()
    assert runner.num_under_way
    engine.close()
    assert 0 == runner.num_under_way


def test_closing_waits_for_nothing_after_the_accord_of_ranks_stopped(monkeypatch):
    """
    An engine whose ranks stopped at different places is closed without a wait for steps that other
    ranks may not have begun.
    """
    engine, runner = staged()
    submit_all(engine)
    engine.step()
    num_under_way = runner.num_under_way
    monkeypatch.setattr(engine._driver, "_accord", StoppedAccord(time.monotonic))
    engine.close()
    assert 1 <= num_under_way == runner.num_under_way


@pytest.mark.parametrize("how", ["due_results", "take"])
def test_closing_waits_for_nothing_after_a_result_that_is_an_error(how):
    """
    Steps behind one that failed at its end are not waited for.
    """
    engine, runner = staged(num_stages=3)
    runner.fail_at_end = [RuntimeError("device")]
    submit_all(engine)
    engine.step()
    engine.step()
    assert 2 == runner.num_under_way
    (worker,) = engine._driver._workers
    worker._num_ahead = 0
    with pytest.raises(RuntimeError, match="device"):
        getattr(worker, how)()
    engine.close()
    assert 1 == runner.num_under_way


def test_error_of_a_step_that_is_dropped_is_logged():
    """
    A step that nothing asks the result of does not lose its error.
    """
    engine, runner = staged()
    runner.fail_at_end = [RuntimeError("device")]
    submit_all(engine)
    engine.step()
    assert runner.num_under_way
    with capture_logs() as logs:
        engine.close()
    events = [(line["event"], line["error"]) for line in logs]
    assert [("dropped_step_failed", "RuntimeError('device')")] == events


def test_runner_that_cannot_launch_is_refused():
    """
    A backend of several stages needs a runner that launches, and the error names it.
    """
    with pytest.raises(ConfigError, match="2 stages needs a runner with a method launch") as caught:
        staged(FakeRunner)
    assert "backend" == caught.value.field


def test_stages_beside_another_runner_are_refused():
    """
    A backend of several stages is the only one of its engine.
    """
    backends = [backend_of(LaunchingRunner(geometry_of(CONFIG)), 2) for _ in range(2)]
    with pytest.raises(ConfigError, match="2 stages must be the only one") as caught:
        InferenceEngine(CONFIG, backend=backends, tokenizer=SimpleTokenizer())
    assert "backend" == caught.value.field
