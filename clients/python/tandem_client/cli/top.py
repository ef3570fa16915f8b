"""`tandem top`: what a running server does, once a second."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tandem_client.admin import AdminClient, Stats
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS
from tandem_client.cli import options
from tandem_client.cli.failures import readable_errors


@readable_errors
def top(
    *,
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit.")] = False,
    as_json: options.Json = False,
) -> None:
    """
    Watch what a running server does.

    With --json each look is one JSON object on a line of its own.
    """
    with AdminClient(address, retry=options.RETRY) as admin:
        if once or as_json:
            _print_looks(admin, interval_s, once=once, as_json=as_json)
            return
        stats = admin.stats()
        with Live(table(stats, None), console=Console()) as live:
            while True:
                time.sleep(interval_s)
                previous, stats = stats, admin.stats()
                live.update(table(stats, previous))


def table(now: Stats, before: Stats | None) -> Table:
    """
    A snapshot for people; rates count from `before`, or from the server's start.

    Args:
        now: The newest snapshot.
        before: An older one of the same server.
    """
    seconds = now.uptime_s - (before.uptime_s if before else 0.0)

    def rate(name: str) -> str:
        gained = getattr(now, name) - (getattr(before, name) if before else 0)
        return f"{gained / seconds:.1f}/s" if seconds > 0 else "-"

    serving = "serving" if now.executor_attached else "no executor"
    state = "draining" if now.draining else "suspended" if now.suspended else serving
    rows = {
        "state": f"{state}, up {now.uptime_s:.0f} s",
        "requests": f"{now.running_requests} running, {now.waiting_requests} waiting "
        f"({now.queued_tokens} tokens, {now.schedule_policy or 'no policy yet'})",
        "blocks": f"{now.used_blocks}/{now.total_blocks} used ({now.token_usage:.0%}), "
        f"{now.cached_blocks} cached, {now.free_blocks} free",
        "prefix cache": _hits(now, before),
        "output tokens": rate("output_tokens"),
        "prompt tokens": rate("prefill_tokens"),
        "steps": f"{rate('steps')}, {now.steps_in_flight} in flight; {_step_parts(now, before)}",
        "finished": f"{now.finished_requests} ({rate('finished_requests')})",
        "failed, refused": f"{now.failed_requests}, {now.refused_requests}{_limits(now)}",
        "preemptions": f"{now.preemptions}, {now.retractions} for lack of blocks; "
        f"{now.paused_requests} paused, {now.swapped_requests} swapped",
        "new token ratio": f"{now.new_token_ratio:.4f}",
        "executor": _executor(now),
    }
    if now.host_blocks:
        rows["host blocks"] = (
            f"{now.used_host_blocks}/{now.host_blocks} used; {now.swapped_out_blocks} out, "
            f"{now.swapped_in_blocks} back, {now.swap_fallbacks} times too few"
        )
    grid = Table(show_header=False, box=None)
    for name, value in rows.items():
        grid.add_row(name, value)
    return grid


def _step_parts(now: Stats, before: Stats | None) -> str:
    """What a step takes on the executor, and how many ran from graphs."""

    def gained(name: str) -> float:
        value: float = getattr(now, name) - (getattr(before, name) if before else 0)
        return value

    steps = gained("steps")
    if steps <= 0:
        return "none computed"
    parts = ", ".join(
        f"{part} {1000 * gained(f'executor_{part}_s') / steps:.2f} ms"
        for part in ("forward", "sample", "queued")
    )
    return f"{parts}; {gained('graph_steps') / steps:.0%} from graphs"


def _executor(now: Stats) -> str:
    if not now.executor_attached:
        last = f"; the last was {now.executor_address}" if now.executor_address else ""
        return now.executor_refusal or f"none attached{last}"
    return (
        f"{now.executor_address}, {now.executor_losses} times lost "
        f"({now.recomputed_tokens} tokens computed again), "
        f"{now.executor_reattachments} times attached again"
        + (f", {now.suspected_requests} SUSPECTS ARE TRIED" if now.suspected_requests else "")
    )


def _hits(now: Stats, before: Stats | None) -> str:
    looked_up, found = now.prefix_cache_lookup_tokens, now.prefix_cache_hit_tokens
    if before is not None and looked_up > before.prefix_cache_lookup_tokens:
        looked_up -= before.prefix_cache_lookup_tokens
        found -= before.prefix_cache_hit_tokens
    share = f"{found / looked_up:.0%}" if looked_up else "-"
    return f"{share} of prompt tokens found, {now.prefix_cache_hit_tokens} in all"


def _limits(now: Stats) -> str:
    by_limit = ", ".join(
        f"{limit} {count}" for limit, count in sorted(now.refused_by_limit.items())
    )
    return f" ({by_limit})" if by_limit else ""


def _print_looks(admin: AdminClient, interval_s: float, *, once: bool, as_json: bool) -> None:
    while True:
        stats = admin.stats()
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(stats)))
        else:
            Console().print(table(stats, None))
        if once:
            return
        time.sleep(interval_s)
