"""
Live requests whose spans are recorded, and the steps that compute them, whose spans link to these.

The process of the core makes no span, and loads no OpenTelemetry: it tells a step to one of the
frontends whose requests it computed, which makes the span. While no traced request has begun to
run, a step costs one test of an empty set; while some have, and the bound on spans allows one, also
a search of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.request.events import Progress, ProgressKind
from scheduler_svc.core.slots.step_rows import StepRows
from scheduler_svc.ipc.messages import StepSpan, Submit
from scheduler_svc.service.executors.member import Member
from scheduler_svc.service.publisher import frontend_of
from tandem.link.results import StepResult

MAX_LINKS = 128
"""
Most requests that the span of one step names, which is also what OpenTelemetry's SDK keeps of them
by default.
"""

_SpanIds: TypeAlias = tuple[str, str]
"""Trace id and span id of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """
    A step that is told to a frontend.

    Attributes:
        frontend: Index of that frontend, which has the first of the traced requests.
        rows: All that the step computes.
        links: Spans of the traced requests in it, at most `MAX_LINKS`.
        num_left_out: Traced requests that have no link.
        num_skipped: Steps since the one before that was told, which the bound left without a span,
            whether they computed a traced request or not.
    """

    frontend: int
    rows: StepRows
    links: tuple[_SpanIds, ...]
    num_left_out: int
    num_skipped: int

    def message(
        self, member: Member, result: StepResult, *, sent_s: float, applied_s: float
    ) -> StepSpan:
        """Return the message for the frontend, once the result was applied."""
        rows, timings = self.rows, result.timings
        return StepSpan(
            step_id=result.step_id,
            session_epoch=member.session.epoch,
            boot_id=result.boot_id,
            executor=member.address,
            sent_s=sent_s,
            applied_s=applied_s,
            num_prefills=rows.num_prefills,
            num_decodes=rows.num_decodes,
            prefill_tokens=rows.prefill_tokens,
            graph_tokens=result.graph,
            queued_ns=timings.queued_ns,
            forward_ns=timings.forward_ns,
            sample_ns=timings.sample_ns,
            compute_ns=timings.compute_ns,
            links=self.links,
            num_left_out=self.num_left_out,
            num_skipped=self.num_skipped,
        )


class TracedRequests:
    """Live requests whose spans are recorded, and how many steps may be told. Owned by the loop."""

    def __init__(self, per_s: int) -> None:
        """
        Args:
            per_s: Most steps told in a second, on average; as many may follow one another after a
                pause. 0 tells none.
        """
        self._per_s = per_s
        self._spans: dict[int, _SpanIds] = {}
        """Spans of live choices by handle; the choices of a request have one in common."""
        self._running: set[int] = set()
        """Those of them that have run."""
        self._num_left = float(per_s)
        self._counted_s = 0.0
        self._num_skipped = 0

    def note_accepted(self, handles: Iterable[int], submit: Submit) -> None:
        """Note the live choices of a request that was accepted, if its span is recorded."""
        if submit.span_id and self._per_s:
            self._spans.update(dict.fromkeys(handles, (submit.trace_id, submit.span_id)))

    def note_progress(self, progress: Iterable[Progress]) -> None:
        """Note which choices begin to run."""
        if len(self._running) == len(self._spans):
            return
        self._running.update(
            one.handle
            for one in progress
            if one.kind is ProgressKind.SCHEDULED and one.handle in self._spans
        )

    def forget(self, handle: int) -> None:
        """Forget a choice that ended."""
        if self._spans:
            self._spans.pop(handle, None)
            self._running.discard(handle)

    def find(self, port: ExecutorPort, now: float) -> TracedStep | None:
        """
        Find what is told of the oldest step in flight of an executor, before its result is applied;
        None where it has no traced request, or enough steps were told. `note_told` follows once it
        is told.
        """
        if not self._running:
            return None
        passed_s, self._counted_s = now - self._counted_s, now
        self._num_left = min(float(self._per_s), self._num_left + passed_s * self._per_s)
        if self._num_left < 1.0:
            self._num_skipped += 1
            return None
        rows = port.oldest_rows()
        if rows is None:
            return None
        handles = [one for one in rows.handles.tolist() if one in self._spans]
        if not handles:
            return None
        spans = dict.fromkeys(self._spans[one] for one in handles)
        return TracedStep(
            frontend=frontend_of(handles[0]),
            rows=rows,
            links=tuple(islice(spans, MAX_LINKS)),
            num_left_out=max(len(spans) - MAX_LINKS, 0),
            num_skipped=self._num_skipped,
        )

    def note_told(self) -> None:
        """Count a step that was told."""
        self._num_skipped = 0
        self._num_left -= 1.0
