"""Numbers and times in the words of `tandem top`."""

from __future__ import annotations


def number(value: float | None, unit: str = "") -> str:
    """Return a number with its unit; "-" for None."""
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
