"""Questions that any thread may ask an engine; none of them changes it."""

from __future__ import annotations

import threading

from scheduler_svc.core.observe.request_events import RequestEvent
from scheduler_svc.core.request.tenant import NO_TENANT
from scheduler_svc.core.scheduler import Scheduler
from tandem.errors import RequestNotFound
from tandem_embedded.driver import Driver
from tandem_embedded.errors import EngineError, engine_error, engine_errors
from tandem_embedded.ledger import Entry, Ledger
from tandem_embedded.results import STATE_OF_CORE, EngineMetrics, MemoryStats, Request
from tandem_embedded.tokenizer import Tokenizer


class EngineQueries:
    """Questions about the requests, memory and counts of an engine."""

    _core: Scheduler
    _driver: Driver
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

    def output_tokens(self, request_id: int, choice: int = 0) -> list[int]:
        """
        Return the output so far of one choice of a live request.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock:
            return list(self._entry(request_id).choices[choice].tokens)

    def get_request(self, request_id: int) -> Request:
        """
        Return a snapshot of a live request, in the state of its first choice that is not over.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock:
            entry = self._entry(request_id)
            states = [self._core.state_of(handle) for handle in entry.handles]
            state = next((STATE_OF_CORE[state] for state in states if state is not None), None)
            if state is None:  # over in the core
                raise _not_live(request_id)
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
            stats, num_requests = self._core.stats(), self._core.num_requests
        return EngineMetrics.of(stats, num_requests, self._driver.steps_by_runner)

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

    def _entry(self, request_id: int) -> Entry:
        entry = self._ledger.entries.get(request_id)
        if entry is None:
            raise _not_live(request_id)
        return entry


def _not_live(request_id: int) -> EngineError:
    message = f"no live request has the id {request_id}: it may have ended already"
    return engine_error(RequestNotFound(message))
