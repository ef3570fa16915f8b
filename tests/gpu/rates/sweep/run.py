"""One sweep: entries in order of importance, candidates compiled ahead of their measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from executor_svc.device.choice import dtype_name
from tandem_bench.device.case import significant
from tandem_bench.device.timing import Timer, num_copies, timer_of
from tests.gpu.rates.sweep.candidates import first_round, second_round
from tests.gpu.rates.sweep.choice import Choice, choose
from tests.gpu.rates.sweep.compiling import Compiling, results
from tests.gpu.rates.sweep.points import Point, check_points
from tests.gpu.rates.sweep.tables import Key, Tuning, present
from tests.gpu.rates.sweep.work import Place, make_work, same_bits_at

Add = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """
    Limits of a sweep.

    Attributes:
        budget_s: Seconds for which a measurement is repeated, about.
        deadline_s: Time by `time.monotonic` after which nothing begins.
        most: Most candidates of a round beside the present entry; None for all.
        most_copies: Most sets of operands, which calls use in turn to find none in a cache.
        compiles_only: Candidates are compiled, and neither checked nor timed.
    """

    budget_s: float
    deadline_s: float
    most: int | None = None
    most_copies: int = 64
    compiles_only: bool = False


class Sweep:
    """A sweep in progress, which gives each row as it is found."""

    def __init__(self, place: Place, compiling: Compiling, options: Options, add: Add) -> None:
        self._place = place
        self._compiling = compiling
        self._options = options
        self._add = add
        self._timer: Timer = timer_of(place.device)

    def run(self, points: Mapping[Key, Sequence[Point]]) -> dict[Key, Tuning]:
        """
        Sweep entries in order; return the winners of those that were timed.

        Raises:
            torch.AcceleratorError: A kernel broke the device's context; the rows before stand.
        """
        rounds = {key: first_round(key)[: self._most] for key in points}
        begun = self._compiling.submit(points, rounds)
        winners: dict[Key, Tuning] = {}
        for key, shapes in points.items():
            if self._is_late():
                self._add({"kind": "left out", "key": str(key)})
                continue
            usable = self._usable(key, shapes, begun[key])
            seconds = self._round(key, shapes, usable, must_end=False)
            found = choose(seconds, present(key))
            if found is None:
                continue
            more = second_round(key, found.best)[: self._options.most]
            if more and not self._is_late():
                again = self._compiling.submit(points, {key: more})
                usable = self._usable(key, shapes, again[key])
                later = self._round(key, list(seconds), usable, must_end=True)
                both = {
                    point: {**times, **later.get(point, {})} for point, times in seconds.items()
                }
                found = choose(both, present(key)) or found
            self._tell_choice(key, found, len(shapes))
            winners[key] = found.best
        return winners

    @property
    def _most(self) -> int | None:
        return None if self._options.most is None else 1 + self._options.most

    def _round(
        self, key: Key, shapes: Sequence[Point], usable: Sequence[Tuning], *, must_end: bool
    ) -> dict[Point, dict[Tuning, float]]:
        """
        Time candidates at all points; a point that was not ended in time is left out, and if the
        round must end, all of it.
        """
        seconds: dict[Point, dict[Tuning, float]] = {}
        for point in shapes if usable else ():
            times = self._time(key, point, usable)
            if times is None:
                return {} if must_end else seconds
            seconds[point] = times
        return seconds

    def _usable(self, key: Key, shapes: Sequence[Point], compiled: Any) -> list[Tuning]:
        """
        Return the candidates that compile to fit the device, and compute what is defined with every
        kind of kernel that the entry's points have.
        """
        usable = []
        checks = [] if self._options.compiles_only else check_points(shapes)
        works = {str(point): make_work(point, self._place) for point in checks}
        for tuning, outcome in results(compiled, key):
            row: dict[str, object] = {"kind": "compiled", "key": str(key), **_settings(tuning)}
            row |= {"registers": outcome.registers, "shared_bytes": outcome.shared_bytes}
            problem = outcome.problem
            if works and not problem:
                error, problem = self._worst_error(works, tuning)
                row |= {"checks": len(works), "error": significant(error)}
            self._add({**row, "problem": problem})
            if not problem and works:
                usable.append(tuning)
        return usable

    def _worst_error(self, works: Mapping[str, Any], tuning: Tuning) -> tuple[float, str]:
        """Return the largest error, and the first problem with the point where it was found."""
        worst = 0.0
        for point, work in works.items():
            error, problem = self._error(work, tuning)
            if problem:
                return error, f"{point}: {problem}"
            worst = max(worst, error)
        return worst, ""

    def _error(self, work: Any, tuning: Tuning) -> tuple[float, str]:
        try:
            with torch.inference_mode():
                error = work.worst_error(work.call(tuning)())
                same = same_bits_at(work, tuning)
        except Exception as failure:  # noqa: BLE001  # Triton's errors have no common class
            self._check_device()
            return 0.0, f"{type(failure).__name__}: {failure}".partition("\n")[0]
        if not error <= 1:
            return error, "results are wrong"
        return error, "" if same else "bits depend on how work is cut"

    def _time(
        self, key: Key, point: Point, tunings: Sequence[Tuning]
    ) -> dict[Tuning, float] | None:
        """Time all candidates at a point on the same operands; None if time runs out."""
        with torch.inference_mode():
            first = make_work(point, self._place)
            needed = num_copies(self._timer, first.num_bytes)
            number = min(needed, self._options.most_copies)
            works = [first, *(make_work(point, self._place, seed) for seed in range(1, number))]
        times: dict[Tuning, float] = {}
        for tuning in tunings:
            if self._is_late():
                return None
            row = {"kind": "time", "key": str(key), "point": str(point), **_settings(tuning)}
            try:
                with torch.inference_mode():
                    calls = [work.call(tuning) for work in works]
                times[tuning] = self._timer.seconds(calls, self._options.budget_s)
            except Exception as failure:  # noqa: BLE001  # as above
                self._check_device()
                self._add({**row, "problem": f"{failure}".partition("\n")[0]})
                continue
            rate = first.num_bytes / times[tuning] / 1e9
            self._add(
                {**row, "us": significant(1e6 * times[tuning]), "gb_per_s": significant(rate)}
            )
        return times

    def _check_device(self) -> None:
        """Raise if the device's context is broken, so that nothing can be measured any more."""
        if self._place.device.type == "cuda":
            torch.cuda.synchronize(self._place.device)

    def _is_late(self) -> bool:
        return time.monotonic() > self._options.deadline_s

    def _tell_choice(self, key: Key, found: Choice, num_points: int) -> None:
        now = present(key)
        self._add(
            {
                "kind": "best",
                "key": str(key),
                **_settings(found.best),
                "present": found.best == now,
                "time_to_present": significant(found.ratio),
                "points": f"{found.num_points} of {num_points}",
                **{f"present_{name}": value for name, value in _settings(now).items()},
                "dtype": dtype_name(self._place.dtype),
            }
        )


def _settings(tuning: Tuning) -> dict[str, int | str]:
    return {name: "none" if value is None else value for name, value in asdict(tuning).items()}
