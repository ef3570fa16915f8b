"""
Search for the request that kills executors: counts of deaths, and the requests to be tried next.

A death of an executor is counted against the requests of the step that was running, and forgotten
for those that then get on: past the step that died, and `CLEARED_AFTER` tokens past where they
stood, of which what that step was to compute counts as one. A request with `SUSPECTED_AT` deaths is
a *suspect*, and while there are suspects only the requests of a *trial* run:

    suspects that never died alone        half of them are tried; those that get on are trusted
                                          again
    the executor dies in that trial       only the trial's suspects remain; half of these are tried
    a suspect that died alone             it is tried alone once more, after another request got on
                                          alone (a *control*): else the executor may be broken
    it dies alone again                   it is poison, and fails
    `BROKEN_AT` died alone, each once,    the executor is broken, not these requests: they run on
    and no other got on                   another one, or fail with ExecutorLost if there is none

So one request of n that kills is found after about ``log2(n) + 4`` deaths, and a request fails as
poison only after it died alone twice. Where there is no other request to be a control, the second
death alone counts without one.

Among several executors, all of this happens on one of them, the quarantined one (`quarantine`).
Controls run there too: they are to show whether that executor lives, and no other could.

Source: bisecting the input that breaks a batch is an old practice of batch systems; we know of no
serving engine that does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from scheduler_svc.core.request.request import Request, RequestState
from scheduler_svc.core.state.quarantine import Quarantine
from tandem.errors import InternalError

CLEARED_AFTER = 8
"""Tokens computed past where a request stood at a death, after which it is trusted again."""
SUSPECTED_AT = 2
"""Deaths at which a request is a suspect."""
POISON_AT = 2
"""Deaths alone at which a request is poison."""
BROKEN_AT = 4
"""Number of requests that died alone, one after the other, at which the executor is blamed."""


@dataclass(slots=True, eq=False, kw_only=True)
class Mark:
    """
    Deaths counted against one request.

    Attributes:
        request: The request.
        deaths: Deaths in its steps since it was last trusted.
        deaths_alone: Deaths with it alone in the step, as far as they count.
        cleared_at: Tokens computed of it at which it is trusted again.
        had_control: True when another request got on since this one died alone.
        alone_at: Executor of its latest death alone; None where that is not told.
        num_spared: Number of times that an executor was blamed instead of it.
    """

    request: Request
    deaths: int = 0
    deaths_alone: int = 0
    cleared_at: int = 0
    had_control: bool = False
    alone_at: int | None = None
    num_spared: int = 0

    @property
    def is_suspect(self) -> bool:
        """True while it runs in trials only."""
        return self.deaths >= SUSPECTED_AT


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """
    Consequences of one death.

    Attributes:
        blamed: Marks of the requests in the step that died.
        poison: Request that turned out to be poison; None without one.
        victims: Requests that died alone because the executor is broken.
        is_certain: False where no other request has shown that the executor of both deaths lives,
            so that it may be broken instead of the poison.
    """

    blamed: list[Mark]
    poison: Request | None = None
    victims: tuple[Request, ...] = ()
    is_certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprovenDeath:
    """
    A step that was running when an executor was last heard.

    Attributes:
        rows: Live requests of the step, and the tokens computed of each at which it is trusted
            again.
        num_known: Tokens of prompt and outputs that each of them had.
        num_ended: Number of requests of the step that had ended.
        executor: Number of the executor.
    """

    rows: list[tuple[Request, int]]
    num_known: list[int]
    num_ended: int
    executor: int


class Suspects:
    """
    Marks of live requests, and the trial.

    Attributes:
        trial: Marks of the only requests that may run, by number; empty where there is no trial.
        num_suspects: Number of suspects.
        quarantine: The executor on which requests with marks run.
    """

    __slots__ = ("_marks", "_unproven_deaths", "num_suspects", "quarantine", "trial")

    def __init__(self) -> None:
        self._marks: dict[int, Mark] = {}
        self.trial: dict[int, Mark] = {}
        self.num_suspects = 0
        self._unproven_deaths: dict[str, UnprovenDeath] = {}
        self.quarantine = Quarantine()

    @property
    def has_marks(self) -> bool:
        """True while any request has a mark."""
        return bool(self._marks)

    def is_cautious(self, executor: int) -> bool:
        """
        Return True while one step at a time is to be in flight on an executor: with several it is
        not always known in which one it died.
        """
        if not self._marks or executor != self.quarantine.number:
            return False
        return self.num_suspects > 0 or self.quarantine.is_cautious

    def bars(self, executor: int, request: Request) -> bool:
        """
        Return True where an executor may not run a request now: one with a mark runs on the
        quarantined executor only, which runs nothing else during a trial.
        """
        if not self._marks:
            return False
        if executor != self.quarantine.number:
            return request.number in self._marks
        return bool(self.trial) and request.number not in self.trial

    def note_silence(self, boot_id: str, step: UnprovenDeath) -> None:
        """Note the step that ran when an executor that may still live fell silent."""
        self._unproven_deaths[boot_id] = step

    def take_silence(self, boot_id: str) -> UnprovenDeath | None:
        """Return, and forget, the step that ran when this executor fell silent, if it did."""
        return self._unproven_deaths.pop(boot_id, None)

    def marks(self) -> list[Mark]:
        """Return all marks, in order of arrival."""
        return sorted(self._marks.values(), key=lambda mark: mark.request.number)

    def note_death(
        self, rows: list[tuple[Request, int]], num_live: int, *, num_ended: int = 0
    ) -> Verdict:
        """
        Count a death.

        Args:
            rows: The live requests of the step that died, and the tokens computed of each at which
                it is trusted again.
            num_live: Number of all requests in the system.
            num_ended: Number of requests of that step that have ended since; any of them may be the
                cause of the death.
        """
        was_bisecting = any(not mark.deaths_alone for mark in self.trial.values())
        blamed = [self._blame(request, cleared_at) for request, cleared_at in rows]
        # A death that is proven late may have happened before this trial, with other requests.
        if was_bisecting and blamed and all(mark.request.number in self.trial for mark in blamed):
            self._narrow_to(blamed)
        self.trial.clear()
        verdict = Verdict(blamed=blamed)
        if len(blamed) == 1 and not num_ended:
            verdict = self._judge(blamed[0], num_live)
        self._count_suspects()
        return verdict

    def note_death_elsewhere(self, rows: list[tuple[Request, int]]) -> Verdict:
        """
        Count a death of an executor that is not quarantined: it says nothing about the trial, and
        only on the quarantined executor is it told who died alone. `rows` is as of `note_death`.
        """
        blamed = [self._blame(request, cleared_at) for request, cleared_at in rows]
        self._count_suspects()
        return Verdict(blamed=blamed)

    def spare(self, *, is_certain: bool) -> None:
        """
        Let suspects run beside others again, on another executor.

        Args:
            is_certain: The executor that they died on is broken. Where it only may be, a death
                alone stays with them: one more on another executor shows that it was not.
        """
        for mark in self._marks.values():
            if mark.is_suspect and not mark.had_control:
                mark.deaths = SUSPECTED_AT - 1
                mark.deaths_alone = 0 if is_certain else min(mark.deaths_alone, POISON_AT - 1)
                mark.num_spared += 1
        self.trial.clear()
        self._count_suspects()

    def note_progress(self, computed: Iterable[tuple[Mark, int]]) -> list[Mark]:
        """
        Trust the requests again that got on; returns their marks. `computed` has the tokens
        computed of each.
        """
        cleared = [mark for mark, count in computed if count >= mark.cleared_at]
        for mark in cleared:
            self._clear(mark)
        return cleared

    def died_alone(self, request: Request) -> bool:
        """Return True for a request with a death alone that counts."""
        mark = self._marks.get(request.number)
        return mark is not None and mark.deaths_alone > 0

    def note_left(self, number: int, *, got_on: bool) -> None:
        """Note that a request has left the system; `got_on` if it ended by what it produced."""
        mark = self._marks.get(number)
        if mark is None:
            return
        if got_on:
            self._clear(mark)
        else:
            self._forget(number)

    def is_trial_on(self, executor: int) -> bool:
        """Return True while an executor runs nothing but the trial."""
        return bool(self.trial) and executor == self.quarantine.number

    def has_mark(self, request: Request) -> bool:
        """Return True for a request with a mark."""
        return request.number in self._marks

    def num_spared(self, request: Request) -> int:
        """Return how many times an executor was blamed instead of a request with a mark."""
        return self._marks[request.number].num_spared

    def begin_trial(
        self, live: Iterable[Request], can_take: Callable[[Request], bool] | None = None
    ) -> list[Mark]:
        """
        Choose the requests to try next, where there are suspects but no trial; returns marks.

        Args:
            live: All requests in the system.
            can_take: Says whether the quarantined executor can run a request; None where it can run
                all. No trial begins where it can run no suspect.
        """
        suspects = [mark for mark in self.marks() if mark.is_suspect]
        if can_take is not None:
            suspects = [mark for mark in suspects if can_take(mark.request)]
            live = [request for request in live if can_take(request)]
        fresh = [mark for mark in suspects if not mark.deaths_alone]
        tried = fresh[: (len(fresh) + 1) // 2]
        if not tried:
            # All that are left died alone once.
            tried = [mark for mark in suspects if mark.had_control][:1]
        if not tried and suspects:
            control = self._control(live)
            tried = suspects[:1] if control is None else [control]
        self.trial = {mark.request.number: mark for mark in tried}
        return tried

    def end_trial(self) -> None:
        """End the trial without a result, as another executor takes over."""
        self.trial.clear()

    def check_integrity(self, live: AbstractSet[int]) -> None:
        """
        Compare the marks with the numbers of all live requests, and the counts with the marks.

        Raises:
            InternalError: A request that left is marked, or something was miscounted.
        """
        count = sum(mark.is_suspect for mark in self.marks())
        if not self._marks.keys() <= live:
            raise InternalError("a request that left is still suspected")
        if not self.trial.keys() <= self._marks.keys():
            raise InternalError("a request is tried that nothing speaks against")
        if self.num_suspects != count:
            raise InternalError("the suspects were miscounted")
        if self.trial and not count:
            raise InternalError("a trial goes on without suspects")
        self.quarantine.check_integrity(has_marks=self.has_marks)

    def _blame(self, request: Request, cleared_at: int) -> Mark:
        mark = self._marks.setdefault(request.number, Mark(request=request))
        mark.deaths += 1
        mark.cleared_at = max(mark.cleared_at, cleared_at)
        return mark

    def _narrow_to(self, blamed: list[Mark]) -> None:
        """Leave one death to the suspects not blamed now, except to those that died alone."""
        for mark in self._marks.values():
            if mark.is_suspect and not mark.deaths_alone and mark not in blamed:
                mark.deaths = SUSPECTED_AT - 1

    def _judge(self, mark: Mark, num_live: int) -> Verdict:
        """Count a death with this request alone in the step; returns the verdict."""
        died_alone = [one for one in self.marks() if one.deaths_alone or one is mark]
        has_control = len(died_alone) < num_live
        here = self.quarantine.number
        is_certain = mark.had_control or mark.alone_at != here
        unproven = [one for one in died_alone if one.alone_at == here and not one.had_control]
        if not mark.deaths_alone or mark.had_control or not has_control:
            mark.deaths_alone += 1
        if mark.deaths_alone >= POISON_AT:
            return Verdict(blamed=[mark], poison=mark.request, is_certain=is_certain)
        if mark not in unproven:
            unproven = sorted([*unproven, mark], key=lambda one: one.request.number)
        mark.had_control, mark.alone_at = False, here
        if len(unproven) >= BROKEN_AT:
            return Verdict(blamed=[mark], victims=tuple(one.request for one in unproven))
        return Verdict(blamed=[mark])

    def _control(self, live: Iterable[Request]) -> Mark | None:
        """
        Return the mark of a control: a live request that never died alone, with the fewest deaths,
        then not a choice of a request that did, then not running on another executor, then soonest
        computed; None without one.
        """
        accused = {
            mark.request.new.request_id for mark in self._marks.values() if mark.deaths_alone
        }

        def rank(request: Request) -> tuple[int, bool, bool, bool, int, int]:
            mark = self._marks.get(request.number)
            return (
                0 if mark is None else mark.deaths,
                request.new.request_id in accused,
                self._is_elsewhere(request),
                not request.outputs,
                request.num_known,
                request.number,
            )

        others = [one for one in live if not self.died_alone(one)]
        if not others:
            return None
        chosen = min(others, key=rank)
        mark = self._marks.setdefault(chosen.number, Mark(request=chosen))
        mark.cleared_at = max(mark.cleared_at, chosen.num_known - 1 + CLEARED_AFTER)
        return mark

    def _is_elsewhere(self, request: Request) -> bool:
        is_waiting = request.state is RequestState.WAITING
        return not is_waiting and request.place.replica != self.quarantine.number

    def _count_suspects(self) -> None:
        self.num_suspects = sum(mark.is_suspect for mark in self._marks.values())

    def _clear(self, mark: Mark) -> None:
        # One that ended by results of another executor says nothing about the quarantined one.
        is_control = mark.request.place.replica in {None, self.quarantine.number}
        self._forget(mark.request.number)
        for other in self._marks.values():
            other.had_control = other.had_control or (is_control and other.deaths_alone > 0)

    def _forget(self, number: int) -> None:
        mark = self._marks.pop(number)
        self.trial.pop(number, None)
        self.num_suspects -= mark.is_suspect
        if not self.num_suspects and self.trial:
            # It was a control, and no suspect is left that needs it.
            self.trial.clear()
        if not self._marks:
            self.quarantine.end()
