"""Aims of a run on a GPU with the numbers that it found, and comparisons of what it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.gpu.parts import Outcome

Rows = list[dict[str, Any]]

WIDE_ROWS = 32
"""Fewest rows of decode attention that should come near the bandwidth."""
LONG_PROMPT = 4096
"""Fewest new tokens of a prompt that keep a device busy with products."""
DECODES, WIDE_DECODES, LONG_PROMPTS, CAPTURED_STEPS = 33, 24, 3, 40
"""
Shapes of decode attention, those of them with many rows, long prompts, and steps measured beside
eager ones that the parts ask for; numbers, as this file needs none of the modules that may be missing.
"""
LOADS, WAYS_OF_DRAWING = 4, 2
"""Numbers of requests in flight at which clients measure; greedy and drawn."""

_FULL_ROWS = 63
"""Rows of a step that count as 64: some requests are between two steps when others begin."""
_FEWEST_KILLS = 3

_STEP_AIMS = {"llama-8b": ("8B", 75), "qwen3-4b": ("Qwen3-4B", 70), "llama-1b": ("1B", 60)}
"""Name and least percentage of the roofline, by model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """
    A number that a GPU should show, and the number that it showed.

    Attributes:
        text: Description of the aim.
        bound: The smallest number that reaches it; or with `is_most`, the largest.
        found: Number that was found; None where it was not measured.
        worst: Shape that the number is of, where there are several.
        num_found: Shapes that were measured.
        num_asked: Shapes on which the aim rests: with fewer it is missed or open, but not reached.
    """

    text: str
    bound: float
    found: float | None
    is_most: bool = False
    worst: str = ""
    num_found: int = 1
    num_asked: int = 1

    @property
    def verdict(self) -> str:
        """Verdict in one word or two."""
        if self.found is None:
            return "not measured"
        reached = self.found <= self.bound if self.is_most else self.found >= self.bound
        if not reached:
            return "missed"
        return "reached" if self.num_found >= self.num_asked else "incomplete"

    @property
    def basis(self) -> str:
        """Number of shapes behind the aim, and the worst of them."""
        if self.num_asked == 1 or self.found is None:
            return self.worst
        counts = f"{self.num_found} of {self.num_asked} measured"
        return f"{counts}; worst: {self.worst}" if self.worst else counts


def aims(outcomes: Sequence[Outcome]) -> list[Aim]:
    """Return each aim with the worst, the sum or the one number of what belongs to it."""
    return [*_kernel_aims(outcomes), *_serving_aims(outcomes)]


def facts(outcomes: Sequence[Outcome]) -> Rows:
    """Return what is told beside the aims, as nothing says how large it may be."""
    kills = _of("recovery", outcomes, "kill", "all_go_on_s")
    times = [row["all_go_on_s"] for row in kills]
    longest = None if None in times else max(times, default=None)
    text = "longest time until all streams go on after a kill, s"
    return [{"fact": text, "found": longest, "": f"{len(kills)} kills"}] if kills else []


def _kernel_aims(outcomes: Sequence[Outcome]) -> list[Aim]:
    decodes = _ours(_attention("decode", outcomes))
    prompts = _ours(_attention("prefill", outcomes))
    steps = _of("decode steps", outcomes, "model", "rows", "context", "percent_of_floor")
    return [
        _worst(
            "decode attention from 32 rows on, % of copy bandwidth",
            85,
            [
                (row["shape"], row["percent_of_ceiling"])
                for row in decodes
                if _size(row, "B") >= WIDE_ROWS
            ],
            num_asked=WIDE_DECODES,
        ),
        _worst(
            "decode attention, times the speed of FlashInfer",
            1.0,
            [(row["shape"], row["times FlashInfer"]) for row in beside_flashinfer(outcomes)],
            num_asked=DECODES,
        ),
        *(
            Aim(
                text=f"{name} decode step of 32 rows at 1,024 positions, % of the roofline",
                bound=bound,
                found=_step_percent(steps, model),
            )
            for model, (name, bound) in _STEP_AIMS.items()
        ),
        _worst(
            "captured decode steps, times the speed of eager ones",
            1.0,
            [
                (f"{row['model']} B={row['rows']} ctx={row['context']}", row["times eager"])
                for row in beside_eager(outcomes)
                if row["graph"]
            ],
            num_asked=CAPTURED_STEPS,
        ),
        _worst(
            "prefill attention of long prompts, TFLOP/s",
            400,
            [
                (row["shape"], row["tflop_per_s"])
                for row in prompts
                if _size(row, "len") >= LONG_PROMPT
            ],
            num_asked=LONG_PROMPTS,
        ),
    ]


def _serving_aims(outcomes: Sequence[Outcome]) -> list[Aim]:
    offline = _of("offline", outcomes, "engine", "output_tokens_per_s")
    served = _of("serve", outcomes, "asked", "answered")
    tokens = _of("tokens", outcomes, "dtype", "first_differences", "beyond_margin")
    exact = [row for row in tokens if row["dtype"] == "float32"]
    idle = _of("idle", outcomes, "idle_percent", "rows_per_step")
    return [
        Aim(
            text="device idle between steps of 64 rows through gRPC, %",
            bound=3,
            found=next((row["idle_percent"] for row in idle if _is_full(row)), None),
            is_most=True,
        ),
        Aim(
            text="256 requests offline, share of the ceiling of the same run",
            bound=0.6,
            found=_share_of_ceiling(offline),
        ),
        Aim(
            text="256 requests offline, times the rate of transformers' continuous batching",
            bound=1.0,
            found=_over_transformers(offline),
        ),
        _none_of(
            "requests through both services that failed or were not answered in time",
            [row["asked"] - row["answered"] for row in served],
            num_asked=LOADS,
        ),
        *_kill_aims(outcomes),
        _none_of(
            "float32 requests with a token unlike the CPU's, near ties included",
            [row["first_differences"] for row in exact],
            num_asked=WAYS_OF_DRAWING,
        ),
        _none_of(
            "float32 tokens unlike the CPU's that were won by more than rounding",
            [row["beyond_margin"] for row in exact],
            num_asked=WAYS_OF_DRAWING,
        ),
    ]


def _kill_aims(outcomes: Sequence[Outcome]) -> list[Aim]:
    after_kills = _of("recovery", outcomes, "kills", "failed", "different")
    kills = _of("recovery", outcomes, "kill", "device_gb_held", "memory_back_s")
    watched = [row for row in kills if row["device_gb_held"] is not None]
    return [
        Aim(
            text="executors killed under streams",
            bound=_FEWEST_KILLS,
            found=float(len(kills)) if kills else None,
        ),
        _none_of(
            "streams over killed executors that failed or have other tokens",
            [row["failed"] + row["different"] for row in after_kills],
        ),
        _none_of(
            "killed executors whose device memory was not given back",
            [row["memory_back_s"] is None for row in watched],
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
    columns = ("model", "rows", "context", "graph", "step_ms", "eager_step_ms", "times_eager")
    return [
        {
            "model": row["model"],
            "rows": row["rows"],
            "context": row["context"],
            "graph": row["graph"],
            "graph ms": row["step_ms"],
            "eager ms": row["eager_step_ms"],
            "times eager": row["times_eager"],
        }
        for row in _of("decode steps", outcomes, *columns)
    ]


def _worst(text: str, bound: float, found: Sequence[tuple[str, float]], *, num_asked: int) -> Aim:
    """Return the aim that each of these shapes reaches a bound, with the one that is worst."""
    worst, number = min(found, key=lambda pair: pair[1], default=("", None))
    return Aim(
        text=text,
        bound=bound,
        found=number,
        worst=worst,
        num_found=len({shape for shape, _ in found}),
        num_asked=num_asked,
    )


def _none_of(text: str, counts: Sequence[int], *, num_asked: int = 1) -> Aim:
    """Return the aim that these counts are all 0."""
    return Aim(
        text=text,
        bound=0,
        found=float(sum(counts)) if counts else None,
        is_most=True,
        num_found=len(counts),
        num_asked=num_asked,
    )


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


def _size(row: dict[str, Any], name: str) -> int:
    """Return a size that a shape such as "B=32 ctx=1024" tells, 0 where it does not."""
    sizes = dict(word.partition("=")[::2] for word in row["shape"].split())
    return int(sizes.get(name, 0))


def _step_percent(steps: Rows, model: str) -> float | None:
    found = [
        row["percent_of_floor"]
        for row in steps
        if (row["model"], row["rows"], row["context"]) == (model, 32, 1024)
    ]
    return min(found, default=None)


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
