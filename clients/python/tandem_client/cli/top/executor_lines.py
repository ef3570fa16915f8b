"""Lines of `tandem top` on single executors, where several serve."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tandem_client.admin.executors import ExecutorState
from tandem_client.cli.top.plots import kv_map
from tandem_client.views.model import ExecutorView

MAP_WIDTH = 8
MAX_ADDRESS = 22
"""Most columns of an address; of a longer one the end is shown, which tells sockets apart."""
_STYLES = {ExecutorState.SERVING: "green", ExecutorState.REFUSED: "red"}


def executor_lines(
    executors: Sequence[ExecutorView], *, ascii_only: bool = False
) -> RenderableType | None:
    """Return a line per executor; None unless there are several."""
    if len(executors) < 2:
        return None
    lines = Table.grid(*[""] * 7, padding=(0, 1))
    for column in lines.columns:
        column.no_wrap = True
    for one in executors:
        summary, rate = one.summary, one.steps_per_s
        total = summary.total_blocks
        lines.add_row(
            _shown(summary.address),
            Text(summary.state.name.lower(), style=_STYLES.get(summary.state, "yellow")),
            f"{summary.running_requests}/{summary.max_requests}",
            kv_map(
                summary.used_blocks, summary.cached_blocks, total, MAP_WIDTH, ascii_only=ascii_only
            ),
            f"{summary.used_blocks / total:.0%}" if total else "-",
            "-" if rate is None else f"{rate:.0f}/s" if rate >= 100 else f"{rate:.1f}/s",
            Text(f"{summary.losses} lost", style="yellow") if summary.losses else "",
        )
    return lines


def _shown(address: str) -> Text:
    is_long = len(address) > MAX_ADDRESS
    return Text(f"...{address[3 - MAX_ADDRESS :]}" if is_long else address, no_wrap=True)
