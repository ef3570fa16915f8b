"""Plots of a few characters: sparklines, and maps of KV memory."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

BARS = (
    "\N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE QUARTER BLOCK}\N{LOWER THREE EIGHTHS BLOCK}"
    "\N{LOWER HALF BLOCK}\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER THREE QUARTERS BLOCK}"
    "\N{LOWER SEVEN EIGHTHS BLOCK}\N{FULL BLOCK}"
)
ASCII_BARS = "_.-:=+*#"
USED, CACHED, FREE = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}", "\N{LIGHT SHADE}"
ASCII_USED, ASCII_CACHED, ASCII_FREE = "#", "+", "."
FULL, NEARLY_FULL = 0.95, 0.8


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """
    Return the newest values as bars, one column each, from 0 to the largest that is shown.

    Args:
        values: Values of at least 0, oldest first; None leaves its column empty.
        width: Most columns.
        ascii_only: True for a terminal that shows nothing else.
    """
    bars = ASCII_BARS if ascii_only else BARS
    shown = list(values[-width:]) if width > 0 else []
    largest = max((value for value in shown if value is not None), default=0.0)
    return "".join(
        " "
        if value is None
        else bars[min(len(bars) - 1, int(value / largest * len(bars)))]
        if largest > 0
        else bars[0]
        for value in shown
    )


def kv_map(used: int, cached: int, total: int, width: int, *, ascii_only: bool = False) -> Text:
    """
    Return a map of KV memory: the parts that requests use, that are only cached, and that are free.

    Args:
        used: Blocks that requests use.
        cached: Blocks kept for the prefix cache alone.
        total: All blocks; 0 where they are not known.
        width: Columns of the map.
        ascii_only: True for a terminal that shows nothing else.
    """
    if not total:
        return Text("")
    signs = (ASCII_USED, ASCII_CACHED, ASCII_FREE) if ascii_only else (USED, CACHED, FREE)
    share = used / total
    colour = "red" if share >= FULL else "yellow" if share >= NEARLY_FULL else "green"
    # A part that is there shows at least one column, as long as there is room.
    num_used = min(width, max(round(width * share), used > 0))
    num_cached = min(width - num_used, max(round(width * cached / total), cached > 0))
    return Text.assemble(
        (signs[0] * num_used, colour),
        (signs[1] * num_cached, "cyan"),
        (signs[2] * (width - num_used - num_cached), "dim"),
    )
