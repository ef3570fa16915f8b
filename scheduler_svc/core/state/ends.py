"""Ends of requests: finished with a reason, or failed with an error."""

from __future__ import annotations

from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.request.events import Ended, Failed
from scheduler_svc.core.request.request import FinishReason, Request, RequestState
from scheduler_svc.core.state.cell import Cell
from tandem.errors import TandemError


def finish(
    cell: Cell,
    request: Request,
    reason: FinishReason,
    now: float,
    *,
    matched_token: int | None = None,
    num_output_tokens: int | None = None,
) -> None:
    """
    End a request without an error, whatever its state; `num_output_tokens` counts its output up to
    an end that was found outside the core.
    """
    _leave(cell, request)
    got_on = reason not in {FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.SUPERSEDED}
    cell.suspects.note_left(request.number, got_on=got_on)
    cell.telemetry.counters.requests.finished_requests += 1
    cell.telemetry.note(EventKind.FINISH, request, now, reason.name)
    arrival_s, known = request.new.arrival_s, len(request.outputs)
    scheduled_s, first_s = request.times.scheduled_s, request.times.first_token_s
    cell.events.add(
        Ended(
            handle=request.new.handle,
            reason=reason,
            matched_token=matched_token,
            num_prompt_tokens=request.prompt_len,
            num_output_tokens=known if num_output_tokens is None else num_output_tokens,
            num_cached_tokens=request.prefix.num_cached_tokens,
            queue_s=(now if scheduled_s is None else scheduled_s) - arrival_s,
            first_token_s=None if first_s is None else first_s - arrival_s,
            total_s=now - arrival_s,
            num_preemptions=request.setbacks.num_preemptions,
        )
    )


def finish_if_over(cell: Cell, request: Request, token: int, num_outputs: int, now: float) -> None:
    """
    Finish a request if its latest token, the `num_outputs`-th, ends it: EOS first, then stop ids,
    then lengths.
    """
    if token in request.new.eos_token_ids:
        finish(cell, request, FinishReason.EOS, now, matched_token=token)
    elif token in request.new.stop_token_ids:
        finish(cell, request, FinishReason.STOP_TOKEN, now, matched_token=token)
    elif request.prompt_len + num_outputs == request.terms.stop_len:
        reason = (
            FinishReason.CONTEXT_LIMIT if request.ends_by_context() else FinishReason.MAX_TOKENS
        )
        finish(cell, request, reason, now)


def fail(cell: Cell, request: Request, error: TandemError) -> None:
    """End a request by an error, whatever its state."""
    _leave(cell, request)
    cell.suspects.note_left(request.number, got_on=False)
    cell.telemetry.counters.requests.failed_requests += 1
    cell.note(EventKind.FAIL, request, error.reason)
    cell.events.add(Failed(handle=request.new.handle, error=error))


def _leave(cell: Cell, request: Request) -> None:
    cell.release(request)
    request.move(RequestState.ENDED)
    cell.forget(request)
