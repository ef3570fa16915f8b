"""The scheduler core: requests in, batches out, results in, events out."""

from __future__ import annotations

from typing import Any

from scheduler_svc.core import integrity, suspension
from scheduler_svc.core.admission import Acceptance, accept, check, check_still_fits
from scheduler_svc.core.batch.lookahead import lookahead
from scheduler_svc.core.batch.pausing import num_paused_blocks
from scheduler_svc.core.batch.planner import plan
from scheduler_svc.core.deadlines import end_overdue, next_deadline_s
from scheduler_svc.core.faults.executor_loss import lose_executor, prove
from scheduler_svc.core.faults.refusals import Refusal, lose_refused
from scheduler_svc.core.listing import RequestRow, list_requests, slot_columns
from scheduler_svc.core.observe.request_events import RequestEvent
from scheduler_svc.core.observe.stats import HistogramSnapshot
from scheduler_svc.core.output.output_processor import apply_result
from scheduler_svc.core.request.events import CoreEvents
from scheduler_svc.core.request.geometry import ExecutorGeometry, Limits
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason, RequestState
from scheduler_svc.core.request.tenant import NO_TENANT
from scheduler_svc.core.snapshot import core_histograms, core_stats
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.ends import fail, finish
from scheduler_svc.core.state.replica import Replica
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats
from tandem.engine_config import EngineConfig
from tandem.errors import EventsNotTracked, InternalError, RequestNotFound, TandemError
from tandem.link.batch import Batch
from tandem.link.commands import KvMode, Resume, Suspend
from tandem.link.results import StepResult


class Scheduler:
    """
    A pure state machine: no clock, no I/O, no randomness, not thread-safe.

    Each batch that `schedule` returns must be sent, and its result given to `apply`, in order; any
    number may be in flight. Every `now` is seconds on one clock that never goes back.

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
        self._cell = Cell(options)
        self._replica = Replica(self._cell, limits)

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return self._replica.limits

    @property
    def state_hash(self) -> int:
        """Hash of the executor's slot state after the latest batch."""
        return self._replica.slots.state_hash()

    @property
    def num_inflight(self) -> int:
        """Number of steps in flight: batches and commands without an applied result."""
        return len(self._replica.in_flight)

    @property
    def num_requests(self) -> int:
        """Number of requests in the system; each choice counts."""
        return len(self._cell.requests)

    @property
    def num_slots_in_use(self) -> int:
        """Number of requests with a slot."""
        return self._replica.slots.num_running

    @property
    def num_paused_blocks(self) -> int:
        """Number of blocks that paused requests hold; shared ones count once."""
        return num_paused_blocks(self._replica)

    @property
    def paused_budget_blocks(self) -> int:
        """Number of blocks that paused requests may hold; 0 without a budget."""
        return self._cell.options.paused_budget_blocks

    @property
    def next_deadline_s(self) -> float | None:
        """Time of the earliest deadline or queue limit; call `schedule` or `expire` then."""
        return next_deadline_s(self._cell)

    def submit(self, new: NewRequest, now: float) -> Acceptance:
        """
        Put all choices of a request in the waiting queue, or none; its prompt must not change from
        then on. A choice ends at once if its prior outputs already reach its end. Returns the terms
        on which the request was accepted.

        Raises:
            DuplicateRequestId, EmptyPrompt, InvalidParameter, PromptTooLong, TotalTooLong,
            NeverFits, QueueFull or MemoryPressure: It is refused and nothing of it is kept.
        """
        cell, replica = self._cell, self._replica
        self.expire(now)
        try:
            choices = check(replica, new)
        except TandemError as error:
            cell.counters.requests.note_refused(error.metadata.get("limit"))
            raise
        if taken := [c.new.handle for c in choices if cell.requests.find(c.new.handle) is not None]:
            raise InternalError(f"handle {taken[0]} is in use")
        return accept(replica, choices, now)

    def end_request(
        self,
        request_id: str,
        reason: FinishReason,
        now: float,
        num_output_tokens: int | None = None,
        *,
        tenant: str = NO_TENANT,
    ) -> None:
        """
        End all live choices of a tenant's request from outside, in any state; their slots and
        blocks are free in the next batch.

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
        for request in self._cell.requests.choices_of(tenant, request_id):
            finish(self._cell, request, reason, now, num_output_tokens=num_output_tokens)

    def end_handle(
        self,
        handle: int,
        reason: FinishReason,
        now: float,
        num_output_tokens: int | None = None,
    ) -> None:
        """
        End one choice of a request, as `end_request` ends all of them.

        Raises:
            RequestNotFound: No live request has this handle.
        """
        request = self._cell.requests.find(handle)
        if request is None:
            raise RequestNotFound(f"no live request has the handle {handle}: it may have ended")
        finish(self._cell, request, reason, now, num_output_tokens=num_output_tokens)

    def preempt(self, request_id: str, tenant: str = NO_TENANT) -> None:
        """
        Preempt the running choices of a tenant's request, as a shortage of blocks would; its other
        choices stay as they are.

        Raises:
            RequestNotFound: No live request of this tenant has this id.
        """
        for request in self._cell.requests.choices_of(tenant, request_id):
            if request.place.slot is not None:
                self._replica.preempt(request.place.slot)

    def flush_prefix_cache(self) -> int:
        """
        Drop all that was computed so far from the prefix cache; requests that share KV already go
        on sharing it. Returns the number of blocks freed, which only the prefix cache had kept.
        """
        return self._replica.kv.flush()

    def find(self, handle: int) -> str | None:
        """Return the id of the live request with this handle, if any."""
        request = self._cell.requests.find(handle)
        return None if request is None else request.new.request_id

    def state_of(self, handle: int) -> RequestState | None:
        """Return the state of the live request with this handle, if any."""
        request = self._cell.requests.find(handle)
        return None if request is None else request.state

    def row_owner(self, slot: int, generation: int) -> int | None:
        """Return the handle of the live request that has results with this slot and generation."""
        request = self._replica.request_at(slot, generation)
        return None if request is None else request.new.handle

    def outputs(self, handle: int) -> list[int] | None:
        """Return the output tokens so far of the live request with this handle, if any."""
        request = self._cell.requests.find(handle)
        if request is None:
            return None
        if request.place.slot is not None:
            self._replica.slots.tokens.flush(request.place.slot)
        return request.outputs.tolist()

    def list_requests(self) -> list[RequestRow]:
        """Return one row per live choice, in order of arrival."""
        return list_requests(self._replica)

    def request_events(self, request_id: str, tenant: str | None = None) -> list[RequestEvent]:
        """
        Return the events of a request, live or ended lately, in order of time; under None of the
        latest one with this id, whichever tenant sent it.

        Raises:
            EventsNotTracked: No events are kept.
            RequestNotFound: None of this request are kept.
        """
        if self._cell.recorder is None:
            raise EventsNotTracked("no events of requests are kept: set track_request_events")
        return self._cell.recorder.events_of(request_id, tenant)

    def waiting_handles(self) -> list[int]:
        """Return the handles of all waiting requests, the next to be admitted first."""
        cell = self._cell
        order = cell.queue.in_order(cell.now_s, self._replica.kv.prefixes)
        return [request.new.handle for request in order]

    def expire(self, now: float) -> None:
        """End each request past its deadline or queue limit; `schedule` does this too."""
        end_overdue(self._cell, now)

    def schedule(self, now: float) -> Batch | None:
        """
        Plan the next batch; None when there is nothing to send. It may consist of releases alone.
        """
        self.expire(now)
        if self.is_suspended:
            return suspension.plan_suspended(self._replica)
        return plan(self._replica, now)

    @property
    def is_suspended(self) -> bool:
        """True from `suspend` until `resume` was called and its command was taken."""
        return self._replica.suspension.is_in_force

    @property
    def is_command_due(self) -> bool:
        """True from `suspend` or `resume` until `take_command` has returned their command."""
        return self._replica.suspension.is_command_due

    def suspend(self, mode: KvMode, now: float) -> None:
        """
        Plan no step until `resume` and have the executor give KV memory back as `mode` says.

        New requests are accepted and wait; slots of requests that end are released on resume. After
        PERSIST and OFFLOAD, running requests go on where they were; under RECOMPUTE they wait again
        with their outputs, in arrival order. A second suspension does nothing.
        """
        self.expire(now)
        suspension.suspend(self._replica, mode)

    def resume(self) -> None:
        """End a suspension; without one it does nothing."""
        suspension.resume(self._replica)

    def take_command(self) -> Suspend | Resume | None:
        """
        Return the command that must be sent as the next step, before `schedule` is called; its
        result goes to `apply` like a batch's. None when there is none.
        """
        return suspension.take_command(self._replica)

    def apply(self, result: StepResult, now: float) -> None:
        """
        Apply the result of the oldest batch in flight.

        Raises:
            SessionLost: It is not the result of that batch; nothing was changed then.
        """
        self._cell.note_time(now)
        apply_result(self._replica, result, now)

    def take_events(self) -> CoreEvents:
        """Return and clear the events since the last call."""
        return self._cell.events.take()

    def lookahead(self, usual_step_s: float) -> int:
        """
        Return how many steps may be in flight now, `take_command`'s included; costs O(1).

        Args:
            usual_step_s: Seconds that a step usually takes; 0 while that is not known.
        """
        return lookahead(self._replica, usual_step_s)

    def executor_lost(
        self,
        now: float,
        died_in: int | None = None,
        *,
        out_of_memory: bool = False,
        may_live: str = "",
    ) -> None:
        """
        Start over with an empty executor.

        Results in flight will not come. Requests that ran wait again with their outputs, in arrival
        order, ahead of those of their own priority that never ran.

        Args:
            now: The time.
            died_in: The step that was running when the executor died or failed, counted from the
                oldest in flight, which is 0: its requests may have caused it. None where no step is
                to blame, as when only the connection or the session was lost; an index past those
                in flight blames no step either.
            out_of_memory: True when that step failed for want of memory. No death is counted then,
                but steps become smaller, and a request fails if steps of it alone have failed so
                too often.
            may_live: The executor's boot id, where it is not known whether it died: no request is
                blamed before `executor_seen` says that it died.
        """
        self.expire(now)
        lose_executor(self._replica, died_in, now, out_of_memory=out_of_memory, may_live=may_live)

    def batch_refused(self, refusal: Refusal, now: float) -> None:
        """Start over like `executor_lost`; requests of the refused batch fail by InternalError."""
        self.expire(now)
        lose_refused(self._replica, refusal)

    def executor_seen(self, boot_id: str, now: float, *, died: bool) -> None:
        """
        Settle the fate of an executor that was lost and may have lived: its process was seen alive,
        or another one in its place. Nothing may be in flight.
        """
        self.expire(now)
        prove(self._replica, boot_id, now, died=died)

    def use_geometry(self, config: EngineConfig, geometry: ExecutorGeometry, now: float) -> None:
        """
        Go on with another, empty executor, as after `executor_lost`.

        With a shorter max_model_len a request ends there with CONTEXT_LIMIT; one that the executor
        cannot hold fails.

        Raises:
            InvalidConfig, IncompatibleExecutor: As the constructor; nothing was changed then.
        """
        limits = Limits.of(config, geometry)
        self._cell.options.check_limits(limits.max_total_tokens, limits.max_model_len)
        self.expire(now)
        self._replica.start_over(limits)
        for request in list(self._cell.queue):
            request.terms.shorten(limits.max_model_len)
            try:
                check_still_fits(limits, request)
            except TandemError as error:
                fail(self._cell, request, error)

    def fail_all(self, error: TandemError, now: float) -> None:
        """Fail every request with this error, except those that have reached their deadline."""
        self.expire(now)
        for request in list(self._cell.requests):
            fail(self._cell, request, error)

    def has_pending_work(self) -> bool:
        """
        Return True while a request is in the system, a slot is to be released or a result is to
        come.
        """
        return bool(
            len(self._cell.requests) or self._replica.slots.ended or self._replica.in_flight
        )

    def slot_columns(self) -> dict[str, list[Any]]:
        """Return the contents of each live slot as sent, for comparison with the executor's."""
        return slot_columns(self._replica)

    def stats(self) -> Stats:
        """Return a snapshot of the statistics, without those of the service around the core."""
        return core_stats(self._replica)

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return copies of the core's histograms, by their names in the metrics."""
        return core_histograms(self._replica)

    def check_integrity(self) -> None:
        """
        Check every invariant of the state.

        Raises:
            InternalError: The first one that does not hold.
        """
        integrity.check_integrity(self._replica)
