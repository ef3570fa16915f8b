"""Table of a server's snapshot for a terminal, with the rates of the last seconds."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem_client.admin import Stats
from tandem_client.admin.executors import ExecutorSummary
from tandem_client.cli.shared.unready import why_unready
from tandem_client.cli.top.executor_lines import executor_lines, kv_bar, steps_per_s
from tandem_client.cli.top.rates import Rates, rates_between

BAR_WIDTH = 24


def table(
    now: Stats,
    before: Stats | None,
    width: int = 80,
    *,
    executors: Sequence[ExecutorSummary] = (),
    executors_before: Sequence[ExecutorSummary] = (),
) -> RenderableType:
    """
    Return a snapshot as a table.

    Args:
        now: The newest snapshot.
        before: The snapshot from which rates and means count; None = there is none yet.
        width: Columns of the terminal.
        executors: The executors at the newest snapshot; none = the server does not list them.
        executors_before: The executors at the earlier one.
    """
    rates = rates_between(now, before)
    steps = steps_per_s(executors, executors_before, rates.window_s)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, value in (
        ("server", _state(now)),
        ("model", _model(now)),
        ("requests", _requests(now)),
        ("KV cache", _kv_cache(now, min(BAR_WIDTH, max(4, width - 60)))),
        ("throughput", _throughput(rates)),
        ("latency", _latency(rates)),
        ("prefix cache", _prefix_cache(now, rates)),
        ("steps", _steps(now, rates)),
        ("ended", _ended(now)),
        ("preempted", _preempted(now)),
        ("host memory", _host_memory(now)),
        ("executor", executor_line(now)),
        ("executors", executor_lines(executors, steps)),
    ):
        if value is not None:
            grid.add_row(name, value)
    return Group(grid)


def _state(now: Stats) -> Text:
    up = f", up {duration(now.uptime_s)}"
    if now.executor_attached and not now.draining and not now.suspended:
        return Text("serving", style="green").append(up, style="default")
    state = "draining" if now.draining else "suspended" if now.suspended else "not serving"
    style = "yellow" if now.draining or now.suspended else "red"
    return Text(state, style=style).append(f"{up}; {why_unready(now)}", style="default")


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


def _kv_cache(now: Stats, bar_width: int) -> RenderableType:
    used = now.token_usage
    bar = kv_bar(used, bar_width)
    size, unit = (now.block_size, "tokens") if now.block_size else (1, "blocks")
    line = Table.grid(padding=(0, 1))
    line.add_row(
        bar,
        f"{used:.0%} of {now.total_blocks * size:,} {unit}, {now.cached_blocks * size:,} cached",
    )
    return line


def _throughput(rates: Rates) -> str:
    return (
        f"{_number(rates.output_tokens_per_s)} output tokens/s, "
        f"{_number(rates.prompt_tokens_per_s)} prompt tokens/s, "
        f"{_number(rates.requests_per_s)} requests/s"
    )


def _latency(rates: Rates) -> str:
    return f"TTFT {_number(rates.ttft_ms, ' ms')}, ITL {_number(rates.itl_ms, ' ms')}"


def _prefix_cache(now: Stats, rates: Rates) -> str:
    share = rates.prefix_cache_hit_share
    if share is None:
        return "no new prompt"
    return f"{share:.0%} of prompt tokens found ({now.prefix_cache_hit_tokens:,} since the start)"


def _steps(now: Stats, rates: Rates) -> str:
    if not rates.steps_per_s:
        return f"none computed, {now.steps_in_flight} in flight"
    parts = ", ".join(
        f"{name} {_number(value, ' ms')}"
        for name, value in (("forward", rates.forward_ms), ("sampling", rates.sample_ms))
    )
    graphs = f", {rates.graph_share:.0%} from CUDA graphs" if rates.graph_share else ""
    return f"{_number(rates.steps_per_s)}/s, {parts}{graphs}"


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


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}{unit}" if value >= 100 else f"{value:.1f}{unit}"


def duration(seconds: float) -> str:
    """Return a duration as text, in a fitting unit."""
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    if hours < 2:
        return f"{minutes:.0f} min"
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} days"
