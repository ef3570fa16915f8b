"""
Output processing: applies a step's result (tokens, ends, row errors, computed tokens).

`result_check` holds a result against the batch that it answers, `row_errors` decides on each row
error.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.faults.trials import note_progress
from scheduler_svc.core.observe.request_events import EventRecorder
from scheduler_svc.core.output.logprobs import note_logprobs
from scheduler_svc.core.output.prompt_logprobs import finish_if_scored, note_prompt_logprobs
from scheduler_svc.core.output.result_check import check_result, is_as_planned, late_rows
from scheduler_svc.core.output.row_errors import fail_row
from scheduler_svc.core.request.request import Request, RequestState
from scheduler_svc.core.slots.planned_rows import PlannedRows, SlotColumn
from scheduler_svc.core.state.ends import finish_if_over
from scheduler_svc.core.state.replica import Replica
from tandem.errors import SessionLost
from tandem.link.batch import Int32Column
from tandem.link.results import StepResult

_TRUE = b"\x01"


def apply_result(replica: Replica, result: StepResult, now: float) -> None:
    """
    Apply the result of the oldest batch in flight.

    Raises:
        SessionLost: The result is not that of the batch; nothing was changed then.
    """
    if not replica.steps.in_flight:
        raise SessionLost(f"result of step {result.step_id} arrived with no step in flight")
    rows = replica.steps.in_flight[0]
    as_planned = is_as_planned(replica.slots, rows, result)
    late = None if as_planned else check_result(replica, rows, result)
    if result.prompt_logprobs is not None:
        note_prompt_logprobs(replica, result.prompt_logprobs)
    if late is None:
        if result.logprobs is not None:
            note_logprobs(replica, result, result.logprobs)
        _apply_as_planned(replica, rows, result, now)
    else:
        _apply_any(replica, rows, result, late, now)
    if replica.cell.suspects.has_marks:
        note_progress(replica, now)


def _apply_as_planned(replica: Replica, rows: PlannedRows, result: StepResult, now: float) -> None:
    replica.steps.note_result()
    count = rows.num_decodes
    if len(rows.slot) == count:
        _append_decodes(replica, rows, result.token, now)
        return
    slots = replica.slots
    slots.tokens.add_computed(rows.slot[count:], rows.num_tokens[count:])
    _note_prefills(replica, rows, now)
    _append_decodes(replica, rows, result.token[:count], now)
    if len(result.token) > count:
        _append_tokens(
            replica, result.slot[count:], result.position[count:], result.token[count:], now
        )


def _append_decodes(replica: Replica, rows: PlannedRows, token: Int32Column, now: float) -> None:
    """Count one computed token and append one sampled token for each decode; all of them run."""
    cell, telemetry, decodes = replica.cell, replica.cell.telemetry, rows.decodes
    if decodes is None:
        return
    slots, slot, position = replica.slots, decodes.slot, rows.sampling_end[: decodes.num_rows]
    gap_s = decodes.note_seen(now)
    if gap_s is None:
        telemetry.latencies.inter_token_s.observe(now - slots.tokens.last_token_s[slot])
    else:
        telemetry.latencies.inter_token_s.observe_equal(gap_s, len(token))
    slots.tokens.push_decodes(decodes, position, token, now)
    offset = position - decodes.prompt_len
    cell.events.add_tokens(decodes.handle, offset, token, decodes.version)
    telemetry.counters.compute.output_tokens += len(token)
    if telemetry.recorder is not None:
        _record_tokens(telemetry.recorder, replica, slot, token, now)
    ends = slots.admitted.end_ids.may_end(token)
    if rows.has_last_decode:
        ends |= position + 1 == slots.admitted.stop_len[slot]
    elif _TRUE not in ends.tobytes():  # far faster than to ask numpy
        return
    _finish_those_over(replica, slot, token, ends, now)


def _apply_any(
    replica: Replica, rows: PlannedRows, result: StepResult, late: NDArray[np.intp], now: float
) -> None:
    replica.steps.note_result()
    for error in result.row_errors:
        fail_row(replica, error)
    if result.row_errors:  # These may also have stopped rows that shared KV with them.
        late = late_rows(replica, result)
    drained = _count_rows(replica, rows, now)
    if result.logprobs is not None:
        note_logprobs(replica, result, result.logprobs, late)
    if len(late):
        for row in late.tolist():
            _append_late_token(replica, result, row, now)
        result = _without(result, late)
    if len(result.slot):
        _append_tokens(replica, result.slot, result.position, result.token, now)
    for request in drained:
        applied = request.place.applied
        if request.state is RequestState.DRAINING and not finish_if_scored(
            replica, request, applied, now
        ):
            replica.wait_again(request)


def _without(result: StepResult, late: NDArray[np.intp]) -> StepResult:
    return replace(
        result,
        slot=np.delete(result.slot, late),
        generation=np.delete(result.generation, late),
        position=np.delete(result.position, late),
        token=np.delete(result.token, late),
        logprobs=None,
    )


def _count_rows(replica: Replica, rows: PlannedRows, now: float) -> list[Request]:
    """Count computed tokens; returns the draining requests that now have nothing in flight."""
    slots = replica.slots
    is_same = slots.generation[rows.slot] == rows.generation
    is_live = is_same & slots.live[rows.slot]
    slots.tokens.add_computed(rows.slot[is_live], rows.num_tokens[is_live])
    drained = []
    # A slot is live until its release is planned, even if its request drains already.
    for row in (~(is_same & slots.running[rows.slot])).nonzero()[0].tolist():
        request = replica.draining.get((int(rows.slot[row]), int(rows.generation[row])))
        if request is None:
            continue
        request.place.note_applied(int(rows.num_tokens[row]))
        if not request.place.num_in_flight:
            drained.append(request)
    _note_prefills(replica, rows, now)
    return drained


def _note_prefills(replica: Replica, rows: PlannedRows, now: float) -> None:
    """
    Count prompt tokens, add an event with the progress of each prompt in a batch, and finish the
    requests that only have their prompt scored.
    """
    cell = replica.cell
    slots = replica.slots
    for row in range(rows.num_decodes, len(rows.slot)):
        cell.telemetry.counters.compute.prefill_tokens += int(rows.num_tokens[row])
        slot = int(rows.slot[row])
        if slots.running[slot] and slots.generation[slot] == rows.generation[row]:
            done = int(min(slots.tokens.applied[slot], slots.admitted.prompt_len[slot]))
            handle = int(slots.admitted.handle[slot])
            cell.events.add_prefilled(handle, done)
            finish_if_scored(replica, slots.request_of(slot), done, now)


def _append_tokens(
    replica: Replica, slot: SlotColumn, position: Int32Column, token: Int32Column, now: float
) -> None:
    """Append one token to each of these running slots; columns of shape ``[S]``."""
    cell, telemetry = replica.cell, replica.cell.telemetry
    slots = replica.slots
    slot = slot.astype(np.intp)
    known = position + 1
    offset = position - slots.admitted.prompt_len[slot]
    slots.tokens.push(slot, position, token)
    _note_times(replica, slot, position, now)
    cell.events.add_tokens(slots.admitted.handle[slot], offset, token)
    telemetry.counters.compute.output_tokens += len(slot)
    if telemetry.recorder is not None:
        _record_tokens(telemetry.recorder, replica, slot, token, now)
    ends = slots.admitted.end_ids.may_end(token) | (known == slots.admitted.stop_len[slot])
    _finish_those_over(replica, slot, token, ends, now)


def _record_tokens(
    recorder: EventRecorder, replica: Replica, slot: SlotColumn, token: Int32Column, now: float
) -> None:
    requests = [replica.slots.request_of(int(s)) for s in slot]
    recorder.note_tokens(zip(requests, token.tolist(), strict=True), replica.kv.pool, now)


def _finish_those_over(
    replica: Replica, slot: SlotColumn, token: Int32Column, ends: NDArray[np.bool_], now: float
) -> None:
    """Finish requests that their latest token ends; `ends` marks the rows to check."""
    slots = replica.slots
    for row in ends.nonzero()[0].tolist():
        one = int(slot[row])
        num_outputs = slots.num_outputs(one)
        finish_if_over(replica.cell, slots.request_of(one), int(token[row]), num_outputs, now)


def _note_times(replica: Replica, slot: SlotColumn, position: Int32Column, now: float) -> None:
    slots, latencies = replica.slots, replica.cell.telemetry.latencies
    gaps = slots.tokens.note_seen(slot, now)
    first = position == slots.admitted.submitted_len[slot]
    if first.any():
        latencies.note_first_tokens([slots.request_of(int(s)) for s in slot[first]], now)
        gaps = gaps[~first]
    latencies.inter_token_s.observe(gaps)


def _append_late_token(replica: Replica, result: StepResult, row: int, now: float) -> None:
    """Append a token that was in flight when its request lost its slot, unless that has ended."""
    cell, telemetry = replica.cell, replica.cell.telemetry
    request = replica.draining.get((int(result.slot[row]), int(result.generation[row])))
    if request is None:
        return
    offset, token = len(request.outputs), int(result.token[row])
    request.append_output(token)
    if request.times.last_token_s is None:
        telemetry.latencies.note_first_tokens([request], now)
    else:
        telemetry.latencies.inter_token_s.observe(np.array([now - request.times.last_token_s]))
    request.times.note_token(now)
    cell.events.add_tokens(
        np.array([request.new.handle], np.int64),
        np.array([offset], np.int32),
        np.array([token], np.int32),
    )
    telemetry.counters.compute.output_tokens += 1
    if telemetry.recorder is not None:
        telemetry.recorder.note_tokens([(request, token)], replica.kv.pool, now)
    finish_if_over(cell, request, token, len(request.outputs), now)
