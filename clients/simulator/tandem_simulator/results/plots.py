"""Plots of results; they need matplotlib, from the extra `plots`."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tandem.errors import InvalidConfig
from tandem.installation import install_command
from tandem_simulator.results.comparison import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    _Panel = Callable[[Axes, Outcome], None]

_MAX_CURVE_POINTS = 120


def require_matplotlib() -> None:
    """
    Check that plots can be drawn.

    Raises:
        InvalidConfig: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise InvalidConfig(
            f"plots need matplotlib, which is not installed: {install_command('plots')}"
        ) from error


def draw(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """
    Draw `latency.svg` and `memory.svg` with all simulations; equal outcomes give equal files.

    Raises:
        InvalidConfig: matplotlib is not installed, or the folder cannot be written.
    """
    require_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            _figure(folder / "latency.svg", [_draw_ttft, _draw_inter_token], outcomes),
            _figure(folder / "memory.svg", [_draw_kv, _draw_queue], outcomes),
        ]
    except OSError as error:
        raise InvalidConfig(f"cannot write plots to {folder}: {error.strerror}") from error


def _figure(path: Path, panels: Sequence[_Panel], outcomes: Sequence[Outcome]) -> Path:
    import matplotlib as mpl  # noqa: PLC0415  # optional, and slow to load
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Ids in an SVG are hashed with a random salt, and text is drawn, unless told otherwise.
    with mpl.rc_context({"svg.hashsalt": "tandem", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
            for outcome in outcomes:
                panel(axes, outcome)
            axes.grid(visible=True, alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        if outcomes[0].label:
            axes.legend(fontsize=8, frameon=False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    # A hundredth of a pixel will do, in two thirds of the bytes.
    path.write_text(re.sub(r"(\d\.\d\d)\d+", r"\1", drawn.getvalue()))
    return path


def _draw_ttft(axes: Axes, outcome: Outcome) -> None:
    recorder = outcome.recorder
    waits = (recorder.first_token_s - recorder.arrival_s)[: recorder.num_sent]
    _curve(axes, waits[~np.isnan(waits)] * 1e3, outcome.label)
    axes.set(xscale="log", xlabel="time to first token, ms", ylabel="share of requests")


def _draw_inter_token(axes: Axes, outcome: Outcome) -> None:
    _curve(axes, outcome.recorder.inter_token_s * 1e3, outcome.label)
    axes.set(xscale="log", xlabel="time between tokens, ms", ylabel="share of tokens")


def _draw_kv(axes: Axes, outcome: Outcome) -> None:
    points = _thinned(outcome)
    total = outcome.results["memory"]["total_blocks"]
    used = np.array(points["used_blocks"]) / total
    (line,) = axes.plot(points["time_s"], used, label=outcome.label, linewidth=1)
    cached = used + np.array(points["cached_blocks"]) / total
    axes.plot(points["time_s"], cached, color=line.get_color(), linewidth=0.8, linestyle=":")
    axes.set(xlabel="time, s", ylabel="KV in use (dotted: and cached)", ylim=(0, 1.02))


def _draw_queue(axes: Axes, outcome: Outcome) -> None:
    points = _thinned(outcome)
    (line,) = axes.plot(points["time_s"], points["running"], label=outcome.label, linewidth=1)
    axes.plot(
        points["time_s"], points["waiting"], color=line.get_color(), linewidth=0.8, linestyle=":"
    )
    axes.set(xlabel="time, s", ylabel="requests running (dotted: waiting)")


def _thinned(outcome: Outcome) -> dict[str, list[float]]:
    """Take every other point over time, to keep files small."""
    return {name: column[::2] for name, column in outcome.results["over_time"].items()}


def _curve(axes: Axes, values: NDArray[np.float64], label: str) -> None:
    """Draw the share of values at or below each value, thinned evenly over the shares."""
    if not len(values):
        return
    shares = np.linspace(0, 100, min(len(values), _MAX_CURVE_POINTS))
    axes.plot(np.percentile(values, shares), shares / 100, label=label, linewidth=1.2)
