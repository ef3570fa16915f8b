"""The scheduler core: requests in, batches out, results in, events out."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core import integrity
from scheduler_svc.core.admission import Acceptance, accept, check, fail_misfits
from scheduler_svc.core.deadlines import next_deadline_s
from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.listing import RequestRow, list_requests
from scheduler_svc.core.observe.request_events import RequestEvent
from scheduler_svc.core.observe.stats import HistogramSnapshot
from scheduler_svc.core.request.events import CoreEvents
from scheduler_svc.core.request.geometry import ExecutorGeometry, Limits
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason, RequestState
from scheduler_svc.core.request.tenant import NO_TENANT
from scheduler_svc.core.snapshot import core_histograms, core_stats
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.ends import fail, finish
from scheduler_svc.core.state.fleet import Fleet
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats
from tandem.engine_config import EngineConfig
from tandem.errors import EventsNotTracked, InternalError, RequestNotFound, TandemError


class Scheduler(ExecutorPort):
    """
    A pure state machine: no clock, no I/O, no randomness, not thread-safe.

    It is itself the port of its first executor, number 0; what it does for all executors goes on
    after that one was detached. Every `now` is seconds on one clock that never goes back.

    Raises:
        InvalidConfig: A value of `config` or `options` is out of range.
        IncompatibleExecutor: `config` and `geometry` differ in block_size.
    """

    def __init__(
        self,
        config: EngineConfig,
        geometry: ExecutorGeometry,
        options: CoreOptions | None = None,
    ) -> None:
        options = options or CoreOptions()
        options.validate()
        limits = Limits.of(config, geometry)
        options.check_limits(limits.max_total_tokens, limits.max_model_len)
        fleet = Fleet(Cell(options), limits)
        super().__init__(fleet, 0)
        self._ports: dict[int, ExecutorPort] = {0: self}

    @property
    def num_requests(self) -> int:
        """Number of requests in the system; each choice counts."""
        return len(self._cell.requests)

    @property
    def block_size(self) -> int:
        """Tokens per KV block, which all executors have in common."""
        return self._fleet.largest.limits.block_size

    @property
    def next_deadline_s(self) -> float | None:
        """
        Time of the earliest deadline or queue limit, or at which a waiting request is left to no
        executor any more; ask all for their next plans then, or at least call `expire`.
        """
        return next_deadline_s(self._cell)

    def attach(self, config: EngineConfig, geometry: ExecutorGeometry) -> ExecutorPort:
        """
        Let another, empty executor compute requests too; returns its port.

        Raises:
            InvalidConfig, IncompatibleExecutor: As the constructor, or block sizes differ.
        """
        limits = Limits.of(config, geometry)
        self._cell.options.check_limits(limits.max_total_tokens, limits.max_model_len)
        port = ExecutorPort(self._fleet, self._fleet.add(limits))
        self._ports[port.number] = port
        return port

    def detach(self, number: int, now: float) -> None:
        """
        Let an executor compute no more. Results in flight will not come; what ran on it waits again
        with its outputs and goes on elsewhere; what no other can hold fails.

        Raises:
            InternalError: It is the only one, or it was detached before.
        """
        self.expire(now)
        self._fleet.remove(number)
        self._ports.pop(number).note_detached()
        fail_misfits(self._fleet)

    def submit(self, new: NewRequest, now: float) -> Acceptance:
        """
        Put all choices of a request in the waiting queue, or none; its prompt must not change from
        then on. A choice ends at once if its prior outputs already reach its end. Returns the terms
        on which the request was accepted.

        Raises:
            DuplicateRequestId, EmptyPrompt, InvalidParameter, PromptTooLong, TotalTooLong,
            NeverFits, QueueFull or MemoryPressure: It is refused and nothing of it is kept.
        """
        cell = self._cell
        self.expire(now)
        try:
            choices = check(self._fleet, new)
        except TandemError as error:
            cell.telemetry.counters.requests.note_refused(error.metadata.get("limit"))
            raise
        if taken := [c.new.handle for c in choices if cell.requests.find(c.new.handle) is not None]:
            raise InternalError(f"handle {taken[0]} is in use")
        return accept(self._fleet, choices, now)

    def end_request(
        self,
        request_id: str,
        reason: FinishReason,
        now: float,
        num_output_tokens: int | None = None,
        *,
        tenant: str = NO_TENANT,
    ) -> NewRequest:
        """
        End all live choices of a tenant's request from outside, in any state; their slots and
        blocks are free in the next batch. Return its first choice as it was submitted.

        Args:
            request_id: Id of the request.
            reason: Finish reason, for its `Ended`.
            now: The time.
            num_output_tokens: Outputs up to the end, where it was found in the text; None counts
                all known ones.
            tenant: Tenant of the request.

        Raises:
            RequestNotFound: No live request of this tenant has this id.
        """
        choices = self._cell.requests.choices_of(tenant, request_id)
        for request in choices:
            finish(self._cell, request, reason, now, num_output_tokens=num_output_tokens)
        return choices[0].new

    def end_handle(
        self,
        handle: int,
        reason: FinishReason,
        now: float,
        num_output_tokens: int | None = None,
    ) -> NewRequest:
        """
        End one choice of a request, as `end_request` ends all of them, and return it as it was
        submitted.

        Raises:
            RequestNotFound: No live request has this handle.
        """
        request = self._cell.requests.find(handle)
        if request is None:
            raise RequestNotFound(f"no live request has the handle {handle}: it may have ended")
        finish(self._cell, request, reason, now, num_output_tokens=num_output_tokens)
        return request.new

    def preempt(self, request_id: str, tenant: str = NO_TENANT) -> None:
        """
        Preempt the running choices of a tenant's request, as a shortage of blocks would; its other
        choices stay as they are.

        Raises:
            RequestNotFound: No live request of this tenant has this id.
        """
        for request in self._cell.requests.choices_of(tenant, request_id):
            replica, slot = self._fleet.of(request), request.place.slot
            if replica is not None and slot is not None:
                replica.preempt(slot)

    def flush_prefix_cache(self) -> int:
        """
        Drop all that was computed so far from the prefix cache; requests that share KV already go
        on sharing it. Returns the number of blocks freed, which only the prefix cache had kept.
        """
        return sum(replica.kv.flush() for replica in self._fleet)

    def find(self, handle: int) -> str | None:
        """Return the id of the live request with this handle, if any."""
        request = self._cell.requests.find(handle)
        return None if request is None else request.new.request_id

    def state_of(self, handle: int) -> RequestState | None:
        """Return the state of the live request with this handle, if any."""
        request = self._cell.requests.find(handle)
        return None if request is None else request.state

    def outputs(self, handle: int) -> list[int] | None:
        """Return the output tokens so far of the live request with this handle, if any."""
        request = self._cell.requests.find(handle)
        if request is None:
            return None
        replica, slot = self._fleet.of(request), request.place.slot
        if replica is not None and slot is not None:
            replica.slots.tokens.flush(slot)
        return request.outputs.tolist()

    def num_computed(self, handle: int) -> int:
        """
        Return of how many tokens of a request results were applied since it was last admitted; 0
        for one that is not running or not live.
        """
        request = self._cell.requests.find(handle)
        if request is None:
            return 0
        replica = self._fleet.of(request)
        return 0 if replica is None else replica.num_computed(request)

    def list_requests(self) -> list[RequestRow]:
        """Return one row per live choice, in order of arrival."""
        return list_requests(self._fleet)

    def request_events(self, request_id: str, tenant: str | None = None) -> list[RequestEvent]:
        """
        Return the events of a request, live or ended lately, in order of time; under None of the
        latest one with this id, whichever tenant sent it.

        Raises:
            EventsNotTracked: No events are kept.
            RequestNotFound: None of this request are kept.
        """
        recorder = self._cell.telemetry.recorder
        if recorder is None:
            raise EventsNotTracked("no events of requests are kept: set track_request_events")
        return recorder.events_of(request_id, tenant)

    def waiting_handles(self) -> list[int]:
        """Return the handles of all waiting requests, the next to be admitted first."""
        cell, first = self._cell, next(iter(self._fleet))
        order = cell.queue.in_order(cell.now_s, first.kv.prefixes)
        return [request.new.handle for request in order]

    def take_events(self) -> CoreEvents:
        """Return and clear the events since the last call."""
        return self._cell.events.take()

    def fail_all(self, error: TandemError, now: float) -> None:
        """Fail every request with this error, except those that have reached their deadline."""
        self.fail_handles([request.new.handle for request in self._cell.requests], error, now)

    def fail_handles(self, handles: Iterable[int], error: TandemError, now: float) -> None:
        """
        Fail the requests with these handles, except those that are not live or have reached their
        deadline.
        """
        self.expire(now)
        for handle in handles:
            request = self._cell.requests.find(handle)
            if request is not None:
                fail(self._cell, request, error)

    def has_pending_work(self) -> bool:
        """
        Return True while a request is in the system, a slot is to be released or a result is to
        come.
        """
        return bool(
            len(self._cell.requests)
            or any(one.slots.has_vacated() or one.steps.in_flight for one in self._fleet)
        )

    def stats(self) -> Stats:
        """Return a snapshot of the statistics, without those of the service around the core."""
        return core_stats(self._fleet)

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return copies of the core's histograms, by their names in the metrics."""
        return core_histograms(self._cell)

    def check_integrity(self) -> None:
        """
        Check every invariant of the state.

        Raises:
            InternalError: The first one that does not hold.
        """
        integrity.check_integrity(self._fleet)
