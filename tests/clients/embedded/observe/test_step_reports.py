"""The log line of every N-th step of an engine, in the words of Megatron Core's log."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

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


def told(interval: int, *, num_requests: int = 1, config: EngineConfig | None = None, **settings):
    """Serve requests of nine prompt tokens and nine outputs; return the lines about steps."""
    engine, _ = engine_and_runner(config, logging_step_interval=interval, **settings)
    with capture_logs() as logs:
        for _ in range(num_requests):
            engine.submit_request([5] * 9, GenerationParams(max_tokens=9))
        engine.run()
    lines = [entry for entry in logs if entry["event"].startswith("* rank")]
    assert {"info"} >= {entry["log_level"] for entry in lines}
    return [LINE.fullmatch(entry["event"]) for entry in lines]


class TestStepLines:
    def test_every_nth_step_has_a_line_without_a_writer(self):
        """
        Steps 3, 6, ... are logged if logging_step_interval is 3, whether or not there is a writer.
        """
        found = told(3)
        assert ["3", "6"] == [match["step"] for match in found[:2]]

    def test_a_line_tells_the_shape_of_its_step(self):
        """
        The first step computes a prompt, the next ones one token each.
        """
        first, second, *_ = told(1)
        assert ("non-decode", "9", "1", "0") == first.group("kind", "tokens", "prefills", "decodes")
        assert ("decode", "1", "0", "1") == second.group("kind", "tokens", "prefills", "decodes")

    def test_a_line_tells_the_load_after_its_step(self):
        """
        Requests that run and wait, and blocks in use, are those after the step.
        """
        config = EngineConfig(
            block_size=4, max_num_blocks=64, max_batch_size=2, max_model_len=64, max_total_tokens=32
        )
        first = told(1, num_requests=3, config=config)[0]
        load = first.group("active", "most", "waiting", "used", "total", "rank")
        assert ("1", "2", "2", "3", "64", "0") == load

    @pytest.mark.parametrize("interval", [0, 100])
    def test_without_a_step_that_is_due_nothing_is_logged(self, interval):
        """
        An interval of 0, or one longer than what runs, logs no line.
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
        assert "* rank 0 | step 4 |" in line

    def test_the_level_of_the_application_counts(self):
        """
        An application that has configured structlog for warnings alone gets no lines.
        """
        process = served(QUIET)
        assert ("", "") == (process.stdout, process.stderr)
