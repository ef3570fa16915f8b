"""Lines of `tandem top` on single executors, where several serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem_client.admin.executors import ExecutorState, ExecutorSummary

BAR_WIDTH = 8
MAX_ADDRESS = 22
"""Most columns of an address; of a longer one the end is shown, which tells sockets apart."""
FULL, NEARLY_FULL = 0.95, 0.8
_STYLES = {ExecutorState.SERVING: "green", ExecutorState.REFUSED: "red"}


def steps_per_s(
    now: Sequence[ExecutorSummary], before: Sequence[ExecutorSummary], window_s: float
) -> dict[str, float]:
    """
    Return the steps per second of each executor, by its address; none where nothing is to compare.

    Args:
        now: The executors now.
        before: The executors `window_s` seconds ago.
        window_s: Seconds between both; 0 = there was no earlier look.
    """
    known = {one.address: one.steps for one in before}
    return {
        one.address: (one.steps - known[one.address]) / window_s
        for one in now
        # One that was removed and added in between counts from 0 again.
        if window_s > 0 and known.get(one.address, one.steps + 1) <= one.steps
    }


def executor_lines(
    executors: Sequence[ExecutorSummary], steps: Mapping[str, float]
) -> RenderableType | None:
    """
    Return a line per executor; None unless there are several.

    Args:
        executors: The executors.
        steps: Steps per second of those for which they are known, by address.
    """
    if len(executors) < 2:
        return None
    lines = Table.grid(*[""] * 6, padding=(0, 1))
    for column in lines.columns:
        column.no_wrap = True
    for one in executors:
        rate = steps.get(one.address)
        lines.add_row(
            _shown(one.address),
            Text(one.state.name.lower(), style=_STYLES.get(one.state, "yellow")),
            f"{one.running_requests}/{one.max_requests}",
            kv_bar(one.used_blocks / one.total_blocks if one.total_blocks else 0.0, BAR_WIDTH),
            f"{one.used_blocks / one.total_blocks:.0%}" if one.total_blocks else "-",
            "-" if rate is None else f"{rate:.0f}/s" if rate >= 100 else f"{rate:.1f}/s",
        )
    return lines


def kv_bar(used: float, width: int) -> ProgressBar:
    """Return a bar of the share of KV memory in use, in the colour of what is left."""
    colour = "red" if used >= FULL else "yellow" if used >= NEARLY_FULL else "green"
    return ProgressBar(
        total=1.0, completed=used, width=width, complete_style=colour, finished_style=colour
    )


def _shown(address: str) -> Text:
    is_long = len(address) > MAX_ADDRESS
    return Text(f"...{address[3 - MAX_ADDRESS :]}" if is_long else address, no_wrap=True)
