"""The log of every N-th step of an engine: an event, or a line in the words of Megatron Core's log."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys

import pytest
import structlog
from structlog.testing import capture_logs

from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem_embedded import GenerationParams
from tests.clients.embedded.fake_backend import engine_and_runner

LINE = re.compile(
    r"\* rank (?P<rank>\d+) \| step (?P<step>\d+) \| \d\d:\d\d:\d\d \.\.\. time: \d+\.\d{3} ms "
    r"\[(?P<kind>decode|non-decode) \+ real config \[(?P<tokens>\d+)\]: "
    r"(?P<prefills>\d+) P \+ (?P<decodes>\d+) D \+ cuda graph OFF\] \.\.\. "
    r"reqs: a (?P<active>\d+)/(?P<most>\d+), p 0, w (?P<waiting>\d+), f 0, e 0 \.\.\. "
    r"blocks: a (?P<used>\d+)/(?P<total>\d+), p 0/0 \.\.\. mem: 0\.0 gb"
)


@pytest.fixture(autouse=True)
def application():
    """An application that has configured structlog for information."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(),
    )
    yield
    if before is None:
        structlog.reset_defaults()
    else:
        structlog.configure(**before)


def told(interval: int, *, num_requests: int = 1, config: EngineConfig | None = None, **settings):
    """Serve requests of nine prompt tokens and nine outputs; return the events about steps."""
    engine, _ = engine_and_runner(config, logging_step_interval=interval, **settings)
    with capture_logs() as logs:
        for _ in range(num_requests):
            engine.submit_request([5] * 9, GenerationParams(max_tokens=9))
        engine.run()
    steps = [entry for entry in logs if entry["event"] == "step"]
    assert {"info"} >= {entry["log_level"] for entry in steps}
    return steps


class Writer:
    """Writer with the call of TensorBoard's SummaryWriter."""

    def __init__(self):
        self.steps = set()

    def add_scalar(self, _key, _value, step):
        self.steps.add(step)


class TestStepEvents:
    def test_every_nth_step_is_logged_without_a_writer(self):
        """
        Steps 3, 6, ... are logged if logging_step_interval is 3, without a writer.
        """
        assert [3, 6, 9] == [entry["step"] for entry in told(3)]

    def test_writer_gets_the_steps_that_are_logged(self):
        """
        A metrics writer gets the numbers of the very steps that the log tells of.
        """
        writer = Writer()
        logged = [entry["step"] for entry in told(4, metrics_writer=writer)]
        assert [4, 8] == logged == sorted(writer.steps)

    def test_load_is_asked_once_and_only_where_a_report_is_due(self, monkeypatch):
        """
        Log and writer share one snapshot of the core, and steps between two reports cost none.
        """
        num_asked = 0
        stats = Scheduler.stats

        def counted(core):
            nonlocal num_asked
            num_asked += 1
            return stats(core)

        monkeypatch.setattr(Scheduler, "stats", counted)
        assert 2 == len(told(4, metrics_writer=Writer())) == num_asked

    def test_event_tells_the_shape_of_its_step(self):
        """
        The first step computes a prompt, the next ones one token each.
        """
        first, second, *_ = (entry["shape"] for entry in told(1))
        assert "non-decode + real config [9]: 1 P + 0 D + cuda graph OFF" == first
        assert "decode + real config [1]: 0 P + 1 D + cuda graph OFF" == second

    def test_event_tells_the_load_after_its_step(self):
        """
        Requests that run and wait, and blocks in use, are those after the step.
        """
        config = EngineConfig(
            block_size=4, max_num_blocks=64, max_batch_size=2, max_model_len=64, max_total_tokens=32
        )
        first = told(1, num_requests=3, config=config)[0]
        load = {
            "active_requests": 1,
            "max_requests": 2,
            "waiting_requests": 2,
            "used_blocks": 3,
            "total_blocks": 64,
            "rank": 0,
        }
        assert load == {key: first[key] for key in load}

    @pytest.mark.parametrize("interval", [0, 100])
    def test_without_a_step_that_is_due_nothing_is_logged(self, interval):
        """
        An interval of 0, or one longer than what runs, logs nothing.
        """
        assert [] == told(interval)


SERVED = """
import sys, structlog
{configure}
from tandem_embedded import GenerationParams
from tests.clients.embedded.fake_backend import engine_and_runner
engine, _ = engine_and_runner(logging_step_interval=4)
engine.submit_request([5] * 9, GenerationParams(max_tokens=6))
engine.run()
"""
JSON = """
structlog.configure(processors=[structlog.processors.JSONRenderer()])
"""
QUIET = """
import logging
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
"""


def served(configure: str) -> subprocess.CompletedProcess[str]:
    """Serve a request in a process of its own."""
    code = SERVED.format(configure=configure)
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=100
    )


class TestWhereLinesGo:
    def test_lines_go_to_stderr_where_nothing_is_configured(self):
        """
        Where the application leaves logging alone, the lines appear on stderr, and no other
        information does.
        """
        process = served("")
        assert "" == process.stdout
        (line,) = process.stderr.splitlines()
        found = LINE.search(line)
        assert ("0", "4", "decode", "1") == found.group("rank", "step", "kind", "tokens")

    def test_application_that_logs_json_gets_events_and_keys(self):
        """
        An application that has configured structlog gets events with their keys, as a service logs them.
        """
        lines = [json.loads(line) for line in served(JSON).stdout.splitlines()]
        by_event = {line["event"]: line for line in lines}
        assert {"prefill_batch", "step"} == set(by_event)
        step = by_event["step"]
        assert (4, 0) == (step["step"], step["rank"])
        assert {"step_ms", "shape", "used_blocks", "device_memory_bytes"} < set(step)

    def test_the_level_of_the_application_counts(self):
        """
        An application that has configured structlog for warnings alone gets no lines.
        """
        process = served(QUIET)
        assert ("", "") == (process.stdout, process.stderr)
