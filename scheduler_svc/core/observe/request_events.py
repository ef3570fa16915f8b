"""
Request events for operators; kept only when one of the `track_*` options is on.

Source: the request events of Megatron-LM's dynamic engine. Unlike there, times are seconds on the
clock the core is driven with, the two kinds of preemption have their own events (`RETRACT` takes
the slot at once, `EVICT` takes it from a paused request), and the number of events kept is bounded.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from scheduler_svc.core.kv_cache.block_pool import BlockPool
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import Request, RequestState
from tandem.errors import InternalError, RequestNotFound

MAX_EVENTS_PER_CHOICE = 1024
"""Most events kept of one choice; of a longer history the first and the last half of this many."""
MAX_ENDED_EVENTS = 100_000
"""Most events kept of all ended choices together; those of the last one are kept in any case."""


class EventKind(enum.IntEnum):
    """Kinds of events."""

    ADD = 1
    """The request arrived and was accepted."""
    SCHEDULED = 2
    """It got a slot, for the first time or again."""
    GENERATED_TOKEN = 3
    """The core received a token of it; only with `track_token_events`."""
    PAUSE = 4
    """It stays paused for a step; only with `track_paused_events`."""
    EVICT = 5
    """It was preempted while it was paused; `detail` says why."""
    RETRACT = 6
    """It lost its slot and waits again; `detail` says why."""
    FINISH = 7
    """It ended well; `detail` is the name of its `FinishReason`."""
    FAIL = 8
    """It ended by an error; `detail` is its reason in the error table."""
    SUSPECTED = 9
    """An executor died in a step with it; `detail` has the deaths and the step's request count."""
    TRIAL = 10
    """It runs in a trial that looks for the request that kills executors; `detail` describes it."""
    CLEARED = 11
    """It made progress after it was suspected or tried."""


class Phase(enum.Enum):
    """Place of a choice in its life, by its events so far."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    RETRACTED = "retracted"
    ENDED = "ended"


_ENDS = {EventKind.FINISH: Phase.ENDED, EventKind.FAIL: Phase.ENDED}
LEGAL_ORDER: dict[Phase, dict[EventKind, Phase]] = {
    Phase.NEW: {EventKind.ADD: Phase.WAITING},
    Phase.WAITING: {
        EventKind.SCHEDULED: Phase.RUNNING,
        EventKind.TRIAL: Phase.WAITING,
        **_ENDS,
    },
    Phase.RUNNING: {
        EventKind.GENERATED_TOKEN: Phase.RUNNING,
        EventKind.PAUSE: Phase.RUNNING,
        EventKind.EVICT: Phase.RETRACTED,
        EventKind.RETRACT: Phase.RETRACTED,
        EventKind.CLEARED: Phase.RUNNING,
        **_ENDS,
    },
    Phase.RETRACTED: {
        # These tokens were in flight when it lost its slot.
        EventKind.GENERATED_TOKEN: Phase.RETRACTED,
        EventKind.SCHEDULED: Phase.RUNNING,
        EventKind.SUSPECTED: Phase.RETRACTED,
        EventKind.TRIAL: Phase.RETRACTED,
        **_ENDS,
    },
    Phase.ENDED: {},
}
"""Events that may come in each phase, with the phase after each."""

_PHASES_OF: dict[RequestState, frozenset[Phase]] = {
    RequestState.WAITING: frozenset({Phase.WAITING, Phase.RETRACTED}),
    RequestState.DRAINING: frozenset({Phase.RETRACTED}),
}
"""Phases that agree with a request's state; any other state of a live request means RUNNING."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStats:
    """KV blocks at one moment: held by requests, kept as prefix cache only, and free."""

    used: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent:
    """
    One thing that happened to one choice of a request.

    Attributes:
        kind: Its kind.
        time_s: Its time on the clock the core is driven with; of ADD the arrival time.
        choice: Number of the choice (completion of the prompt), from 0.
        token_id: The token of GENERATED_TOKEN, else None.
        blocks: Blocks when the core received the token of GENERATED_TOKEN; else None.
        detail: The reason or the details, see `EventKind`; empty where the kind says it all.
        ttft_s: Of FINISH and FAIL, seconds from ADD to the first token; None without one.
        num_dropped: Number of events of this choice left out right before this one.
    """

    kind: EventKind
    time_s: float
    choice: int
    token_id: int | None = None
    blocks: BlockStats | None = None
    detail: str = ""
    ttft_s: float | None = None
    num_dropped: int = 0


class _Log:
    """Events of one choice: the first ones, and the latest of those that follow."""

    __slots__ = (
        "arrival_s",
        "first",
        "last",
        "num_dropped",
        "num_tokens",
        "phase",
        "request_id",
        "tenant",
    )

    def __init__(self, request: Request) -> None:
        self.request_id = request.new.request_id
        self.tenant = request.new.tenant
        self.arrival_s = request.new.arrival_s
        self.phase = Phase.NEW
        self.first: list[RequestEvent] = []
        self.last: deque[RequestEvent] = deque(maxlen=MAX_EVENTS_PER_CHOICE // 2)
        self.num_dropped = 0
        self.num_tokens = 0

    def add(self, event: RequestEvent) -> None:
        if len(self.first) < MAX_EVENTS_PER_CHOICE // 2:
            self.first.append(event)
            return
        self.num_dropped += len(self.last) == self.last.maxlen
        self.last.append(event)

    def events(self) -> Iterator[RequestEvent]:
        yield from self.first
        for i, event in enumerate(self.last):
            yield event if i else replace(event, num_dropped=self.num_dropped)

    def __len__(self) -> int:
        return len(self.first) + len(self.last)


class EventRecorder:
    """
    Keeps the events of live choices and of the latest ended ones; owned by the core's state.

    An event out of order does not disturb serving: `check_integrity` reports it.

    Attributes:
        keeps_pauses: True when PAUSE events are kept (`track_paused_events`).
    """

    __slots__ = (
        "_ended",
        "_illegal",
        "_keeps_tokens",
        "_live",
        "_num_ended_events",
        "keeps_pauses",
    )

    def __init__(self, options: CoreOptions) -> None:
        self.keeps_pauses = options.track_paused_events
        self._keeps_tokens = options.track_token_events
        self._live: dict[int, _Log] = {}
        self._ended: OrderedDict[int, _Log] = OrderedDict()
        self._num_ended_events = 0
        self._illegal = ""

    @classmethod
    def of(cls, options: CoreOptions) -> EventRecorder | None:
        """Return a recorder where any of the `track_*` options is on, else None."""
        return cls(options) if options.tracks_events else None

    def note(self, kind: EventKind, request: Request, now: float, detail: str = "") -> None:
        """Record an event of any kind but a token or a pause."""
        is_end = kind in _ENDS
        ttft_s = None
        if is_end and request.times.first_token_s is not None:
            ttft_s = request.times.first_token_s - request.new.arrival_s
        event = RequestEvent(
            kind=kind,
            time_s=now,
            choice=request.new.sampling.choice,
            detail=detail,
            ttft_s=ttft_s,
        )
        self._add(request, event)
        if is_end:
            self._keep_ended(request.number)

    def note_pause(self, request: Request, now: float) -> None:
        """Record that a request stays paused for a step, if `track_paused_events` is on."""
        if self.keeps_pauses:
            choice = request.new.sampling.choice
            self._add(request, RequestEvent(kind=EventKind.PAUSE, time_s=now, choice=choice))

    def note_tokens(
        self, tokens: Iterable[tuple[Request, int]], pool: BlockPool, now: float
    ) -> None:
        """Record the tokens of one result, if `track_token_events` is on."""
        if not self._keeps_tokens:
            return
        used, free = pool.num_used, pool.num_free
        blocks = BlockStats(used=used, cached=pool.num_blocks - used - free, free=free)
        for request, token in tokens:
            event = RequestEvent(
                kind=EventKind.GENERATED_TOKEN,
                time_s=now,
                choice=request.new.sampling.choice,
                token_id=token,
                blocks=blocks,
            )
            self._add(request, event)
            self._live[request.number].num_tokens += 1

    def events_of(self, request_id: str, tenant: str | None = None) -> list[RequestEvent]:
        """
        Return the events of all choices of the latest request with this id, in order of time, of
        this tenant, or of any tenant under None.

        Raises:
            RequestNotFound: No event of such a request is kept.
        """
        kept = chain(self._ended.values(), self._live.values())
        logs = [
            log for log in kept if log.request_id == request_id and tenant in (None, log.tenant)
        ]
        if not logs:
            message = f"no events of a request with the id {request_id!r} are kept"
            raise RequestNotFound(message, field="request_id")
        latest = max((log.arrival_s, log.tenant) for log in logs)
        own = (log for log in logs if (log.arrival_s, log.tenant) == latest)
        events = chain.from_iterable(log.events() for log in own)
        return sorted(events, key=lambda event: event.time_s)

    def check_integrity(self, live: Iterable[tuple[Request, int]]) -> None:
        """
        Compare the events with the live requests and their numbers of outputs.

        Raises:
            InternalError: An event came out of order, is missing or was recorded twice.
        """
        if self._illegal:
            raise InternalError(self._illegal)
        requests = {request.number: (request, num_outputs) for request, num_outputs in live}
        if requests.keys() != self._live.keys():
            raise InternalError("the requests with events are not those in the system")
        for number, (request, num_outputs) in requests.items():
            log, name = self._live[number], request.new.request_id
            if log.phase not in _PHASES_OF.get(request.state, {Phase.RUNNING}):
                message = f"{name} is {request.state.value}, by its events it is {log.phase.value}"
                raise InternalError(message)
            if self._keeps_tokens and log.num_tokens != num_outputs:
                message = f"{name} has {num_outputs} tokens and {log.num_tokens} events of tokens"
                raise InternalError(message)
        if self._num_ended_events != sum(len(log) for log in self._ended.values()):
            raise InternalError("the count of events of ended requests is wrong")

    def _add(self, request: Request, event: RequestEvent) -> None:
        log = self._live.get(request.number)
        if log is None:
            log = self._live[request.number] = _Log(request)
        phase = LEGAL_ORDER[log.phase].get(event.kind)
        if phase is None:
            self._illegal = self._illegal or (
                f"illegal order of events: {log.request_id} is {log.phase.value} and got "
                f"{event.kind.name}"
            )
        else:
            log.phase = phase
        log.add(event)

    def _keep_ended(self, number: int) -> None:
        log = self._live.pop(number)
        self._ended[number] = log
        self._num_ended_events += len(log)
        while self._num_ended_events > MAX_ENDED_EVENTS and len(self._ended) > 1:
            _, oldest = self._ended.popitem(last=False)
            self._num_ended_events -= len(oldest)
