"""The executors that requests prefer, or are admitted to, and how long others leave them alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from scheduler_svc.core.invariants import require
from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.request.options import CoreOptions, Routing
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.routing.choice import Choice
from scheduler_svc.core.routing.precedents import Precedents


class Router:
    """
    Routes of the live requests of one cell: each has one executor at most, which it prefers while
    it waits and is on while it runs.

    A request gets its route when it is accepted, from the policy (`choice`), and another when it is
    admitted elsewhere; siblings of the first choice that is admitted follow it. One that ran
    prefers the executor that it ran on. There are none under load_balanced before admission, and
    none while there is one executor.

    Attributes:
        has_preferences: True where the policy says which executor a new request prefers.
        precedents: What plans of this moment found for the requests that wait.
    """

    __slots__ = (
        "_bound_at",
        "_choice",
        "_left_until",
        "_num_bound",
        "_num_routed",
        "_routes",
        "has_preferences",
        "is_round_robin",
        "precedents",
    )

    def __init__(self, options: CoreOptions) -> None:
        self._choice = Choice(options.routing, options.prefix_caching_routing_alpha)
        self._routes: dict[int, int] = {}
        """Executors by the numbers of live requests."""
        self._num_routed = Counter[int]()
        """Number of routes to each executor."""
        self._bound_at: dict[int, int] = {}
        """Number of the latest admission of each executor."""
        self._num_bound = 0
        self._left_until: KeyedHeap[float, Request] = KeyedHeap()
        """Waiting requests that an executor left to others, by the time when it takes them."""
        self.has_preferences = options.routing is not Routing.LOAD_BALANCED
        self.is_round_robin = options.routing is Routing.ROUND_ROBIN
        self.precedents = Precedents()

    def resize(self, num_blocks: int) -> None:
        """Note how many KV blocks all executors have, which bounds what is kept of prompts."""
        # Blocks assigned longer ago than twice what the executors can keep are evicted by now.
        self._choice.table.resize(2 * num_blocks)

    def route(
        self, choices: Sequence[Request], digests: Sequence[bytes], places: Mapping[int, int]
    ) -> None:
        """
        Let the choices of a request prefer an executor.

        Args:
            choices: Those that wait.
            digests: Digests of the full blocks of their prompt, in order.
            places: Most requests that run at a time, by executor; those that could compute the
                request.
        """
        if not (self.has_preferences and places):
            return
        free = {one: max(1 - self._num_routed[one] / most, 0.0) for one, most in places.items()}
        chosen = self._choice.choose(digests, free)
        for request in choices:
            self._set(request, chosen)

    def preferred(self, request: Request) -> int | None:
        """Return the executor that a waiting request prefers; None where it prefers none."""
        return self._routes.get(request.number)

    def note_bound(self, request: Request, executor: int) -> None:
        """Note that a request is admitted to an executor; its siblings prefer it from now on."""
        self._num_bound += 1
        self._bound_at[executor] = self._num_bound
        self._left_until.discard(request.number)
        was = self._routes.get(request.number)
        if was != executor:
            self._set(request, executor)
            if was is not None:
                digests = self._choice.relevant(request.prefix.digests)
                self._choice.table.assign(digests, executor)
        others = [one for one in request.siblings if one is not request]
        if others and all(one.place.replica is None for one in others):
            for one in others:
                self._set(one, executor)

    def note_running(self, request: Request, executor: int) -> None:
        """Note that a request was admitted to an executor while there was no other."""
        self._set(request, executor)

    def bound_at(self, executor: int) -> int:
        """Return a number that is the larger the later an executor admitted its latest request."""
        return self._bound_at.get(executor, 0)

    def note_change(self) -> None:
        """Note that an executor is no longer what plans of this moment found."""
        self.precedents.clear()

    def note_left(self, request: Request, until_s: float) -> None:
        """Note that an executor leaves a waiting request to others until some time."""
        before = self._left_until.order_of(request.number)
        if before is None or until_s < before:
            self._left_until.discard(request.number)
            self._left_until.push(until_s, request.number, request)

    def leave_none(self) -> None:
        """Forget until when requests were left to others, as one executor alone is there by now."""
        self._left_until = KeyedHeap()

    def forget_due(self, now: float) -> None:
        """Forget until when requests were left to others, where that time has come."""
        while (request := self._left_until.peek_due(now)) is not None:
            self._left_until.discard(request.number)

    @property
    def next_due_s(self) -> float | None:
        """Earliest time at which an executor takes what it left to others; None without any."""
        top = self._left_until.peek()
        return None if top is None else top[0]

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        executor = self._routes.pop(request.number, None)
        if executor is not None:
            self._num_routed[executor] -= 1
        self._left_until.discard(request.number)

    def drop(self, executor: int) -> set[int]:
        """
        Forget an executor that is lost or has left; returns the numbers of the requests that
        preferred it or were on it.
        """
        self._choice.table.purge(executor)
        del self._num_routed[executor]
        self._bound_at.pop(executor, None)
        dropped = {number for number, one in self._routes.items() if one == executor}
        for number in dropped:
            del self._routes[number]
        return dropped

    def check_integrity(
        self, live: Collection[int], waiting: Collection[int], executors: Collection[int]
    ) -> None:
        """
        Compare with the requests and the executors there are.

        Args:
            live: Numbers of all live requests.
            waiting: Numbers of those that wait.
            executors: Executors that are there.

        Raises:
            InternalError: A route is of a request that ended or to an executor that is gone, or one
                of the indexes is wrong.
        """
        require(self._routes.keys() <= set(live), "a request that ended has a route")
        require(set(self._routes.values()) <= set(executors), "a route leads to no executor")
        counts = {executor: count for executor, count in self._num_routed.items() if count}
        require(counts == Counter(self._routes.values()), "the count of routes is wrong")
        self._left_until.check_integrity()
        left = {request.number for request in self._left_until}
        require(left <= set(waiting), "a request is left to others that does not wait")
        self._choice.table.check_integrity(executors)

    def _set(self, request: Request, executor: int) -> None:
        before = self._routes.get(request.number)
        if before is not None:
            self._num_routed[before] -= 1
        self._routes[request.number] = executor
        self._num_routed[executor] += 1
