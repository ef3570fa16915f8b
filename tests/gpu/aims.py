"""Aims of a run on a GPU with the numbers that it found, and comparisons of what it measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.gpu.parts import Outcome

Rows = list[dict[str, Any]]

_FULL_ROWS = 63

_STEP_AIMS = {"llama-8b": ("8B", 75), "qwen3-4b": ("Qwen3-4B", 70), "llama-1b": ("1B", 60)}
"""Name and least percentage of the roofline, by model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """
    A number that a GPU should show, and the number that it showed.

    Attributes:
        text: Description of the aim.
        least: The smallest number that reaches it; or with `is_most`, the largest.
        found: Number that was found; None where it was not measured.
    """

    text: str
    least: float
    found: float | None
    is_most: bool = False

    @property
    def verdict(self) -> str:
        """Verdict in one word."""
        if self.found is None:
            return "not measured"
        reached = self.found <= self.least if self.is_most else self.found >= self.least
        return "reached" if reached else "missed"


def aims(outcomes: Sequence[Outcome]) -> list[Aim]:
    """Return each aim with the median, the sum or the one number of what belongs to it."""
    return [*_kernel_aims(outcomes), *_serving_aims(outcomes)]


def _kernel_aims(outcomes: Sequence[Outcome]) -> list[Aim]:
    decodes = _attention("decode", outcomes)
    prompts = _attention("prefill", outcomes)
    steps = _of("decode steps", outcomes, "model", "rows", "context", "percent_of_floor")
    wide = [row for row in _ours(decodes) if _batch(row) >= 32]
    return [
        Aim(
            text="decode attention from 32 rows on, % of copy bandwidth",
            least=85,
            found=_median([row["percent_of_ceiling"] for row in wide]),
        ),
        Aim(
            text="decode attention, times the speed of FlashInfer",
            least=1.0,
            found=_median([row["times FlashInfer"] for row in beside_flashinfer(outcomes)]),
        ),
        *(
            Aim(
                text=f"{name} decode step of 32 rows at 1,024 positions, % of the roofline",
                least=least,
                found=_step_percent(steps, model),
            )
            for model, (name, least) in _STEP_AIMS.items()
        ),
        Aim(
            text="captured decode steps, times the speed of eager ones",
            least=1.0,
            found=_median([row["times eager"] for row in beside_eager(outcomes)]),
        ),
        Aim(
            text="prefill attention of long prompts, TFLOP/s",
            least=400,
            found=max((row["tflop_per_s"] for row in _ours(prompts)), default=None),
        ),
    ]


def _serving_aims(outcomes: Sequence[Outcome]) -> list[Aim]:
    offline = _of("offline", outcomes, "engine", "output_tokens_per_s")
    served = _of("serve", outcomes, "asked", "answered")
    after_kills = _of("recovery", outcomes, "kills", "failed", "different")
    kills = _of("recovery", outcomes, "kill", "device_gb_held", "memory_back_s")
    watched = [row for row in kills if row["device_gb_held"] is not None]
    tokens = _of("tokens", outcomes, "dtype", "beyond_margin")
    idle = _of("idle", outcomes, "idle_percent", "rows_per_step")
    return [
        Aim(
            text="device idle between steps of 64 rows through gRPC, %",
            least=3,
            found=next((row["idle_percent"] for row in idle if _is_full(row)), None),
            is_most=True,
        ),
        Aim(
            text="256 requests offline, share of the ceiling of the same run",
            least=0.6,
            found=_share_of_ceiling(offline),
        ),
        Aim(
            text="256 requests offline, times the rate of transformers' continuous batching",
            least=1.0,
            found=_over_transformers(offline),
        ),
        _none_of(
            "requests through both services that failed or were not answered in time",
            [row["asked"] - row["answered"] for row in served],
        ),
        _none_of(
            "streams over killed executors that failed or have other tokens",
            [row["failed"] + row["different"] for row in after_kills],
        ),
        _none_of(
            "killed executors whose device memory was not given back",
            [row["memory_back_s"] is None for row in watched],
        ),
        _none_of(
            "float32 tokens unlike the CPU's that were won by more than rounding",
            [row["beyond_margin"] for row in tokens if row["dtype"] == "float32"],
        ),
    ]


def beside_flashinfer(outcomes: Sequence[Outcome]) -> Rows:
    """Return a row for each shape of decode attention that FlashInfer's fastest way ran as well."""
    decodes = _attention("decode", outcomes)
    best: dict[str, float] = {}
    for row in decodes:
        if row["implementation"].startswith("flashinfer"):
            shape = row["shape"]
            best[shape] = min(row["time_us"], best.get(shape, float("inf")))
    return [
        {
            "shape": row["shape"],
            "us": row["time_us"],
            "% of copy bandwidth": row["percent_of_ceiling"],
            "FlashInfer us": best[row["shape"]],
            "times FlashInfer": best[row["shape"]] / row["time_us"],
        }
        for row in _ours(decodes)
        if row["shape"] in best
    ]


def beside_eager(outcomes: Sequence[Outcome]) -> Rows:
    """Return a row for each decode step that was measured with and without a graph."""
    columns = ("model", "rows", "context", "step_ms", "eager_step_ms", "times_eager")
    return [
        {
            "model": row["model"],
            "rows": row["rows"],
            "context": row["context"],
            "graph ms": row["step_ms"],
            "eager ms": row["eager_step_ms"],
            "times eager": row["times_eager"],
        }
        for row in _of("decode steps", outcomes, *columns)
    ]


def _none_of(text: str, counts: Sequence[int]) -> Aim:
    """Return the aim that these counts are all 0."""
    return Aim(text=text, least=0, found=float(sum(counts)) if counts else None, is_most=True)


def _of(name: str, outcomes: Sequence[Outcome], *columns: str) -> Rows:
    """
    Return the rows of parts with names that begin so, if they have all these columns: others are of
    another kind, or were written by another version of the part.
    """
    return [
        row
        for each in outcomes
        if each.name.startswith(name)
        for row in each.rows
        if all(column in row for column in columns)
    ]


def _attention(operation: str, outcomes: Sequence[Outcome]) -> Rows:
    """Return the rows of a kind of attention, without the ceilings that were measured with it."""
    columns = ("operation", "shape", "implementation", "time_us", "percent_of_ceiling")
    found = _of(f"{operation} attention", outcomes, *columns, "tflop_per_s")
    return [row for row in found if row["operation"] == operation]


def _ours(rows: Rows) -> Rows:
    return [row for row in rows if row["implementation"] == "tandem"]


def _batch(row: dict[str, Any]) -> int:
    """Return the batch of a shape that begins with it, such as "B=32 ctx=1024"."""
    return int(row["shape"].split()[0].removeprefix("B="))


def _step_percent(steps: Rows, model: str) -> float | None:
    found = [
        row["percent_of_floor"]
        for row in steps
        if (row["model"], row["rows"], row["context"]) == (model, 32, 1024)
    ]
    return _median(found)


def _is_full(row: dict[str, Any]) -> bool:
    """Return if steps had 64 rows but for those that were between two requests."""
    return bool(row["rows_per_step"] >= _FULL_ROWS)


def _share_of_ceiling(rows: Rows) -> float | None:
    shares = [row.get("share_of_ceiling") for row in _finished(rows)]
    return next((share for share in shares if share is not None), None)


def _over_transformers(rows: Rows) -> float | None:
    """
    Return our rate over transformers'; if transformers did not finish, its rate over the time that
    it was timed was lower still, and if its timed part did not begin, there is none.
    """
    theirs = [
        row["output_tokens_per_s"]
        for row in rows
        if row["engine"] == "transformers" and row["output_tokens_per_s"] is not None
    ]
    ours = [row["output_tokens_per_s"] for row in _finished(rows)]
    return ours[0] / theirs[0] if ours and theirs else None


def _finished(rows: Rows) -> Rows:
    """Return the row of our engine, if it finished."""
    return [row for row in rows if row["engine"] == "tandem" and row.get("finished")]


def _median(numbers: Sequence[float]) -> float | None:
    middle: Callable[[Sequence[float]], float] = statistics.median
    return middle(numbers) if numbers else None
