"""Handling of frontends' messages: submit requests, end them, and pass queries on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import structlog

from scheduler_svc.core.admission import Acceptance
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.tenant import DEFAULT_TENANT_LIMITS
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.ipc.messages import Accepted, EndStream, FrontendMessage, Hello, Query, Submit
from scheduler_svc.service.observe.metrics import CoreMetrics
from scheduler_svc.service.operate.queries import Queries
from scheduler_svc.service.publisher import Publisher, frontend_of, handle_of, refusal
from scheduler_svc.service.service_state import ServiceState
from tandem.errors import (
    Draining,
    ExecutorLost,
    InternalError,
    ModelChanged,
    NoExecutor,
    TandemError,
)
from tandem.link.codec.sampling_codec import what_link_refuses

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Intake:
    """
    Handler of all messages of frontends. Owned by the core loop.

    Attributes:
        num_accepted: Number of requests accepted since the start.
    """

    def __init__(
        self,
        state: ServiceState,
        *,
        publisher: Publisher,
        metrics: CoreMetrics,
        queries: Queries,
    ) -> None:
        """
        Args:
            state: State of the service.
            publisher: Takes the answers.
            metrics: Counts refusals.
            queries: Answers queries.
        """
        self._state = state
        self._publisher = publisher
        self._metrics = metrics
        self._queries = queries
        self.num_accepted = 0

    def take(self, messages: Iterator[tuple[int, FrontendMessage]], now: float) -> Hello | None:
        """
        Handle messages that have already arrived, up to the first Hello, which is returned: call
        `end_frontend` and `welcome` for it, then this again for the messages that follow. A
        malformed message is logged and dropped, and no message after it is handled.
        """
        try:
            for frontend, message in messages:
                if isinstance(message, Hello):
                    return message
                self._handle(frontend, message, now)
                self._state.heard_s[frontend] = now
        except msgspec.DecodeError as error:
            _log.error("frontend_message_malformed", error=str(error))
        return None

    def welcome(self, hello: Hello, now: float) -> None:
        """Take a frontend's requests from now on; `end_frontend` must have ended older ones."""
        frontend = hello.frontend_index
        self._state.handles[frontend] = set()
        self._state.heard_s[frontend] = now
        self._publisher.open(frontend)
        if self._state.model is not None:
            self._publisher.answer(frontend, self._state.model)
        self._publisher.answer(frontend, self._state.availability)
        _log.info("frontend_connected", frontend=frontend, pid=hello.pid)

    def end_frontend(self, frontend: int, now: float) -> None:
        """
        End every request of a frontend that is gone; no client is left that must be told.

        The core's events must be published before a frontend of this index is welcome, as it must
        not take these ends for its own requests.
        """
        self._publisher.close(frontend)
        is_known = self._state.heard_s.pop(frontend, None) is not None
        handles = self._state.handles.pop(frontend, set())
        if is_known:
            self._state.activity.note_frontend_gone(frontend, now)
        if handles:
            _log.warning("frontend_gone", frontend=frontend, requests_ended=len(handles))
        self._end(handles, now)

    def _end(
        self, handles: Iterable[int], now: float, reason: FinishReason = FinishReason.CANCELLED
    ) -> None:
        core = self._state.core
        if core is None:
            return
        for handle in handles:
            if core.find(handle) is not None:
                core.end_handle(handle, reason, now)

    def _handle(self, frontend: int, message: Submit | EndStream | Query, now: float) -> None:
        if frontend not in self._state.handles:
            _log.error("frontend_message_before_hello", frontend=frontend)
        elif isinstance(message, Submit):
            self._submit(frontend, message, now)
        elif isinstance(message, EndStream):
            self._end_stream(frontend, message, now)
        else:
            self._query(frontend, message, now)

    def _submit(self, frontend: int, message: Submit, now: float) -> None:
        handle = handle_of(frontend, message.stream_id)
        try:
            core = self._core_for(message)
            acceptance = self._take(message, handle, core, now)
        except TandemError as error:
            self._metrics.refused_by_reason[error.reason] += 1
            if isinstance(error, NoExecutor | ExecutorLost):
                self._state.unserved_s = now
            _log.info(
                "request_refused",
                **message.log_ids,
                reason=error.reason,
                message=error.message,
                **error.metadata,
            )
            self._publisher.answer(frontend, refusal(message.stream_id, error))
            return
        self.num_accepted += 1
        accepted = Accepted(
            message.stream_id, acceptance.num_truncated_tokens, acceptance.max_tokens
        )
        self._publisher.answer(frontend, accepted)
        _log.debug("request_accepted", **message.log_ids, frontend=frontend)

    def _take(self, message: Submit, handle: int, core: Scheduler, now: float) -> Acceptance:
        """Submit a request to the core, after ending the one that it repeats."""
        _check_sendable(message)
        new = _new_request(message, handle, core.block_size)
        if message.attempt_key:
            repeated = self._state.keys.find(message, lambda one: core.find(one) is not None)
            if repeated:
                _log.info("request_repeated", **message.log_ids)
            self._end(repeated, now, FinishReason.SUPERSEDED)
        handles = [handle + choice for choice in new.live_choices]
        if not handles:  # No choice is live: only the frontend has output left to send.
            return Acceptance(num_truncated_tokens=0, max_tokens=message.max_tokens)
        acceptance = core.submit(new, now)
        self._state.keys.claim(message, handles)
        self._state.handles[frontend_of(handle)].update(handles)
        self._state.traced.note_accepted(handles, message)
        return acceptance

    def _core_for(self, message: Submit) -> Scheduler:
        state = self._state
        if state.draining:
            raise Draining("this scheduler is draining: send the request to another replica")
        if state.core is None:
            why = state.availability.refusal or "try again in a moment"
            raise NoExecutor(f"no executor has been attached yet: {why}")
        if state.executor_given_up:
            why = state.availability.refusal or "try again later"
            raise ExecutorLost(f"the executor is lost and has not come back: {why}")
        if state.model is not None and message.model_revision not in ("", state.model.revision):
            raise ModelChanged("the model was replaced while this request arrived: send it again")
        return state.core

    def _end_stream(self, frontend: int, message: EndStream, now: float) -> None:
        core, handle = self._state.core, handle_of(frontend, message.stream_id)
        if core is None or core.find(handle) is None:
            return  # Its end is already on the way to the frontend.
        try:
            reason = FinishReason(message.reason)
        except ValueError:
            _log.error("frontend_message_malformed", error=f"finish reason {message.reason}")
            reason = FinishReason.CANCELLED
        ended = core.end_handle(handle, reason, now, message.num_output_tokens)
        _log.debug("request_ended_by_frontend", **ended.log_ids, reason=reason.name)

    def _query(self, frontend: int, message: Query, now: float) -> None:
        reply = self._queries.answer(frontend, message, now)
        if reply is not None:
            self._publisher.answer(frontend, reply)


def _check_sendable(message: Submit) -> None:
    """
    Check that the executor will take the request's row; that it would not is a bug of ours, which
    must cost this request alone.

    Raises:
        InternalError: It would not.
    """
    problem = what_link_refuses(message.sampling)
    if problem is not None:
        _log.error("request_not_sendable", **message.log_ids, problem=problem)
        raise InternalError(
            f"the scheduler made a row that no executor takes ({problem}), which is a bug: report "
            "it with the request's parameters"
        )


def _new_request(message: Submit, handle: int, block_size: int) -> NewRequest:
    if len(message.prompt) % 4:
        raise InternalError(f"request {message.request_id}: the prompt is not whole int32 tokens")
    return NewRequest(
        request_id=message.request_id,
        handle=handle,
        prompt=np.frombuffer(message.prompt, "<i4"),
        sampling=message.sampling,
        max_tokens=message.max_tokens,
        arrival_s=message.arrival_s,
        eos_token_ids=frozenset(message.eos_token_ids),
        stop_token_ids=frozenset(message.stop_token_ids),
        deadline_s=message.deadline_s,
        fills_context=message.fills_context,
        num_choices=message.num_choices,
        priority=message.priority,
        tenant=message.tenant,
        tenant_limits=message.tenant_limits or DEFAULT_TENANT_LIMITS,
        queue_limit_s=message.queue_limit_s,
        give_up_s=message.give_up_s,
        cache_salt=message.cache_salt,
        # The core hashes the blocks itself if the block size changed with another executor.
        block_digests=message.block_digests if message.digest_block_size == block_size else b"",
        prior_outputs=tuple(np.frombuffer(prior, "<i4") for prior in message.prior_outputs),
        finished_choices=frozenset(message.finished_choices),
        trace_id=message.trace_id,
    )
