"""The part of `tandem top` on single requests, and that on the last faults."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tandem_client.admin.requests import RequestState, RequestSummary
from tandem_client.cli.top.words import duration
from tandem_client.views.model import FaultView

WIDE = 100
"""Columns from which on requests have all their fields."""
_STYLES = {
    RequestState.WAITING: "yellow",
    RequestState.PAUSED: "yellow",
    RequestState.PREFILL: "cyan",
    RequestState.DECODE: "green",
}


def request_lines(
    requests: Sequence[RequestSummary], total: int, *, width: int, rows: int
) -> RenderableType | None:
    """
    Return a table of requests; None without any.

    Args:
        requests: Those that are listed, in the order to show.
        total: All that are in the system.
        width: Columns of the terminal.
        rows: Most requests to show.
    """
    if not total:
        return None
    shown = requests[: max(rows, 0)]
    if not shown:
        return Text(f"{total:,} requests, which are not listed here", style="dim")
    is_wide = width >= WIDE
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("request", no_wrap=True, overflow="ellipsis", ratio=3 if is_wide else None)
    table.add_column("tenant", no_wrap=True, overflow="ellipsis")
    table.add_column("phase", no_wrap=True)
    for name in ("prompt", "output", "age", *(("cached", "TTFT", "preempted") if is_wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for one in shown:
        ttft_s = one.time_to_first_token_s
        more = (
            f"{one.cached_tokens:,}",
            "-" if ttft_s is None else f"{1000 * ttft_s:,.0f} ms",
            str(one.preemptions or "-"),
        )
        table.add_row(
            plain(f"{one.request_id}/{one.choice}" if one.choice else one.request_id),
            plain(one.tenant or "-"),
            Text(one.state.name.lower(), style=_STYLES.get(one.state, "")),
            f"{one.prompt_tokens:,}",
            f"{one.output_tokens:,}",
            duration(one.age_s),
            *(more if is_wide else ()),
        )
    if len(shown) < total:
        table.caption = Text(f"and {total - len(shown):,} more", style="dim")
        table.caption_justify = "left"
    return table


def fault_lines(faults: Sequence[FaultView], rows: int) -> RenderableType | None:
    """Return a line for each of the newest faults; None without any."""
    if not faults:
        return None
    text = Text("\n", no_wrap=True, overflow="ellipsis").join(
        Text.assemble(
            (f"{duration(one.age_s)} ago: ", "dim"),
            (one.what, "red"),
            f" {one.where}" if one.where else "",
            f" ({one.count:,} times)" if one.count > 1 else "",
            f": {plain(one.why)}" if one.why else "",
        )
        for one in faults[:rows]
    )
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def plain(text: str) -> Text:
    """Return a text of another party, in which nothing moves the cursor or changes colours."""
    return Text("".join(sign if sign.isprintable() else "?" for sign in text))
