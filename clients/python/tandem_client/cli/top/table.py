"""Table of a server's snapshot for a terminal, with the rates of the last seconds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem_client.admin import Stats
from tandem_client.cli.top.executor_lines import executor_lines
from tandem_client.cli.top.plots import kv_map, sparkline
from tandem_client.cli.top.request_lines import fault_lines, request_lines
from tandem_client.cli.top.words import duration, number
from tandem_client.views.model import ViewModel
from tandem_client.views.rates import Rates

BAR_WIDTH = 24
NAME_WIDTH = 18
"""Columns of the names of rows, and of the space beside all columns."""
LABEL_WIDTH = 17
"""Columns of a plot's name and newest value."""
MAX_SPARK_WIDTH = 60
MAX_REQUESTS, MIN_REQUESTS = 20, 3
MAX_FAULTS = 5
TALL = 30
"""Lines of a terminal from which on more than one fault is shown."""
HEADINGS = 4
"""Lines of a terminal beside rows: the line on a silent server, headings, and the last one."""


def table(
    view: ViewModel, width: int = 80, *, height: int | None = None, ascii_only: bool = False
) -> RenderableType:
    """
    Return a view of a server for a terminal.

    Args:
        view: The view.
        width: Columns of the terminal.
        height: Lines of the terminal, which bound the requests and faults shown; None = no bound.
        ascii_only: True for a terminal that shows nothing but ASCII.
    """
    head = _head(view, width, ascii_only=ascii_only)
    num_faults = MAX_FAULTS if height is None or height >= TALL else 1
    faults = fault_lines(view.faults, num_faults)
    rows = MAX_REQUESTS
    if height is not None:
        # Each row of the head takes a line, but for that of several executors.
        num_executors = max(1, len(view.executors))
        taken = head.row_count + num_executors + min(len(view.faults), num_faults) + HEADINGS
        rows = max(MIN_REQUESTS, height - taken)
    requests = request_lines(view.requests, view.num_requests, width=width, rows=rows)
    if faults is not None:
        head.add_row("last faults", faults)
    return Group(head, *(() if requests is None else (Text(""), requests)))


def _head(view: ViewModel, width: int, *, ascii_only: bool) -> Table:
    now, rates = view.stats, view.rates
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    spark = partial(_sparks, width=width, ascii_only=ascii_only)
    points, steps = view.points, view.steps
    for name, value in (
        ("server", _state(view)),
        ("model", _model(now)),
        ("requests", _requests(now)),
        ("KV cache", _kv_cache(now, min(BAR_WIDTH, max(4, width - 60)), ascii_only=ascii_only)),
        ("throughput", _throughput(rates)),
        ("latency", _latency(rates)),
        (
            "TTFT",
            spark(
                ("p50", [one.ttft_p50_ms for one in points]),
                ("p99", [one.ttft_p99_ms for one in points]),
            ),
        ),
        (
            "ITL",
            spark(
                ("p50", [one.itl_p50_ms for one in points]),
                ("p99", [one.itl_p99_ms for one in points]),
            ),
        ),
        ("prefix cache", _prefix_cache(now, rates)),
        ("steps", _steps(now, rates)),
        (
            "last steps",
            spark(
                ("time", [one.compute_ms for one in steps]),
                ("size", [one.tokens for one in steps]),
                units=(" ms", " tokens"),
            ),
        ),
        ("ended", _ended(now)),
        ("preempted", _preempted(now)),
        ("host memory", _host_memory(now)),
        ("executor", executor_line(now)),
        ("executors", executor_lines(view.executors, ascii_only=ascii_only)),
    ):
        if value is not None:
            grid.add_row(name, value)
    return grid


def _sparks(
    *plots: tuple[str, Sequence[float | None]],
    width: int,
    ascii_only: bool,
    units: tuple[str, ...] = (" ms", " ms"),
) -> Text | None:
    """Return plots beside each other, each with its newest value; None without any value."""
    if all(value is None for _, values in plots for value in values):
        return None
    columns = max(0, min(MAX_SPARK_WIDTH, (width - NAME_WIDTH) // len(plots) - LABEL_WIDTH))
    text = Text(no_wrap=True)
    for (label, values), unit in zip(plots, units, strict=True):
        newest = next((value for value in reversed(values) if value is not None), None)
        words = (
            f"{label} {newest:,}{unit}"
            if isinstance(newest, int)
            else f"{label} {number(newest, unit)}"
        )
        text.append(words.ljust(LABEL_WIDTH))
        text.append(sparkline(values, columns, ascii_only=ascii_only).ljust(columns), style="cyan")
        text.append(" ")
    text.rstrip()
    return text


def _state(view: ViewModel) -> Text:
    up = f", up {duration(view.stats.uptime_s)}"
    if not view.why:
        return Text(view.state, style="green").append(up, style="default")
    style = "red" if view.state == "not serving" else "yellow"
    return Text(view.state, style=style).append(f"{up}; {view.why}", style="default")


def _model(now: Stats) -> str | None:
    if not now.model:
        return None
    return f"{now.model}, {now.dtype}, context of {now.max_model_len:,} tokens"


def _requests(now: Stats) -> Text:
    text = Text(f"{now.running_requests} running, ")
    waits = f"{now.waiting_requests} waiting"
    text.append(waits, style="yellow" if now.waiting_requests else "default")
    if now.waiting_requests:
        text.append(f" ({now.queued_tokens:,} prompt tokens)")
    return text.append(f", policy {now.schedule_policy}" if now.schedule_policy else "")


def _kv_cache(now: Stats, bar_width: int, *, ascii_only: bool) -> RenderableType:
    used = now.token_usage
    bar = kv_map(
        now.used_blocks, now.cached_blocks, now.total_blocks, bar_width, ascii_only=ascii_only
    )
    size, unit = (now.block_size, "tokens") if now.block_size else (1, "blocks")
    line = Table.grid(padding=(0, 1))
    line.add_row(
        bar,
        f"{used:.0%} of {now.total_blocks * size:,} {unit}, {now.cached_blocks * size:,} cached",
    )
    return line


def _throughput(rates: Rates) -> str:
    return (
        f"{number(rates.output_tokens_per_s)} output tokens/s, "
        f"{number(rates.prompt_tokens_per_s)} prompt tokens/s, "
        f"{number(rates.requests_per_s)} requests/s"
    )


def _latency(rates: Rates) -> str:
    return f"TTFT {number(rates.ttft_ms, ' ms')}, ITL {number(rates.itl_ms, ' ms')}"


def _prefix_cache(now: Stats, rates: Rates) -> str:
    share = rates.prefix_cache_hit_share
    if share is None:
        return "no new prompt"
    return f"{share:.0%} of prompt tokens found ({now.prefix_cache_hit_tokens:,} since the start)"


def _steps(now: Stats, rates: Rates) -> str:
    if not rates.steps_per_s:
        return f"none computed, {now.steps_in_flight} in flight"
    parts = ", ".join(
        f"{name} {number(value, ' ms')}"
        for name, value in (("forward", rates.forward_ms), ("sampling", rates.sample_ms))
    )
    graphs = f", {rates.graph_share:.0%} from CUDA graphs" if rates.graph_share else ""
    return f"{number(rates.steps_per_s)}/s, {parts}{graphs}"


def _ended(now: Stats) -> Text:
    text = Text(f"{now.finished_requests:,} finished, ")
    text.append(f"{now.failed_requests:,} failed", style="red" if now.failed_requests else "")
    by_limit = ", ".join(
        f"{count:,} by {limit}" for limit, count in sorted(now.refused_by_limit.items())
    )
    return text.append(f", {now.refused_requests:,} refused{f' ({by_limit})' if by_limit else ''}")


def _preempted(now: Stats) -> str | None:
    if not (now.preemptions or now.paused_requests or now.swapped_requests):
        return None
    text = f"{now.preemptions:,} times, {now.retractions:,} of them for lack of KV blocks"
    text += f"; {now.paused_requests} paused" if now.paused_requests else ""
    return text + (f"; {now.swapped_requests} swapped out" if now.swapped_requests else "")


def _host_memory(now: Stats) -> str | None:
    if not now.host_blocks:
        return None
    lacked = f", too few {now.swap_fallbacks:,} times" if now.swap_fallbacks else ""
    return (
        f"{now.used_host_blocks:,} of {now.host_blocks:,} blocks used; swapped "
        f"{now.swapped_out_blocks:,} out, {now.swapped_in_blocks:,} in{lacked}"
    )


def executor_line(now: Stats) -> str:
    """Return a line with the executor's address and its failures so far."""
    if not now.executor_attached:
        last = f"; the last was {now.executor_address}" if now.executor_address else ""
        return now.executor_refusal or f"none attached{last}"
    parts = [now.executor_address]
    if now.executor_losses:
        lost = f"lost {now.executor_losses} times since the start"
        parts.append(f"{lost} ({now.recomputed_tokens:,} tokens computed again)")
    if now.executor_reattachments:
        parts.append(f"connection restored {now.executor_reattachments} times")
    if now.suspected_requests:
        parts.append(f"{now.suspected_requests} requests suspected of killing it")
    return ", ".join(parts)
