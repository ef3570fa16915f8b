"""What the result of a step changes: tokens, ends, errors and the counters of who computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.events import Progress, ProgressKind
from scheduler_svc.core.request import FinishReason, Request, RequestState
from scheduler_svc.core.state import CoreState, PlannedRows
from tandem.errors import InvalidLogits, InvalidParameter, SessionLost, TandemError
from tandem.link.batch import (
    ROW_SAMPLES,
    Int32Column,
    RowError,
    RowErrorKind,
    StepResult,
    UInt32Column,
)


def apply_result(state: CoreState, result: StepResult, now: float) -> None:
    """
    Apply the result of the oldest batch in flight.

    Raises:
        SessionLost: The result is not one of that batch; nothing changed then.
    """
    if not state.in_flight:
        raise SessionLost(f"result of step {result.step_id} arrived with no step in flight")
    rows = state.in_flight[0]
    _check(state, rows, result)
    state.in_flight.popleft()
    state.counters.steps += 1
    state.counters.prefill_tokens += int(rows.num_tokens[rows.num_decodes :].sum())
    for error in result.row_errors:
        _fail_row(state, error)
    drained = _count_rows(state, rows)
    _append_tokens(state, result, now)
    for request in drained:
        if request.state is RequestState.DRAINING:
            state.wait_again(request)


def _check(state: CoreState, rows: PlannedRows, result: StepResult) -> None:
    """Each row that was to sample has its one token at its place, or a row error."""
    samples = rows.flags == ROW_SAMPLES
    if result.row_errors:
        failed = {(error.slot, error.generation) for error in result.row_errors}
        keys = list(zip(rows.slot.tolist(), rows.generation.tolist(), strict=True))
        if strangers := failed.difference(keys):
            raise SessionLost(
                f"result of step {result.step_id} has errors of rows not planned: {strangers}"
            )
        samples &= np.array([key not in failed for key in keys], np.bool_)
    slot, generation = rows.slot[samples], rows.generation[samples]
    lengths = {len(slot), len(result.slot), len(result.position), len(result.token)}
    same = len(lengths) == 1 and np.array_equal(slot, result.slot)
    if not same or not np.array_equal(generation, result.generation):
        message = (
            f"result of step {result.step_id} has tokens for slots {result.slot.tolist()}, "
            f"planned were {slot.tolist()}"
        )
        raise SessionLost(message)
    expected = state.slots.known[slot]
    current = _current(state, slot, generation)
    if not current.all():
        for row in np.flatnonzero(~current):
            request = state.draining.get((int(slot[row]), int(generation[row])))
            # Tokens of requests that ended are dropped, wherever they are.
            expected[row] = result.position[row] if request is None else request.num_known
    wrong = np.flatnonzero(expected != result.position)
    if len(wrong):
        row = wrong[0]
        message = (
            f"result of step {result.step_id} has a token at position {result.position[row]} of "
            f"slot {slot[row]}, expected position {expected[row]}"
        )
        raise SessionLost(message)


def _current(state: CoreState, slot: Int32Column, generation: UInt32Column) -> NDArray[np.bool_]:
    """Which of these rows belong to who runs in the slot now."""
    slots = state.slots
    same: NDArray[np.bool_] = slots.running[slot] & (slots.generation[slot] == generation)
    return same


def _count_rows(state: CoreState, rows: PlannedRows) -> list[Request]:
    """Count what was computed; returns the draining requests that now have nothing in flight."""
    slots = state.slots
    current = slots.live[rows.slot] & (slots.generation[rows.slot] == rows.generation)
    drained = []
    if current.all():
        slots.applied[rows.slot] += rows.num_tokens
    else:
        slots.applied[rows.slot[current]] += rows.num_tokens[current]
        for row in np.flatnonzero(~current):
            request = state.draining.get((int(rows.slot[row]), int(rows.generation[row])))
            if request is None:
                continue
            request.applied += int(rows.num_tokens[row])
            if request.applied == request.planned:
                drained.append(request)
    for row in range(rows.num_decodes, len(rows.slot)):
        slot = int(rows.slot[row])
        if current[row] and slots.running[slot]:
            done = int(min(slots.applied[slot], slots.prompt_len[slot]))
            handle = int(slots.handle[slot])
            state.events.add(Progress(handle=handle, kind=ProgressKind.PREFILLED, value=done))
    return drained


def _append_tokens(state: CoreState, result: StepResult, now: float) -> None:
    slots, slot, token = state.slots, result.slot, result.token
    if not len(slot):
        return
    current = _current(state, slot, result.generation)
    if not current.all():
        for row in np.flatnonzero(~current):
            key = (int(slot[row]), int(result.generation[row]))
            request = state.draining.get(key)
            if request is not None:
                _append_late_token(state, request, int(token[row]), now)
        slot, token = slot[current], token[current]
    slots.push_tokens(slot, token)
    offset = slots.known[slot] - slots.prompt_len[slot] - 1
    _note_times(state, slot, offset, now)
    state.events.add_tokens(slots.handle[slot], offset, token)
    state.counters.output_tokens += len(slot)
    ends = (slots.end_ids[slot] == token[:, None]).any(axis=1)
    ends |= slots.known[slot] == slots.stop_len[slot]
    ends |= slots.has_more_ends[slot]
    for row in np.flatnonzero(ends):
        _finish_if_over(state, slots.request_of(int(slot[row])), int(token[row]), now)


def _note_times(state: CoreState, slot: Int32Column, offset: Int32Column, now: float) -> None:
    slots = state.slots
    gaps = now - slots.last_token_s[slot]
    slots.last_token_s[slot] = now
    first = offset == 0
    if first.any():
        state.note_first_tokens([slots.request_of(int(s)) for s in slot[first]], now)
        gaps = gaps[~first]
    if len(gaps):
        state.inter_token_s.observe(gaps)


def _append_late_token(state: CoreState, request: Request, token: int, now: float) -> None:
    """Keep a token that was in flight when its request lost its slot."""
    offset = len(request.outputs)
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
