"""
Make the Grafana dashboard: `python deploy/monitoring/dashboard.py` writes dashboard.json beside it;
with `--print` it is printed instead.

The JSON is what Grafana imports; this file says what is in it, one line per query.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).with_name("dashboard.json")
PANELS_PER_ROW = 3
PANEL_HEIGHT = 8
GRID_WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${source}"}
OF = '{job=~"$job", instance=~"$instance"}'
"""Selector of the instances that are chosen at the top of the dashboard."""


@dataclass(frozen=True, slots=True)
class Panel:
    """
    One plot.

    Attributes:
        title: Its title.
        unit: Unit of its values, by Grafana's name.
        queries: PromQL by legend; `@` stands for the selector of the chosen instances.
        text: Explanation that Grafana shows beside the title.
    """

    title: str
    unit: str
    queries: dict[str, str]
    text: str = ""


def rate(counter: str) -> str:
    """Return the query of a counter's rate."""
    return f"rate({counter}@[$__rate_interval])"


def quantile(share: float, histogram: str) -> str:
    """Return the query of a quantile over all chosen instances."""
    buckets = f"sum by (le) (rate({histogram}_bucket@[$__rate_interval]))"
    return f"histogram_quantile({share}, {buckets})"


def quantiles(histogram: str) -> dict[str, str]:
    """Return the queries of the quantiles that a plot of a latency shows."""
    return {f"p{100 * share:g}": quantile(share, histogram) for share in (0.5, 0.95, 0.99)}


ROWS: dict[str, Sequence[Panel]] = {
    "Overview": (
        Panel(
            "Requests",
            "short",
            {
                "running {{instance}}": "tandem_requests_running@",
                "waiting {{instance}}": "tandem_requests_waiting@",
                "limit {{instance}}": "tandem_requests_limit@",
            },
        ),
        Panel(
            "Tokens per second",
            "short",
            {
                "generated {{instance}}": rate("tandem_generation_tokens_total"),
                "prefilled {{instance}}": rate("tandem_prefill_tokens_total"),
            },
        ),
        Panel(
            "Ready, progressing, draining",
            "bool_yes_no",
            {
                "ready {{instance}}": "tandem_ready@",
                "progressing {{instance}}": "tandem_progressing@",
                "draining {{instance}}": "tandem_draining@",
            },
        ),
    ),
    "Latency": (
        Panel("Time to first token", "s", quantiles("tandem_time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", quantiles("tandem_inter_token_latency_seconds")),
        Panel("End-to-end latency", "s", quantiles("tandem_e2e_request_latency_seconds")),
        Panel("Queue time", "s", quantiles("tandem_request_queue_time_seconds")),
        Panel("Prompt length", "short", quantiles("tandem_request_prompt_tokens")),
        Panel("Output length", "short", quantiles("tandem_request_generation_tokens")),
    ),
    "Requests": (
        Panel(
            "Ended, by outcome and reason",
            "reqps",
            {
                "{{outcome}} {{reason}}": (
                    "sum by (outcome, reason) (rate(tandem_requests_total@[$__rate_interval]))"
                )
            },
        ),
        Panel(
            "Refused, by limit",
            "reqps",
            {"{{limit}}": "sum by (limit) (rate(tandem_refusals_total@[$__rate_interval]))"},
        ),
        Panel(
            "Failed calls, by reason",
            "reqps",
            {"{{reason}}": "sum by (reason) (rate(tandem_call_failures_total@[$__rate_interval]))"},
            "Every call, and item of a call, that a client got an error for.",
        ),
    ),
    "KV cache": (
        Panel(
            "Blocks",
            "short",
            {
                "used {{instance}}": "tandem_kv_blocks_used@",
                "cached {{instance}}": "tandem_kv_blocks_cached@",
                "all {{instance}}": "tandem_kv_blocks@",
            },
            "Cached blocks are given away when requests need them.",
        ),
        Panel(
            "Usage and prefix cache hits",
            "percentunit",
            {
                "usage {{instance}}": "tandem_kv_cache_usage_ratio@",
                "hits {{instance}}": "instance:tandem_prefix_cache_hit:ratio5m@",
            },
        ),
        Panel(
            "Preemptions",
            "short",
            {
                "all {{instance}}": rate("tandem_preemptions_total"),
                "for lack of blocks {{instance}}": rate("tandem_retractions_total"),
                "paused now {{instance}}": "tandem_requests_paused@",
                "swapped now {{instance}}": "tandem_requests_swapped@",
            },
        ),
    ),
    "Steps": (
        Panel("Step, from sending it to its result", "s", quantiles("tandem_step_time_seconds")),
        Panel(
            "Parts of a step, mean",
            "s",
            {
                part: (
                    f"sum(rate(tandem_{metric}_seconds_sum@[$__rate_interval])) / "
                    f"sum(rate(tandem_{metric}_seconds_count@[$__rate_interval]))"
                )
                for part, metric in (
                    ("planning", "schedule_time"),
                    ("wait in the executor", "executor_queue_time"),
                    ("forward pass", "executor_forward_time"),
                    ("sampling", "executor_sample_time"),
                )
            },
            "Steps are sent ahead: where they never wait in the executor, it waits for them.",
        ),
        Panel("Tokens of a step", "short", quantiles("tandem_step_tokens")),
        Panel("Steps per second", "short", {"{{instance}}": rate("tandem_steps_total")}),
        Panel("Steps in flight", "short", {"{{instance}}": "tandem_steps_in_flight@"}),
        Panel(
            "Executors busy, captured graphs",
            "percentunit",
            {
                "busy {{instance}}": "instance:tandem_executor_busy:ratio5m@",
                "graphs {{instance}}": (
                    "rate(tandem_graph_steps_total@[$__rate_interval]) / "
                    "rate(tandem_steps_total@[$__rate_interval])"
                ),
            },
        ),
    ),
    "Executors": (
        Panel("State", "short", {"{{executor}} {{state}}": "tandem_each_executor_state@"}),
        Panel(
            "Requests and KV usage",
            "short",
            {
                "requests {{executor}}": "tandem_each_executor_requests_running@",
                "KV usage {{executor}}": (
                    "tandem_each_executor_kv_blocks_used@ / (tandem_each_executor_kv_blocks@ > 0)"
                ),
            },
        ),
        Panel(
            "Losses and what they cost",
            "short",
            {
                "sessions lost {{instance}}": "increase(tandem_executor_losses_total@[5m])",
                "streams attached again {{instance}}": (
                    "increase(tandem_executor_reattachments_total@[5m])"
                ),
                "tokens recomputed {{instance}}": "increase(tandem_recomputed_tokens_total@[5m])",
                "deaths in a step {{instance}}": "increase(tandem_executor_deaths_total@[5m])",
            },
        ),
    ),
    "Processes, certificates and files": (
        Panel(
            "Processor", "percentunit", {"{{process}}": rate("tandem_process_cpu_seconds_total")}
        ),
        Panel("Memory", "bytes", {"{{process}}": "tandem_process_resident_memory_bytes@"}),
        Panel(
            "Streams and merged updates",
            "short",
            {
                "open {{process}}": "tandem_open_streams@",
                "merged per second {{instance}}": rate("tandem_merged_updates_total"),
            },
        ),
        Panel(
            "Certificates: time left",
            "s",
            {
                "{{certificate}}": (
                    "min by (certificate) "
                    "(tandem_certificate_expiration_timestamp_seconds@) - time()"
                )
            },
        ),
        Panel(
            "Files whose new content is refused",
            "bool_yes_no",
            {"{{file}}": "max by (file) (tandem_file_reload_failed@)"},
        ),
        Panel("Version and model", "short", {"{{version}}": "tandem_build_info@"}),
    ),
    "OpenAI gateway": (
        Panel(
            "Answers, by status",
            "reqps",
            {
                "{{path}} {{status}}": (
                    "sum by (path, status) (rate(tandem_gateway_requests_total[$__rate_interval]))"
                )
            },
        ),
        Panel(
            "Duration",
            "s",
            {
                "p95 {{path}}": (
                    "histogram_quantile(0.95, sum by (le, path) "
                    "(rate(tandem_gateway_request_seconds_bucket[$__rate_interval])))"
                )
            },
        ),
        Panel(
            "Schedulers and streams",
            "short",
            {
                "ready schedulers {{instance}}": "tandem_gateway_ready_schedulers",
                "requests {{instance}}": "tandem_gateway_running_requests",
                "resumed per second {{instance}}": (
                    "rate(tandem_gateway_resumes_total[$__rate_interval])"
                ),
            },
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's model."""
    return {
        "uid": "tandem",
        "title": "Tandem",
        "tags": ["tandem", "llm"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    for name, query in (
        ("job", "label_values(tandem_uptime_seconds, job)"),
        ("instance", 'label_values(tandem_uptime_seconds{job=~"$job"}, instance)'),
    ):
        yield {
            "name": name,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".+",
            "current": {"text": "All", "value": "$__all"},
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, top, width = 0, 0, GRID_WIDTH // PANELS_PER_ROW
    for title, panels in ROWS.items():
        number += 1
        place = {"h": 1, "w": GRID_WIDTH, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        top += 1
        for at, panel in enumerate(panels):
            number += 1
            down, across = divmod(at, PANELS_PER_ROW)
            left = {"x": across * width, "y": top + down * PANEL_HEIGHT}
            yield _panel(panel) | {"id": number, "gridPos": {"h": PANEL_HEIGHT, "w": width} | left}
        top += -(-len(panels) // PANELS_PER_ROW) * PANEL_HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": query.replace("@", OF),
                "legendFormat": legend,
            }
            for at, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """Return the content of dashboard.json."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(text())
    else:
        DASHBOARD.write_text(text())
