"""Metrics of the core process that are not the core's own."""

from scheduler_svc.ipc import snapshot


class TestMetrics:
    def test_metrics_have_the_newest_report_of_each_process(self, bench):
        """A frontend's report replaces its last one; the core's own is made for the answer."""
        frontend = bench.frontend()
        for num_open in (3, 5):
            report = snapshot.ProcessReport(
                name="frontend-0", cpu_s=1.0, resident_bytes=2, open_streams=num_open
            )
            bench.reply(frontend, "report", snapshot.encode_json(report))
        metrics = snapshot.decode_metrics(bench.reply(frontend, "metrics").result)
        core, told = metrics.processes
        assert report == told
        assert "core" == core.name
        assert core.cpu_s > 0

    def test_sizes_of_requests_and_steps_are_counted(self, bench):
        """Prompts and outputs count at a request's end, and each step counts its tokens."""
        frontend = bench.frontend()
        frontend.submit(0, [4, 5, 6], 5)
        bench.until(lambda: frontend.ended)
        bench.until(lambda: steps(bench, frontend) == bench.link.runner.num_steps)
        sizes = snapshot.decode_metrics(bench.reply(frontend, "metrics").result).histograms
        assert (1, 3) == (
            sizes["request_prompt_tokens"].count,
            sizes["request_prompt_tokens"].total,
        )
        assert (1, 5) == (
            sizes["request_generation_tokens"].count,
            sizes["request_generation_tokens"].total,
        )
        assert bench.link.runner.num_steps == sizes["step_tokens"].count
        assert sizes["step_tokens"].total >= 3 + 4


def steps(bench, frontend):
    """Return the number of steps whose result was applied."""
    return snapshot.decode_stats(bench.reply(frontend, "stats").result).steps
