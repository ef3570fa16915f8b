"""Queries about the whole service, which operators send through a frontend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import msgspec
import structlog

from scheduler_svc.config.settings import LoadedSettings
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.tenant import NO_TENANT
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.ipc.activity import ActivitySnapshot, decode_activity_argument
from scheduler_svc.ipc.messages import Query, Reply
from scheduler_svc.ipc.snapshot import (
    SUSPEND_WAIT_S,
    AbortResult,
    Demand,
    DrainResult,
    EventList,
    ExecutorDrainResult,
    ExecutorInUse,
    ExecutorList,
    FlushResult,
    MetricsSnapshot,
    Noted,
    ProcessReport,
    Reported,
    RequestList,
    SuspendResult,
    decode_abort_argument,
    decode_drain_argument,
    decode_events_argument,
    decode_executor_argument,
    decode_list_argument,
    decode_report,
    decode_suspend_argument,
    encode_json,
)
from scheduler_svc.process.process_report import process_report
from scheduler_svc.service.drain import Drain
from scheduler_svc.service.executors.members import Members
from scheduler_svc.service.executors.operations import ExecutorOperations
from scheduler_svc.service.observe.executor_rows import executor_rows
from scheduler_svc.service.observe.metrics import CoreMetrics
from scheduler_svc.service.observe.request_views import event_list, request_list
from scheduler_svc.service.publisher import Publisher, refusal
from scheduler_svc.service.service_state import ServiceState
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats
from tandem.errors import (
    EventsNotTracked,
    ExecutorLost,
    InternalError,
    InvalidParameter,
    NoExecutor,
    RequestNotFound,
    TandemError,
)
from tandem.link.commands import KvMode

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Waiting:
    """
    Query that cannot be answered at once.

    `result` returns the answer. It is called once `is_done` returns True, or at `until_s`.
    """

    frontend: int
    query_id: int
    until_s: float
    is_done: Callable[[], bool]
    result: Callable[[], msgspec.Struct]


DRAINED_WITHIN_S = 5.0
"""Longest time after its grace in which an executor is given back; the next turn does it."""


class Queries:
    """
    Answers to queries; see `ipc.snapshot` for their kinds, arguments and results. Owned by the core
    loop.
    """

    def __init__(
        self,
        loaded: LoadedSettings,
        state: ServiceState,
        members: Members,
        *,
        metrics: CoreMetrics,
        publisher: Publisher,
        drain: Drain,
        operations: ExecutorOperations,
    ) -> None:
        self._loaded = loaded
        self._state = state
        self._members = members
        self._metrics = metrics
        self._publisher = publisher
        self._drain = drain
        self._operations = operations
        self._waiting: list[_Waiting] = []
        self._reports: dict[str, ProcessReport] = {}
        """Newest report of each frontend, by its name."""
        self._answers: dict[str, Callable[[bytes, float], msgspec.Struct | Stats]] = {
            "stats": lambda _, now: self._stats(now),
            "metrics": lambda _, now: self._metrics_snapshot(now),
            "demand": lambda _, now: self._demand(now),
            "unserved": self._note_unserved,
            "activity": self._activity_snapshot,
            "config": lambda _argument, _now: self._loaded.in_force(self._state.limits),
            "abort": self._abort,
            "requests": self._requests,
            "events": self._events,
            "flush": self._flush,
            "executor": lambda _argument, _now: self._executor(),
            "executors": lambda _, now: self._executors(now),
            "report": self._report,
            "add_executor": self._add_executor,
            "remove_executor": self._remove_executor,
        }
        self._deferred: dict[str, Callable[[int, Query, float], _Waiting]] = {
            "drain": self._begin_drain,
            "drain_executor": self._drain_executor,
            "suspend": self._suspend,
            "resume": self._resume,
        }

    @property
    def next_answer_s(self) -> float | None:
        """Earliest time by which a waiting query must be answered; None without any."""
        return min((one.until_s for one in self._waiting), default=None)

    def answer(self, frontend: int, query: Query, now: float) -> Reply | None:
        """Return the answer, or None when `settle` will answer."""
        try:
            if query.kind in self._deferred:
                self._waiting.append(self._deferred[query.kind](frontend, query, now))
                return None
            answer = self._answers.get(query.kind)
            if answer is None:
                raise InternalError(f"unknown query {query.kind!r}")
            return _reply(query.query_id, answer(query.argument, now))
        except TandemError as error:
            return Reply(query_id=query.query_id, result=b"", error=refusal(0, error))
        except msgspec.DecodeError as error:
            wrong = InternalError(f"argument of query {query.kind!r}: {error}")
            return Reply(query_id=query.query_id, result=b"", error=refusal(0, wrong))

    def settle(self, now: float) -> None:
        """Answer every waiting query that is done or out of time."""
        due = [one for one in self._waiting if one.is_done() or one.until_s <= now]
        for one in due:
            self._waiting.remove(one)
            try:
                reply = _reply(one.query_id, one.result())
            except TandemError as error:
                reply = Reply(query_id=one.query_id, result=b"", error=refusal(0, error))
            self._publisher.answer(one.frontend, reply)

    def _begin_drain(self, frontend: int, query: Query, now: float) -> _Waiting:
        grace_s = decode_drain_argument(query.argument).grace_s
        num_before = self._drain.num_handed_over
        self._drain.begin(grace_s, now, asked_by="operator")
        return _Waiting(
            frontend=frontend,
            query_id=query.query_id,
            until_s=now + grace_s,
            is_done=lambda: self._drain.is_over,
            result=lambda: DrainResult(remaining_requests=self._num_left(num_before)),
        )

    def _num_left(self, num_handed_over_before: int) -> int:
        """
        Return the number of choices that were handed over since the query; those still live, if a
        later drain has lengthened the grace time.
        """
        if self._drain.is_over:
            return self._drain.num_handed_over - num_handed_over_before
        return self._state.num_requests

    def _suspend(self, frontend: int, query: Query, now: float) -> _Waiting:
        mode, core = KvMode(decode_suspend_argument(query.argument).kv_mode), self._state.core
        members = self._members
        if core is None or not members.is_attached:
            raise NoExecutor("no executor is attached that could be suspended: try again later")
        if not members.is_suspended:
            _log.info("suspending", kv_mode=mode.name, requests=core.num_requests)
        members.suspension = mode
        for member in members:
            if member.port is not None:
                member.port.suspend(mode, now)
        return self._obeyed(frontend, query, now)

    def _resume(self, frontend: int, query: Query, now: float) -> _Waiting:
        members = self._members
        if members.is_suspended:
            _log.info("resuming", requests=self._state.num_requests)
        members.suspension = None
        for member in members:
            if member.port is not None:
                member.port.resume()
        return self._obeyed(frontend, query, now)

    def _obeyed(self, frontend: int, query: Query, now: float) -> _Waiting:
        return _Waiting(
            frontend=frontend,
            query_id=query.query_id,
            until_s=now + SUSPEND_WAIT_S,
            is_done=lambda: self._members.has_obeyed,
            result=self._suspend_result,
        )

    def _suspend_result(self) -> SuspendResult:
        if not self._members.has_obeyed:
            raise ExecutorLost(
                f"the executor has not answered for {SUSPEND_WAIT_S:g} s; what was asked for stays "
                "asked for"
            )
        return SuspendResult(self._members.device_memory_bytes)

    def _abort(self, argument: bytes, now: float) -> AbortResult:
        wanted, core = decode_abort_argument(argument), self._state.core
        request_id = wanted.request_id
        if core is None:
            raise RequestNotFound(
                f"no live request has the id {request_id!r}: nothing was accepted yet",
                field="request_id",
            )
        tenant = _tenant_of(request_id, core) if wanted.tenant is None else wanted.tenant
        ids = core.end_request(request_id, FinishReason.CANCELLED, now, tenant=tenant)
        _log.info("request_aborted", **ids, tenant=tenant)
        return AbortResult()

    def _requests(self, argument: bytes, now: float) -> RequestList:
        wanted, core = decode_list_argument(argument), self._state.core
        return request_list([] if core is None else core.list_requests(), wanted, now)

    def _events(self, argument: bytes, _now: float) -> EventList:
        wanted = decode_events_argument(argument)
        request_id = wanted.request_id
        if not self._loaded.settings.core_options().tracks_events:
            raise EventsNotTracked(
                "events of requests are not kept: start the scheduler with --track-request-events"
            )
        if self._state.core is None:
            raise RequestNotFound(
                f"no events of a request with the id {request_id!r} are kept: nothing was accepted "
                "yet",
                field="request_id",
            )
        return event_list(self._state.core.request_events(request_id, wanted.tenant))

    def _flush(self, _argument: bytes, _now: float) -> FlushResult:
        core = self._state.core
        freed = 0 if core is None else core.flush_prefix_cache()
        _log.info("prefix_cache_flushed", freed_blocks=freed)
        return FlushResult(freed_blocks=freed)

    def _report(self, argument: bytes, _now: float) -> Reported:
        report = decode_report(argument)
        self._reports[report.name] = report
        return Reported()

    def _executor(self) -> ExecutorInUse:
        for member in self._members:
            if member.session.is_attached and member.description is not None:
                return ExecutorInUse(member.session.address, member.description.features)
        raise NoExecutor("no executor is attached that could be asked: try again later")

    def _executors(self, now: float) -> ExecutorList:
        grace_s = self._loaded.settings.ready_grace_s
        return ExecutorList(executor_rows(self._members, ready_grace_s=grace_s, now=now))

    def _add_executor(self, argument: bytes, now: float) -> ExecutorList:
        self._operations.add(decode_executor_argument(argument).address, now)
        return self._executors(now)

    def _remove_executor(self, argument: bytes, now: float) -> ExecutorList:
        self._operations.remove(decode_executor_argument(argument).address, now)
        return self._executors(now)

    def _drain_executor(self, frontend: int, query: Query, now: float) -> _Waiting:
        wanted = decode_executor_argument(query.argument)
        member = self._operations.begin_drain(wanted.address, wanted.grace_s, now)
        return _Waiting(
            frontend=frontend,
            query_id=query.query_id,
            until_s=now + wanted.grace_s + DRAINED_WITHIN_S,
            is_done=lambda: member.is_drained,
            result=lambda: ExecutorDrainResult(member.num_moved),
        )

    def _demand(self, now: float) -> Demand:
        """Return the work there is for executors."""
        core, unserved_s = self._state.core, self._state.unserved_s
        stats = Stats() if core is None else core.stats()
        return Demand(
            waiting_requests=stats.waiting_requests,
            running_requests=stats.running_requests,
            queued_tokens=stats.queued_tokens,
            unserved_age_s=None if unserved_s is None else now - unserved_s,
        )

    def _note_unserved(self, _argument: bytes, now: float) -> Noted:
        self._state.unserved_s = now
        return Noted()

    def _stats(self, now: float) -> Stats:
        """Return the statistics of the core, if there is one yet, with those of the service."""
        core, model, counts = self._state.core, self._state.model, self._members.counts
        stats = Stats() if core is None else core.stats()
        stats.refused_requests = self._metrics.refused_by_reason.total()
        stats.executor_attached = self._members.is_attached
        stats.draining = self._state.draining
        stats.suspended = self._members.is_suspended
        stats.uptime_s = now - self._state.started_s
        stats.schedule_policy = self._loaded.settings.core_options().schedule_policy.value
        stats.schedule_s = self._metrics.sum_s("schedule_time")
        for counter in fields(counts):
            setattr(stats, counter.name, getattr(counts, counter.name))
        stats.executor_address = self._members.address
        stats.executor_refusal = self._members.refusal
        stats.graph_steps = self._metrics.graph_steps
        stats.executor_queued_s = self._metrics.sum_s("executor_queue_time")
        stats.executor_forward_s = self._metrics.sum_s("executor_forward_time")
        stats.executor_sample_s = self._metrics.sum_s("executor_sample_time")
        if model is not None:
            stats.model = model.name
            stats.dtype = model.dtype
            stats.max_model_len = model.max_model_len
        return stats

    def _activity_snapshot(self, argument: bytes, now: float) -> ActivitySnapshot:
        core = self._state.core
        return self._state.activity.snapshot(
            self._metrics.histograms({} if core is None else core.histograms()),
            max_steps=decode_activity_argument(argument).max_steps,
            now=now,
        )

    def _metrics_snapshot(self, now: float) -> MetricsSnapshot:
        core, metrics, model = self._state.core, self._metrics, self._state.model
        limits = self._state.limits
        return MetricsSnapshot(
            stats=self._stats(now),
            ready=self._state.availability.ready,
            progressing=self._state.availability.progressing,
            frontends_alive=self._state.frontends_alive,
            processes=(process_report("core"), *self._reports.values()),
            max_num_seqs=0 if limits is None else limits.max_num_seqs,
            finished_by_reason=dict(metrics.finished_by_reason),
            failed_by_reason=dict(metrics.failed_by_reason),
            refused_by_reason=dict(metrics.refused_by_reason),
            histograms=metrics.histograms({} if core is None else core.histograms()),
            prompt_tokens=metrics.prompt_tokens,
            cached_prompt_tokens=metrics.cached_prompt_tokens,
            merged_updates=self._publisher.num_merged,
            integrity_failures=metrics.integrity_failures,
            device_memory_bytes=self._members.device_memory_bytes,
            executors=self._executors(now).executors,
            model_name="" if model is None else model.name,
            model_fingerprint="" if model is None else model.revision,
        )


def _reply(query_id: int, result: msgspec.Struct | Stats) -> Reply:
    return Reply(query_id=query_id, result=encode_json(result), error=None)


def _tenant_of(request_id: str, core: Scheduler) -> str:
    """
    Return the tenant of the live request with an id; no tenant if there is no such request.

    Raises:
        InvalidParameter: Several tenants have one.
    """
    tenants = {row.tenant for row in core.list_requests() if row.request_id == request_id}
    if len(tenants) > 1:
        raise InvalidParameter(
            f"{len(tenants)} tenants have a live request with the id {request_id!r}: name one.",
            field="tenant",
        )
    return next(iter(tenants), NO_TENANT)
