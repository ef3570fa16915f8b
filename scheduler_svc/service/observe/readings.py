"""Readings of the whole service: statistics, metrics, requests, events and executors."""

from __future__ import annotations

from dataclasses import fields

from scheduler_svc.config.settings import LoadedSettings
from scheduler_svc.ipc.activity import ActivitySnapshot, decode_activity_argument
from scheduler_svc.ipc.snapshot import (
    Demand,
    EventList,
    ExecutorInUse,
    ExecutorList,
    MetricsSnapshot,
    ProcessReport,
    Reported,
    RequestList,
    decode_events_argument,
    decode_list_argument,
    decode_report,
)
from scheduler_svc.process.process_report import process_report
from scheduler_svc.service.executors.members import Members
from scheduler_svc.service.observe.executor_rows import executor_rows
from scheduler_svc.service.observe.metrics import CoreMetrics
from scheduler_svc.service.observe.request_views import event_list, request_list
from scheduler_svc.service.publisher import Publisher
from scheduler_svc.service.service_state import ServiceState
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats
from tandem.errors import EventsNotTracked, NoExecutor, RequestNotFound


class Readings:
    """
    Readings of the service; see `ipc.snapshot` for their arguments and results. Nothing here
    changes what is served. Owned by the core loop.
    """

    def __init__(
        self,
        loaded: LoadedSettings,
        state: ServiceState,
        members: Members,
        metrics: CoreMetrics,
        publisher: Publisher,
    ) -> None:
        self._loaded = loaded
        self._state = state
        self._members = members
        self._metrics = metrics
        self._publisher = publisher
        self._reports: dict[str, ProcessReport] = {}
        """Newest report of each frontend, by its name."""

    def stats(self, now: float) -> Stats:
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

    def metrics(self, now: float) -> MetricsSnapshot:
        """Return all that the page of metrics is made of."""
        core, metrics, model = self._state.core, self._metrics, self._state.model
        limits = self._state.limits
        return MetricsSnapshot(
            stats=self.stats(now),
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
            executors=self.executors(now).executors,
            model_name="" if model is None else model.name,
            model_fingerprint="" if model is None else model.revision,
        )

    def demand(self, now: float) -> Demand:
        """Return the work there is for executors."""
        core, unserved_s = self._state.core, self._state.unserved_s
        stats = Stats() if core is None else core.stats()
        return Demand(
            waiting_requests=stats.waiting_requests,
            running_requests=stats.running_requests,
            queued_tokens=stats.queued_tokens,
            unserved_age_s=None if unserved_s is None else now - unserved_s,
        )

    def activity(self, argument: bytes, now: float) -> ActivitySnapshot:
        """Return the newest steps and faults, with the histograms."""
        core = self._state.core
        return self._state.activity.snapshot(
            self._metrics.histograms({} if core is None else core.histograms()),
            max_steps=decode_activity_argument(argument).max_steps,
            now=now,
        )

    def requests(self, argument: bytes, now: float) -> RequestList:
        """Return a page of the live requests."""
        wanted, core = decode_list_argument(argument), self._state.core
        return request_list([] if core is None else core.list_requests(), wanted, now)

    def events(self, argument: bytes, _now: float) -> EventList:
        """Return the events of a request."""
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

    def executor(self) -> ExecutorInUse:
        """Return an executor that is attached."""
        for member in self._members:
            if member.session.is_attached and member.description is not None:
                return ExecutorInUse(member.session.address, member.description.features)
        raise NoExecutor("no executor is attached that could be asked: try again later")

    def executors(self, now: float) -> ExecutorList:
        """Return a row for each executor that serves or is expected to."""
        grace_s = self._loaded.settings.ready_grace_s
        return ExecutorList(executor_rows(self._members, ready_grace_s=grace_s, now=now))

    def note_report(self, argument: bytes, _now: float) -> Reported:
        """Keep the report of a frontend, which the page of metrics shows."""
        report = decode_report(argument)
        self._reports[report.name] = report
        return Reported()
