"""Lines of the scheduler's log that operators read while it serves."""

from __future__ import annotations

import re

import structlog

from tandem.wording import GIB
from tests.scheduler_svc.service.fakes.arithmetic_runner import expected_outputs


def lines(logs, part: str) -> list[tuple[str, str]]:
    """Return level and text of the lines with this in them."""
    said = [(entry["log_level"], entry.get("sentence", "")) for entry in logs]
    return [(level, text) for level, text in said if part in text]


class TestOperatorLog:
    def test_prompts_and_every_fortieth_decode_pass_are_logged(self, bench):
        """
        The core's lines are log events of level info, word for word.
        """
        with structlog.testing.capture_logs() as logs:
            frontend = bench.frontend()
            frontend.submit(1, [5, 6, 7], 50)
            bench.until(lambda: 1 in frontend.ended)
        ((level, text),) = lines(logs, "Prefill batch.")
        assert "info" == level
        assert text.startswith("Prefill batch. #new-seq: 1, #new-token: 3, #cached-token: 0, ")
        ((level, text),) = lines(logs, "Decode batch.")
        assert "info" == level
        assert re.fullmatch(
            r"Decode batch\. #running-req: 1, #token: \d+, token usage: 0\.\d\d, "
            r"gen throughput \(token/s\): \d+\.\d\d, #queue-req: 0",
            text,
        )

    def test_running_out_of_blocks_is_a_warning(self, make_bench):
        """
        A retraction is logged with its numbers and with advice; clients see nothing of it.
        """
        bench = make_bench(schedule_conservativeness=0.0, enable_prefix_caching=False)
        bench.link.boot("boot-1")
        with structlog.testing.capture_logs() as logs:
            frontend = bench.frontend()
            for stream_id in range(8):
                frontend.submit(stream_id, [5 + stream_id] * 8, 50)
            bench.until(lambda: len(frontend.ended) == 8)
        retractions = lines(logs, "decode out of memory happened, #retracted_reqs: ")
        assert retractions
        assert {"warning"} == {level for level, _ in retractions}
        warned = lines(
            logs, "there is not enough KV cache space. This can affect the end-to-end performance."
        )
        assert "warning" == warned[0][0]
        for stream_id in range(8):
            assert expected_outputs([5 + stream_id] * 8, 50) == frontend.tokens[stream_id]

    def test_settings_without_effect_are_a_warning(self, make_bench):
        """
        A setting without effect on the executor gives one warning when the executor is known.
        """
        bench = make_bench(preemption_mode="swap")
        with structlog.testing.capture_logs() as logs:
            bench.link.boot("boot-1")
            frontend = bench.frontend()
            frontend.submit(1, [5, 6, 7], 2)
            bench.until(lambda: 1 in frontend.ended)
        (warning,) = [entry for entry in logs if entry["event"] == "unusual_setting"]
        assert "warning" == warning["log_level"]
        assert "preemption_mode is swap and the executor has no host blocks" in warning["message"]

    def test_every_nth_step_has_a_line(self, make_bench):
        """
        Steps 3, 6, ... are logged with their time, shape and load if logging_step_interval is 3.
        """
        bench = make_bench(logging_step_interval=3)
        bench.link.boot("boot-1")
        bench.link.computes_s, bench.link.graph = 0.0125, 8
        with structlog.testing.capture_logs() as logs:
            frontend = bench.frontend()
            frontend.submit(1, [5, 6, 7], 7)
            bench.until(lambda: 1 in frontend.ended)
        pattern = (
            r"\* rank 0 \| step (\d+) \| \d\d:\d\d:\d\d \.\.\. time: 12\.500 ms "
            r"\[decode \+ real config \[1\]: 0 P \+ 1 D \+ cuda graph \[8\]\] \.\.\. "
            r"reqs: a 1/\d+, p 0, w 0, f 0, e 0 \.\.\. blocks: a \d+/\d+, p 0/0 \.\.\. mem: 0\.0 gb"
        )
        found = [re.fullmatch(pattern, text) for _, text in lines(logs, "* rank")]
        assert ["3", "6"] == [match and match[1] for match in found]
        usage = [text for _, text in lines(logs, "Memory usage")]
        assert 2 == len(usage)
        assert all(
            re.fullmatch(r"Memory usage: [1-9]\d*/\d+ blocks \(\d+\.\d%\)", t) for t in usage
        )

    def test_a_budget_of_paused_requests_in_gib_is_told_in_blocks(self, make_bench):
        """
        A paused_buffer_size_gb appears in a step's line as the number of the executor's blocks that it buys.
        """
        budget_gb = 2048 / GIB  # blocks of this executor have one byte
        bench = make_bench(
            logging_step_interval=1, victim_rule="paused_budget", paused_buffer_size_gb=budget_gb
        )
        bench.link.boot("boot-1")
        with structlog.testing.capture_logs() as logs:
            frontend = bench.frontend()
            frontend.submit(1, [5, 6, 7], 2)
            bench.until(lambda: 1 in frontend.ended)
        told = {re.search(r", p (\d+/\d+)", text)[1] for _, text in lines(logs, "* rank")}
        assert {"0/2048"} == told

    def test_without_an_interval_no_step_has_a_line(self, bench):
        """
        No step is logged unless an interval is set.
        """
        with structlog.testing.capture_logs() as logs:
            frontend = bench.frontend()
            frontend.submit(1, [5, 6, 7], 7)
            bench.until(lambda: 1 in frontend.ended)
        assert [] == lines(logs, "* rank")
