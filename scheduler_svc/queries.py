"""Questions about the whole service, asked by operators through a frontend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from scheduler_svc.config import LoadedSettings
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.stats import CoreStats
from scheduler_svc.executor_session import ExecutorSession
from scheduler_svc.ipc.messages import Query, Reply
from scheduler_svc.ipc.snapshot import (
    AbortResult,
    DrainResult,
    EventList,
    FlushResult,
    MetricsSnapshot,
    RequestList,
    Stats,
    decode_abort_argument,
    decode_drain_argument,
    decode_events_argument,
    decode_list_argument,
    encode_json,
)
from scheduler_svc.metrics import CoreMetrics
from scheduler_svc.publisher import Publisher, refusal
from scheduler_svc.request_views import event_list, request_list
from scheduler_svc.service_state import ServiceState
from tandem.errors import EventsNotTracked, InternalError, RequestNotFound, TandemError

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _WaitingDrain:
    frontend: int
    query_id: int
    until_s: float


class Queries:
    """Answers; see `ipc.snapshot` for kinds, arguments and results. Owned by the core thread."""

    def __init__(
        self,
        loaded: LoadedSettings,
        state: ServiceState,
        session: ExecutorSession,
        metrics: CoreMetrics,
        publisher: Publisher,
    ) -> None:
        self._loaded = loaded
        self._state = state
        self._session = session
        self._metrics = metrics
        self._publisher = publisher
        self._drains: list[_WaitingDrain] = []
        self._answers: dict[str, Callable[[bytes, float], msgspec.Struct]] = {
            "stats": lambda _, now: self._stats(self._core_stats(), now),
            "metrics": lambda _, now: self._metrics_snapshot(now),
            "config": lambda _argument, _now: self._loaded.in_force(self._state.limits),
            "abort": self._abort,
            "requests": self._requests,
            "events": self._events,
            "flush": self._flush,
        }

    @property
    def next_answer_s(self) -> float | None:
        """When a question that waits must be answered at the latest."""
        return min((drain.until_s for drain in self._drains), default=None)

    def answer(self, frontend: int, query: Query, now: float) -> Reply | None:
        """Answer at once; None when the answer comes from `settle`."""
        try:
            result = self._result(frontend, query, now)
        except TandemError as error:
            return Reply(query_id=query.query_id, result=b"", error=refusal(0, error))
        except msgspec.DecodeError as error:
            wrong = InternalError(f"argument of query {query.kind!r}: {error}")
            return Reply(query_id=query.query_id, result=b"", error=refusal(0, wrong))
        if result is None:
            return None
        return Reply(query_id=query.query_id, result=encode_json(result), error=None)

    def settle(self, now: float) -> None:
        """Answer every drain that is done or has waited long enough."""
        remaining = self._state.num_requests
        due = [drain for drain in self._drains if remaining == 0 or drain.until_s <= now]
        for drain in due:
            self._drains.remove(drain)
            result = encode_json(DrainResult(remaining_requests=remaining))
            self._publisher.answer(
                drain.frontend, Reply(query_id=drain.query_id, result=result, error=None)
            )

    def _result(self, frontend: int, query: Query, now: float) -> msgspec.Struct | None:
        if query.kind == "drain":
            self._drain(frontend, query, now)
            return None
        answer = self._answers.get(query.kind)
        if answer is None:
            raise InternalError(f"unknown query {query.kind!r}")
        return answer(query.argument, now)

    def _drain(self, frontend: int, query: Query, now: float) -> None:
        until_s = now + decode_drain_argument(query.argument).grace_s
        self._drains.append(_WaitingDrain(frontend, query.query_id, until_s))
        if not self._state.draining:
            _log.info("draining", requests=self._state.num_requests, asked_by="operator")
        self._state.draining = True

    def _abort(self, argument: bytes, now: float) -> AbortResult:
        request_id, core = decode_abort_argument(argument).request_id, self._state.core
        if core is None:
            raise RequestNotFound(
                f"no live request has the id {request_id!r}: nothing was accepted yet",
                field="request_id",
            )
        core.end_request(request_id, FinishReason.CANCELLED, now)
        _log.info("request_aborted", request_id=request_id)
        return AbortResult()

    def _requests(self, argument: bytes, now: float) -> RequestList:
        wanted, core = decode_list_argument(argument), self._state.core
        return request_list([] if core is None else core.list_requests(), wanted, now)

    def _events(self, argument: bytes, _now: float) -> EventList:
        request_id = decode_events_argument(argument).request_id
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
        return event_list(self._state.core.request_events(request_id))

    def _flush(self, _argument: bytes, _now: float) -> FlushResult:
        core = self._state.core
        freed = 0 if core is None else core.flush_prefix_cache()
        _log.info("prefix_cache_flushed", freed_blocks=freed)
        return FlushResult(freed_blocks=freed)

    def _core_stats(self) -> CoreStats | None:
        return None if self._state.core is None else self._state.core.stats()

    def _stats(self, core: CoreStats | None, now: float) -> Stats:
        refused = self._metrics.refused_by_reason.total()
        common = Stats(
            refused_requests=refused,
            executor_attached=self._session.is_attached,
            draining=self._state.draining,
            uptime_s=now - self._state.started_s,
            schedule_policy=self._loaded.settings.core_options().schedule_policy.value,
        )
        if core is None:
            return common
        return msgspec.structs.replace(
            common,
            running_requests=core.num_running,
            waiting_requests=core.num_waiting,
            used_blocks=core.used_blocks,
            free_blocks=core.free_blocks,
            total_blocks=core.total_blocks,
            block_size=core.block_size,
            accepted_requests=core.accepted_requests,
            finished_requests=core.finished_requests,
            failed_requests=core.failed_requests,
            prefill_tokens=core.prefill_tokens,
            output_tokens=core.output_tokens,
            preemptions=core.preemptions,
            steps=core.steps,
            steps_in_flight=core.steps_in_flight,
            cached_blocks=core.cached_blocks,
            token_usage=core.used_blocks / core.total_blocks,
            prefix_cache_lookup_tokens=core.prefix_lookup_tokens,
            prefix_cache_hit_tokens=core.prefix_hit_tokens,
            retractions=core.retractions,
            paused_requests=core.num_paused,
            swapped_requests=core.num_swapped,
            host_blocks=core.host_blocks,
            used_host_blocks=core.used_host_blocks,
            queued_tokens=core.queued_tokens,
            new_token_ratio=core.new_token_ratio,
            refused_by_limit=core.refused_by_limit,
            schedule_s=self._metrics.schedule_s,
        )

    def _metrics_snapshot(self, now: float) -> MetricsSnapshot:
        core, metrics, model = self._core_stats(), self._metrics, self._state.model
        return MetricsSnapshot(
            stats=self._stats(core, now),
            ready=self._state.availability.ready,
            finished_by_reason=dict(metrics.finished_by_reason),
            failed_by_reason=dict(metrics.failed_by_reason),
            refused_by_reason=dict(metrics.refused_by_reason),
            histograms=metrics.histograms(core),
            prompt_tokens=metrics.prompt_tokens,
            cached_prompt_tokens=metrics.cached_prompt_tokens,
            executor_sessions=self._session.num_sessions,
            executor_reattachments=self._session.num_reattachments,
            merged_updates=self._publisher.num_merged,
            integrity_failures=metrics.integrity_failures,
            device_memory_bytes=metrics.device_memory_bytes,
            model_name="" if model is None else model.name,
            model_fingerprint="" if model is None else model.revision,
        )
