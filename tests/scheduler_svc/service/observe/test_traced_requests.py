"""Steps that the core tells to frontends, which make spans of them, and ids in its lines."""

from __future__ import annotations

import subprocess
import sys

import structlog

from scheduler_svc.service.observe import traced_requests

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def ids(number: int) -> dict[str, str]:
    return {"trace_id": TRACE, "span_id": f"{number:016x}"}


class TestTracedSteps:
    def test_steps_of_a_traced_request_are_told(self, make_bench):
        """
        Each step that computed a traced request is told with its rows, its tokens and one link to
        the span of the request.
        """
        bench = make_bench(traced_steps_per_s=100)
        bench.link.boot("boot-1")
        frontend = bench.frontend()
        frontend.submit(1, [5, 6, 7], 4, **ids(1))
        frontend.submit(2, [5, 6], 4)
        bench.until(lambda: len(frontend.ended) == 2)
        first, *later = frontend.steps
        assert (2, 0, 5) == (first.num_prefills, first.num_decodes, first.prefill_tokens)
        assert {(0, 2, 0)} == {
            (one.num_prefills, one.num_decodes, one.prefill_tokens) for one in later
        }
        assert [*range(first.step_id, first.step_id + 4)] == [one.step_id for one in frontend.steps]
        assert {((TRACE, f"{1:016x}"),)} == {one.links for one in frontend.steps}
        assert ("boot-1", 0, 0) == (first.boot_id, first.num_left_out, first.num_skipped)
        assert first.sent_s <= first.applied_s

    def test_no_step_is_told_without_traced_requests(self, bench):
        """
        Steps of requests whose spans are not recorded are told to no frontend, before a traced
        request and after it.
        """
        frontend = bench.frontend()
        frontend.submit(1, [5, 6, 7], 4)
        bench.until(lambda: 1 in frontend.ended)
        frontend.submit(2, [5, 6, 7], 1, **ids(2))
        bench.until(lambda: 2 in frontend.ended)
        num_told = len(frontend.steps)
        frontend.submit(3, [5, 6, 7], 4, trace_id=TRACE)
        bench.until(lambda: 3 in frontend.ended)
        assert 1 == num_told == len(frontend.steps)

    def test_steps_past_the_limit_are_counted(self, make_bench):
        """
        In one moment no more steps are told than in a second; the next one tells how many were not.
        """
        bench = make_bench(traced_steps_per_s=2)
        bench.link.boot("boot-1")
        frontend = bench.frontend()
        frontend.submit(1, [5, 6, 7], 9, **ids(1))
        bench.until(lambda: 1 in frontend.ended)
        assert 2 == len(frontend.steps)
        bench.let_pass(1.0)
        frontend.submit(2, [5, 6, 7], 1, **ids(2))
        bench.until(lambda: 2 in frontend.ended)
        assert 7 == frontend.steps[-1].num_skipped

    def test_links_are_bounded(self, make_bench, monkeypatch):
        """
        A step with more traced requests than links counts those left out; the choices of one
        request have one link.
        """
        monkeypatch.setattr(traced_requests, "MAX_LINKS", 2)
        bench = make_bench()
        bench.link.boot("boot-1")
        frontend = bench.frontend()
        frontend.submit(1, [5, 6, 7], 3, num_choices=2, **ids(1))
        for stream_id in (3, 4):
            frontend.submit(stream_id, [5, 6], 3, **ids(stream_id))
        bench.until(lambda: len(frontend.ended) == 4)
        whole = [one for one in frontend.steps if one.num_decodes == 4]
        assert whole
        assert {(2, 1)} == {(len(one.links), one.num_left_out) for one in whole}

    def test_one_frontend_makes_the_span_of_a_step(self, bench):
        """
        A step with traced requests of two frontends is told to one of them, with links to both.
        """
        frontends = [bench.frontend(0), bench.frontend(1)]
        for frontend in frontends:
            frontend.submit(1, [5, 6, 7], 3, **ids(frontend.index + 1))
        bench.until(lambda: all(frontend.ended for frontend in frontends))
        told = [one.step_id for frontend in frontends for one in frontend.steps]
        assert len(told) == len(set(told)) > 0
        assert 2 == max(len(one.links) for frontend in frontends for one in frontend.steps)


class TestIds:
    def test_lines_about_a_request_have_its_trace(self, bench):
        """
        Lines of the core process about a request have its id, and that of its trace if it has one.
        """
        with structlog.testing.capture_logs() as logs:
            frontend = bench.frontend()
            frontend.submit(1, [5, 6, 7], 50, trace_id=TRACE)
            frontend.submit(2, [5, 6, 7], 50)
            bench.until(lambda: len(frontend.accepted) == 2)
            frontend.end(1)
            bench.until(lambda: len(frontend.ended) == 2)
        found = {
            (line["event"], line["request_id"], line.get("trace_id"))
            for line in logs
            if "request_id" in line
        }
        assert {
            ("request_accepted", "0-1", TRACE),
            ("request_ended_by_frontend", "0-1", TRACE),
            ("request_accepted", "0-2", None),
        } == found

    def test_lines_about_a_step_have_its_id(self, make_bench):
        """
        The lines of a step's plan have the id under which the executor knows the step.
        """
        bench = make_bench(logging_step_interval=1)
        bench.link.boot("boot-1")
        with structlog.testing.capture_logs() as logs:
            frontend = bench.frontend()
            frontend.submit(1, [5, 6, 7], 50)
            bench.until(lambda: 1 in frontend.ended)
        steps: dict[str, list[int]] = {}
        for line in logs:
            if "values" in line:
                steps.setdefault(line["event"], []).append(line["values"]["step_id"])
        assert {"prefill_batch", "decode_batch", "step", "memory_usage"} == steps.keys()
        assert [min(steps["step"])] == steps["prefill_batch"]
        assert steps["step"] == steps["memory_usage"]
        assert set(steps["decode_batch"]) <= set(steps["step"])


def test_core_process_loads_no_opentelemetry():
    """
    The modules of the core process import nothing of OpenTelemetry.
    """
    code = (
        "import sys, scheduler_svc.service.service as _; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "[]" == done.stdout.strip()
