"""What the result of a step changes: tokens, ends, errors and the counters of who computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.events import Progress, ProgressKind
from scheduler_svc.core.request import FinishReason, Request, RequestState
from scheduler_svc.core.state import CoreState, PlannedRows
from tandem.errors import InvalidLogits, InvalidParameter, SessionLost, TandemError
from tandem.link.batch import Int32Column, RowError, RowErrorKind, StepResult


def apply_result(state: CoreState, result: StepResult, now: float) -> None:
    """
    Apply the result of the oldest batch in flight.

    Raises:
        SessionLost: The result is not one of that batch; nothing changed then.
    """
    if not state.in_flight:
        raise SessionLost(f"result of step {result.step_id} arrived with no step in flight")
    rows = state.in_flight[0]
    late = _check(state, rows, result)
    state.in_flight.popleft()
    state.counters.steps += 1
    for error in result.row_errors:
        _fail_row(state, error)
    drained = _count_rows(state, rows)
    if len(late):
        for row in late.tolist():
            _append_late_token(state, result, row, now)
        result = _without(result, late)
    if len(result.slot):
        _append_tokens(state, result, now)
    for request in drained:
        if request.state is RequestState.DRAINING:
            state.wait_again(request)


def _check(state: CoreState, rows: PlannedRows, result: StepResult) -> NDArray[np.intp]:
    """
    Check that each row that was to sample has its one token at its place, or a row error.

    Returns:
        Rows of the result whose request no longer runs in that slot, shape ``[L]``.
    """
    slot, generation = rows.sampling_slot, rows.sampling_generation
    if result.row_errors:
        sampled = _without_errors(rows, result)
        slot, generation = slot[sampled], generation[sampled]
    lengths = {len(slot), len(result.slot), len(result.position), len(result.token)}
    if (
        len(lengths) > 1
        or (slot != result.slot).any()
        or not np.array_equal(generation, result.generation)
    ):
        message = (
            f"result of step {result.step_id} has tokens for slots {result.slot.tolist()}, "
            f"planned were {slot.tolist()}"
        )
        raise SessionLost(message)
    slots = state.slots
    expected = slots.known[slot]
    late: NDArray[np.intp] = np.flatnonzero(
        (slots.generation[slot] != generation) | ~slots.running[slot]
    )
    for row in late.tolist():
        request = state.draining.get((int(slot[row]), int(generation[row])))
        # Tokens of requests that ended are dropped, wherever they are.
        expected[row] = result.position[row] if request is None else request.num_known
    if (expected != result.position).any():
        row = np.flatnonzero(expected != result.position)[0]
        message = (
            f"result of step {result.step_id} has a token at position {result.position[row]} of "
            f"slot {slot[row]}, expected position {expected[row]}"
        )
        raise SessionLost(message)
    return late


def _without_errors(rows: PlannedRows, result: StepResult) -> NDArray[np.bool_]:
    """Which of the rows that were to sample have no row error."""
    failed = {(error.slot, error.generation) for error in result.row_errors}
    planned = zip(rows.slot.tolist(), rows.generation.tolist(), strict=True)
    if strangers := failed.difference(planned):
        message = f"result of step {result.step_id} has errors of rows not planned: {strangers}"
        raise SessionLost(message)
    keys = zip(rows.sampling_slot.tolist(), rows.sampling_generation.tolist(), strict=True)
    return np.array([key not in failed for key in keys], np.bool_)


def _without(result: StepResult, late: NDArray[np.intp]) -> StepResult:
    return replace(
        result,
        slot=np.delete(result.slot, late),
        generation=np.delete(result.generation, late),
        position=np.delete(result.position, late),
        token=np.delete(result.token, late),
    )


def _count_rows(state: CoreState, rows: PlannedRows) -> list[Request]:
    """Count what was computed; returns draining requests that now have nothing in flight."""
    slots = state.slots
    other = slots.generation[rows.slot] != rows.generation
    gone = (other | ~slots.live[rows.slot]).nonzero()[0]
    drained = []
    if not len(gone):
        slots.applied[rows.slot] += rows.num_tokens
    else:
        slots.applied[np.delete(rows.slot, gone)] += np.delete(rows.num_tokens, gone)
        for row in gone.tolist():
            request = state.draining.get((int(rows.slot[row]), int(rows.generation[row])))
            if request is None:
                continue
            request.applied += int(rows.num_tokens[row])
            if request.applied == request.planned:
                drained.append(request)
    for row in range(rows.num_decodes, len(rows.slot)):
        state.counters.prefill_tokens += int(rows.num_tokens[row])
        slot = int(rows.slot[row])
        if slots.running[slot] and slots.generation[slot] == rows.generation[row]:
            done = int(min(slots.applied[slot], slots.prompt_len[slot]))
            handle = int(slots.handle[slot])
            state.events.add(Progress(handle=handle, kind=ProgressKind.PREFILLED, value=done))
    return drained


def _append_tokens(state: CoreState, result: StepResult, now: float) -> None:
    """Append one token to each of these slots, all of which run."""
    slots, token = state.slots, result.token
    slot = result.slot.astype(np.intp)
    known = result.position + 1
    offset = result.position - slots.prompt_len[slot]
    slots.push_tokens(slot, token, known)
    _note_times(state, slot, offset, now)
    state.events.add_tokens(slots.handle[slot], offset, token)
    state.counters.output_tokens += len(slot)
    if state.recorder is not None:
        requests = [slots.request_of(int(s)) for s in slot]
        tokens = zip(requests, token.tolist(), strict=True)
        state.recorder.note_tokens(tokens, state.pool, now)
    ends = slots.end_ids.may_end(token) | (known == slots.stop_len[slot])
    for row in ends.nonzero()[0].tolist():
        _finish_if_over(state, slots.request_of(int(slot[row])), int(token[row]), now)


def _note_times(state: CoreState, slot: NDArray[np.intp], offset: Int32Column, now: float) -> None:
    slots = state.slots
    gaps = now - slots.last_token_s[slot]
    slots.last_token_s[slot] = now
    if not offset.all():
        first = offset == 0
        state.note_first_tokens([slots.request_of(int(s)) for s in slot[first]], now)
        gaps = gaps[~first]
    state.inter_token_s.observe(gaps)


def _append_late_token(state: CoreState, result: StepResult, row: int, now: float) -> None:
    """Keep a token that was in flight when its request lost its slot, unless that has ended."""
    request = state.draining.get((int(result.slot[row]), int(result.generation[row])))
    if request is None:
        return
    offset, token = len(request.outputs), int(result.token[row])
    request.outputs.append(token)
    if request.last_token_s is None:
        state.note_first_tokens([request], now)
    else:
        state.inter_token_s.observe(np.array([now - request.last_token_s]))
    request.last_token_s = now
    state.events.add_tokens(
        np.array([request.new.handle], np.int64),
        np.array([offset], np.int32),
        np.array([token], np.int32),
    )
    state.counters.output_tokens += 1
    if state.recorder is not None:
        state.recorder.note_tokens([(request, token)], state.pool, now)
    _finish_if_over(state, request, token, now)


def _finish_if_over(state: CoreState, request: Request, token: int, now: float) -> None:
    """End a request if its latest token ends it; EOS before stop ids before lengths."""
    slot = request.slot
    num_outputs = len(request.outputs) if slot is None else state.slots.num_outputs(slot)
    if token in request.new.eos_token_ids:
        state.finish(request, FinishReason.EOS, now, matched_token=token)
    elif token in request.new.stop_token_ids:
        state.finish(request, FinishReason.STOP_TOKEN, now, matched_token=token)
    elif request.prompt_len + num_outputs == request.stop_len:
        reason = FinishReason.CONTEXT_LIMIT if request.ends_by_context else FinishReason.MAX_TOKENS
        state.finish(request, reason, now)


def _fail_row(state: CoreState, error: RowError) -> None:
    slots = state.slots
    key = (error.slot, error.generation)
    request = state.draining.get(key)
    if request is None and slots.running[error.slot]:
        holder = slots.request_of(error.slot)
        request = holder if holder.slot_key == key else None
    if request is not None:
        state.fail(request, _row_error(request, error))


def _row_error(request: Request, error: RowError) -> TandemError:
    request_id = request.new.request_id
    if error.kind is RowErrorKind.TOKEN_OUT_OF_RANGE:
        message = (
            f"a token of request {request_id} is outside the model's vocabulary ({error.message}): "
            "tokenize with this model's tokenizer"
        )
        return InvalidParameter(message, field="prompt")
    message = (
        f"the model produced NaN or infinity for request {request_id} ({error.message}): try "
        "another prompt, and check the model's weights if others fail too"
    )
    return InvalidLogits(message)
