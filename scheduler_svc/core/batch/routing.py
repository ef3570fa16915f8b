"""
Routing: which of several executors a waiting request is admitted to.

Requests wait in one queue and belong to no executor until one admits them, so that none idles
beside a queue. Each executor's plan asks here whether a request had better be left to another, and
until when:

    the request prefers another (`routing`)     that has room       until `PREFERENCE_S`, as it may
                                                                    be slow to plan its next step
                                                is full             as long as computing here what
                                                                    is there would take, up to
                                                                    `MAX_AFFINITY_S`
    load_balanced                               another has room    until `PREFERENCE_S`
                                                and less to do

**No request starves, and no executor idles beside a queue.** These times count from when a request
began to wait, and none is longer than `MAX_AFFINITY_S`. From then on, and once it is aged if that
is earlier, a request is welcome to every executor that can hold it. So the bound on waiting of
`queue.WaitingQueue` holds as for one executor, with the requests that run on any one executor that
can hold it; and an executor with room has nothing to do only while all that it could compute came
less than `MAX_AFFINITY_S` ago and is left to others. `Router.next_due_s` says when that ends, so
that no executor sleeps longer.

Source: SGLang's and Dynamo's cache-aware routers weigh overlap against load; unlike there, nothing
is sent ahead of time, and the true prefix indexes are asked how much a preference is worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from scheduler_svc.core.queue.queue import AGED_AFTER
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.gate import Vacancy
from scheduler_svc.core.state.replica import Replica

PREFERENCE_S = 0.05
"""Longest time in seconds for which a request is left to an executor that could admit it."""
MAX_AFFINITY_S = 0.5
"""Longest time in seconds for which a request is left to an executor that is full."""
MAX_LEFT = 32
"""Most requests that one plan leaves to other executors."""


def welcome(replica: Replica, now: float, *, is_unchanged: bool) -> Iterator[Request]:
    """
    Return the waiting requests that an executor should admit, next one first.

    Args:
        replica: The executor.
        now: The time.
        is_unchanged: True where the plan has changed nothing of the executor yet, so that what
            other plans of this moment found about it holds.
    """
    candidates = replica.cell.queue.candidates(now, replica.kv.prefixes, taken_by(replica))
    if not replica.cell.has_others:
        return candidates
    follows = is_unchanged and not replica.cell.suspects.has_marks
    return _welcome(candidates, _Left(replica, now, follows=follows))


def taken_by(replica: Replica) -> Callable[[Request], bool] | None:
    """
    Return a predicate on requests that could ever run on an executor, and that no quarantine keeps
    from it; None where all can.
    """
    if replica.cell.suspects.has_marks:
        return partial(_may_run, replica)
    return replica.can_ever_take if replica.cell.has_others else None


def _may_run(replica: Replica, request: Request) -> bool:
    is_barred = replica.cell.suspects.bars(replica.slots.replica, request)
    return not is_barred and replica.can_ever_take(request)


def _welcome(candidates: Iterator[Request], left: _Left) -> Iterator[Request]:
    for request in candidates:
        if not left.try_leave(request):
            yield request
        elif left.is_enough:
            return


class _Left:
    """Requests that one plan leaves to other executors, which count as work there."""

    __slots__ = (
        "_cell",
        "_follows",
        "_longest_s",
        "_now",
        "_num_left",
        "_num_running",
        "_replica",
        "_tokens",
        "_vacancies",
    )

    def __init__(self, replica: Replica, now: float, *, follows: bool) -> None:
        self._replica = replica
        self._cell = replica.cell
        self._now = now
        self._longest_s = min(MAX_AFFINITY_S, AGED_AFTER * self._cell.options.ageing_s)
        self._num_left = Counter[int]()
        self._tokens = Counter[int]()
        self._vacancies: dict[int, Vacancy | None] = {}
        """Room of executors, each looked at once it is asked for."""
        self._num_running = replica.slots.num_running
        self._follows = follows
        """True while this plan has left all requests, each to the cheapest executor."""
        self._cell.router.precedents.at(now)

    @property
    def is_enough(self) -> bool:
        """True once so many are left that those behind them are not looked at."""
        return self._num_left.total() >= MAX_LEFT

    def try_leave(self, request: Request) -> bool:
        """Leave a request to another executor, for now, if it had better go there."""
        since_s = self._cell.queue.since_s(request)
        if self._now >= since_s + self._longest_s:
            self._follows = False
            return False
        to, wait_s = self._where(request)
        until_s = since_s + min(wait_s, self._longest_s)
        if to is None or self._now >= until_s:
            self._follows = False
            return False
        self._num_left[to] += 1
        self._tokens[to] += request.num_known
        self._cell.router.note_left(request, until_s)
        return True

    def _where(self, request: Request) -> tuple[int | None, float]:
        """Return the executor that a request had better go to, and how long that may take."""
        own, router = self._replica.slots.replica, self._cell.router
        preferred = router.preferred(request)
        if preferred is not None and self._cell.suspects.bars(preferred, request):
            preferred = None
        if preferred is not None:
            self._follows = False
        if preferred is not None and not router.has_preferences:
            # It ran there, or another of its choices does: that binds it while there is room.
            if preferred == own:
                return None, 0.0
            if self._has_room(preferred, request):
                return preferred, PREFERENCE_S
        to, wait_s = None, 0.0
        if preferred is not None and preferred != own:
            to, wait_s = preferred, self._affinity_s(request, preferred)
        if router.has_preferences or wait_s > PREFERENCE_S:
            return to, wait_s
        best = self._cheapest_as_found(request)
        return (to, wait_s) if best in (None, own) else (best, PREFERENCE_S)

    def _affinity_s(self, request: Request, preferred: int) -> float:
        """Return how long a request had better wait for the executor that it prefers."""
        replica, router = self._replica, self._cell.router
        num_saved = self._cell.holder(preferred).ready_len(request) - replica.ready_len(request)
        wait_s = max(num_saved, 0) * replica.pace.prefill_s
        if not router.has_preferences:
            # Where there is room, what is saved is part of the cost already.
            return wait_s if not self._has_room(preferred, request) else 0.0
        if router.is_round_robin and request.place.replica is None:
            return MAX_AFFINITY_S
        has_room = self._has_room(preferred, request)
        return max(wait_s, PREFERENCE_S) if has_room else wait_s

    def _cheapest_as_found(self, request: Request) -> int | None:
        """Return the cheapest executor as `_cheapest`, from an earlier plan where that holds."""
        if not self._follows:
            return self._cheapest(request)
        precedents, position = self._cell.router.precedents, self._num_left.total()
        for executor in precedents.find(position, request.number):
            return executor
        best = self._cheapest(request)
        precedents.note(position, request.number, best)
        return best

    def _cheapest(self, request: Request) -> int | None:
        """
        Return the executor with the least to do before a request's first token, of equal ones the
        one that was chosen least recently; None where none could admit it.
        """
        bound_at = self._cell.router.bound_at
        best: tuple[float, int, int] | None = None
        for number in self._cell.holder_numbers():
            vacancy = self._vacancy(number)
            if vacancy is None:
                continue
            cost_s = self._before_s(number, vacancy)
            if best is not None and cost_s > best[0]:
                continue  # whatever is cached there
            if not self._fits(number, vacancy, request):
                continue
            num_own = request.num_known - self._cell.holder(number).ready_len(request)
            found = (cost_s + num_own * vacancy.prefill_s, bound_at(number), number)
            best = found if best is None else min(best, found)
        return None if best is None else best[2]

    def _has_room(self, number: int, request: Request) -> bool:
        """Return True where an executor could admit a request behind those that are left to it."""
        vacancy = self._vacancy(number)
        return vacancy is not None and self._fits(number, vacancy, request)

    def _before_s(self, number: int, vacancy: Vacancy) -> float:
        return vacancy.before_s(self._num_left[number], self._tokens[number])

    def _fits(self, number: int, vacancy: Vacancy, request: Request) -> bool:
        suspects = self._cell.suspects
        if suspects.has_marks and suspects.bars(number, request):
            return False
        num_more, more_tokens = self._num_left[number], self._tokens[number]
        holder = self._cell.holder(number)
        return holder.fits(request, vacancy, num_more=num_more, more_tokens=more_tokens)

    def _vacancy(self, number: int) -> Vacancy | None:
        """
        Return the room of an executor. During the plan only its own one changes, by an admission,
        after which others that admitted none may admit again.
        """
        slots = self._replica.slots
        if slots.num_running != self._num_running:
            self._num_running = slots.num_running
            kept = self._vacancies.items()
            self._vacancies = {
                one: room for one, room in kept if room is not None and one != slots.replica
            }
        if number not in self._vacancies:
            self._vacancies[number] = self._cell.holder(number).vacancy()
        return self._vacancies[number]
