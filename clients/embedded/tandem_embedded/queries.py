"""Questions that any thread may ask an engine; none of them changes it."""

from __future__ import annotations

import threading

from scheduler_svc.core.observe.request_events import RequestEvent
from scheduler_svc.core.request.tenant import NO_TENANT
from scheduler_svc.core.scheduler import Scheduler
from tandem.errors import RequestNotFound
from tandem_embedded.driver import Driver
from tandem_embedded.errors import SchedulerError, engine_error, engine_errors
from tandem_embedded.ledger import Entry, Ledger
from tandem_embedded.results import STATE_OF_CORE, EngineMetrics, MemoryStats, Request, RequestState
from tandem_embedded.tokenizer import Tokenizer


class EngineQueries:
    """Questions about the requests, memory and counts of an engine."""

    _core: Scheduler
    _driver: Driver
    _is_closed: bool
    _ledger: Ledger
    _lock: threading.Lock
    """Guards core, ledger and ids; never held while a step computes."""
    _tokenizer: Tokenizer | None
    _vocab_size: int

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are in [0, vocab_size)."""
        return self._vocab_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the engine; None without one."""
        return self._tokenizer

    @property
    def is_suspended(self) -> bool:
        """True from `suspend` to `resume`."""
        with self._lock:
            return self._driver.is_suspended

    def has_pending_work(self) -> bool:
        """Return True while a request is in the system or a result is not delivered."""
        with self._lock:
            return self._is_work_left or self._ledger.num_undelivered > 0

    def output_tokens(self, request_id: int, choice: int = 0) -> list[int]:
        """
        Return the output so far of one choice of a live request.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock:
            entry, _ = self._live(request_id)
            return list(entry.choices[choice].tokens)

    def get_request(self, request_id: int) -> Request:
        """
        Return a snapshot of a live request, in the state of its first choice that is not over.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock:
            entry, state = self._live(request_id)
            return Request(
                request_id=request_id,
                input_tokens=list(entry.prompt),
                output_tokens=list(entry.choices[0].tokens),
                params=entry.params,
                state=state,
                created_at=entry.created_at,
            )

    def request_events(self, request_id: int) -> list[RequestEvent]:
        """
        Return the events of a request, live or over lately, in order of time.

        Raises:
            ConfigError: None of the options `track_*_events` is on.
            SchedulerError: No events of this request are kept.
        """
        with self._lock, engine_errors():
            return self._core.request_events(str(request_id))

    def get_memory_stats(self) -> MemoryStats:
        """Return the numbers of KV blocks; `str()` of the result is one line."""
        with self._lock:
            return MemoryStats.of(self._core.stats(), self._driver.num_slots_in_use)

    def get_metrics(self) -> EngineMetrics:
        """Return the counts since the engine was created."""
        with self._lock:
            return EngineMetrics.of(
                self._core.stats(),
                self._core.num_requests,
                self._driver.steps_by_runner,
                num_failed_at_end=self._ledger.num_failed_at_end,
            )

    def check_integrity(self) -> None:
        """
        Check every invariant of the scheduler core.

        Raises:
            ExecutionError: An invariant does not hold, which is a bug of ours.
        """
        with self._lock, engine_errors():
            self._core.check_integrity()

    def _tenant(self, request_id: int) -> str:
        """Return the tenant of a request; that of requests without one if it is not live."""
        entry = self._ledger.entries.get(request_id)
        return NO_TENANT if entry is None else entry.params.tenant

    @property
    def _is_work_left(self) -> bool:
        """
        True while a request is live in the ledger, which includes one that is over in the core and
        not told of yet, or the core has work; the lock is held.
        """
        return bool(self._ledger.entries) or self._core.has_pending_work()

    def _only_releases_left(self) -> bool:
        with self._lock:
            return not self._core.num_requests and self._core.has_pending_work()

    def _has_work(self) -> bool:
        with self._lock:
            return self._is_work_left

    def _only_delivers(self) -> bool:
        """Return True while a step computes nothing, and has completed requests to return."""
        with self._lock:
            return self._driver.is_suspended and self._ledger.num_undelivered > 0

    def _check_open(self) -> None:
        if self._is_closed:
            message = "the engine is closed: make another one"
            raise SchedulerError(message, reason="NO_EXECUTOR")

    def _live(self, request_id: int) -> tuple[Entry, RequestState]:
        """
        Return a request that is live in the core, and the state of its first choice that is; the
        lock is held.

        Raises:
            SchedulerError: No such request is live.
        """
        entry = self._ledger.entries.get(request_id)
        states = [] if entry is None else [self._core.state_of(one) for one in entry.handles]
        state = next((STATE_OF_CORE[one] for one in states if one is not None), None)
        if entry is None or state is None:
            message = f"no live request has the id {request_id}: it may have ended already"
            raise engine_error(RequestNotFound(message))
        return entry, state
