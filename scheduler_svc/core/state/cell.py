"""State that belongs to requests, whichever executor computes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from scheduler_svc.core.invariants import require
from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.observe.telemetry import Telemetry
from scheduler_svc.core.queue.queue import WaitingQueue
from scheduler_svc.core.queue.retry_advice import RetryAdvice
from scheduler_svc.core.queue.tenants import limits_of
from scheduler_svc.core.queue.token_rates import TokenRates
from scheduler_svc.core.request.events import EventLog
from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions, PreemptionMode
from scheduler_svc.core.request.request import Request, RequestState
from scheduler_svc.core.routing.router import Router
from scheduler_svc.core.state.gate import AdmissionGate, Vacancy
from scheduler_svc.core.state.live_requests import LiveRequests
from scheduler_svc.core.state.sent_steps import SentSteps
from scheduler_svc.core.state.suspects import Suspects


class Holder(Protocol):
    """
    An executor as the cell sees it: it may hold requests, and other requests wait for it.

    Attributes:
        limits: As of `Replica`.
        gate: Whether it admits requests.
        steps: What it was sent.
    """

    limits: Limits
    gate: AdmissionGate
    steps: SentSteps

    def can_ever_take(self, request: Request) -> bool:
        """Return True when a request could run to its end here, alone."""

    def has_room_for(self, request: Request) -> bool:
        """Return True where a waiting request could be admitted now."""

    def preempt(self, slot: int, detail: str) -> PreemptionMode:
        """Preempt a running request; return how it gets its KV back."""

    def drop(self, request: Request) -> None:
        """Forget a request that was admitted here last."""

    def ready_len(self, request: Request) -> int:
        """Return how many tokens of a waiting request need not be computed for it here."""

    def vacancy(self) -> Vacancy | None:
        """Return the room for requests that wait; None where none could be admitted now."""

    def fits(
        self, request: Request, vacancy: Vacancy, *, num_more: int = 0, more_tokens: int = 0
    ) -> bool:
        """Return True where a waiting request could be admitted behind so many others."""

    def start_afresh(self) -> None:
        """Forget what running requests taught, as none is left."""


class Cell:
    """
    One scheduler's requests, from acceptance to their ends.

    Attributes:
        options: Options of scheduling.
        requests: All live requests.
        router: Which executors requests prefer, where there are several.
        queue: Those that wait. Each other one is in exactly one place of a `Replica`.
        retry_advice: Advice for refused requests, from how fast requests end.
        token_rates: Tokens a minute that tenants have left, where that is limited.
        suspects: Requests that may be the cause of executor deaths.
        events: Events and log lines for the code around the core.
        telemetry: Counters, latencies, lines about steps and events of requests.
        now_s: Time of the call that is being handled, for moves that are not given it.
        has_others: True where there are several executors.
    """

    __slots__ = (
        "_holders",
        "events",
        "has_others",
        "now_s",
        "options",
        "queue",
        "requests",
        "retry_advice",
        "router",
        "suspects",
        "telemetry",
        "token_rates",
    )

    def __init__(self, options: CoreOptions) -> None:
        self.options = options
        self._holders: dict[int, Holder] = {}
        """The executors, by number."""
        self.has_others = False
        self.requests = LiveRequests()
        self.router = Router(options)
        self.queue = WaitingQueue(options)
        self.retry_advice = RetryAdvice()
        self.token_rates = TokenRates()
        self.suspects = Suspects()
        self.events = EventLog()
        self.telemetry = Telemetry(options)
        self.now_s = 0.0

    def note_time(self, now: float) -> None:
        """Note the time of the call that is being handled."""
        self.now_s = now

    def accept(self, request: Request) -> None:
        """Accept one choice of a checked request into the waiting queue."""
        self.telemetry.note_accepted(request, is_first=not len(self.requests))
        self.requests.add(request)
        self.queue.add(request, self.now_s)

    def release(self, request: Request) -> None:
        """Take an ending request out of its place: the queue, or its executor."""
        self.router.note_change()
        number = request.place.replica
        if number is not None and number in self._holders:
            self._holders[number].drop(request)
        if request in self.queue:
            self.queue.discard(request)
            self.reopen()

    def join(self, number: int, holder: Holder) -> None:
        """Let an executor admit requests from now on."""
        self._holders[number] = holder
        self.has_others = len(self._holders) > 1
        self.reopen()

    def part(self, number: int) -> None:
        """Let an executor, which holds no request any more, admit none from now on."""
        del self._holders[number]
        self.has_others = len(self._holders) > 1
        self.suspects.quarantine.forget(number)
        self.reopen()

    def check_holders(self, holders: Mapping[int, Holder]) -> None:
        """
        Compare the executors that joined with those there are.

        Raises:
            InternalError: They differ.
        """
        require(self._holders == holders, "the cell knows other executors than there are")
        is_counted = self.has_others == (len(holders) > 1)
        require(is_counted, "the cell counts other executors than there are")

    def has_blocks(self, num_blocks: int) -> bool:
        """Return True while an executor with so many KV blocks is there."""
        ready = [holder for holder in self._holders.values() if holder.gate.takes_new]
        return any(holder.limits.num_blocks >= num_blocks for holder in ready)

    def holder(self, number: int) -> Holder:
        """Return an executor."""
        return self._holders[number]

    def holder_numbers(self) -> Collection[int]:
        """Return the numbers of all executors."""
        return self._holders.keys()

    def bind(self, request: Request, replica: int) -> None:
        """Note that a request is admitted to an executor; another keeps no copy of its KV."""
        if self.has_others:
            last = request.place.replica
            if last is not None and last != replica and last in self._holders:
                self._holders[last].drop(request)
            self.router.note_bound(request, replica)
            for number, holder in self._holders.items():
                if number != replica:
                    # It may have been for this request that another admitted none.
                    holder.gate.reopen()
        request.place.bind(replica)

    def reopen(self) -> None:
        """Let every executor admit again, as one came or went that may make the difference."""
        self.router.note_change()
        for holder in self._holders.values():
            holder.gate.reopen()

    def forget(self, request: Request) -> None:
        """Remove a choice that has ended with all its outputs, which its tenant is charged."""
        self.requests.remove(request)
        self.router.forget(request)
        self.queue.settle(request)
        self.spend_tokens(request.new, len(request.outputs) - request.terms.num_prior)
        self.retry_advice.note_end(self.now_s)
        if not len(self.requests):
            for holder in self._holders.values():
                holder.start_afresh()

    def spend_tokens(self, new: NewRequest, num_tokens: int) -> None:
        """Charge tokens to those that a request's tenant has in a minute, if that is limited."""
        per_minute = limits_of(self.options, new).tokens_per_minute
        if per_minute is not None:
            self.token_rates.spend(new.tenant, num_tokens, per_minute, self.now_s)

    def check_integrity(self) -> None:
        """
        Check each part by itself, and that all of them are about the same requests.

        Raises:
            InternalError: The first invariant that does not hold.
        """
        charged = [one for one in self.requests if one.times.scheduled_s is not None]
        self.queue.check_integrity(charged)
        self.token_rates.check_integrity()
        self.events.check_integrity()
        self.suspects.check_integrity({request.number for request in self.requests})
        for request in self.queue:
            require(request.state is RequestState.WAITING, "a request waits in another state")
            require(request.place.slot is None, "a waiting request has a slot")
        self.requests.check_integrity()
        self.telemetry.check_integrity(len(self.requests))

    def note(self, kind: EventKind, request: Request, detail: str = "") -> None:
        """Record an event of a request at the time of this call, if request events are kept."""
        self.telemetry.note(kind, request, self.now_s, detail)
