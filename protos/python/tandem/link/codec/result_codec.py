"""Encoding of step results as `ExecutionResult` messages, and back."""

from __future__ import annotations

import numpy as np

from tandem.executor.v1 import result_pb2
from tandem.link.batch import Int32Column
from tandem.link.codec.fields import (
    FLOAT32,
    INT32,
    UINT32,
    check_length,
    known_kind,
    malformed,
    raw_column,
    read_column,
)
from tandem.link.logprobs import LogprobColumns, PromptLogprobColumns
from tandem.link.results import RowError, RowErrorKind, StepResult, StepTimings


def write_result(result: StepResult, message: result_pb2.ExecutionResult) -> None:
    """Fill in the message of a result, in place in the larger message."""
    message.SetInParent()
    message.boot_id = result.boot_id
    message.step_id = result.step_id
    message.slot = raw_column(result.slot, INT32)
    message.generation = raw_column(result.generation, UINT32)
    message.position = raw_column(result.position, INT32)
    message.token = raw_column(result.token, INT32)
    for error in result.row_errors:
        message.row_errors.add(
            slot=error.slot,
            generation=error.generation,
            kind=error.kind.value,
            message=error.message,
        )
    timings, sent = result.timings, message.timings
    sent.SetInParent()
    sent.queued_ns = timings.queued_ns
    sent.forward_ns = timings.forward_ns
    sent.sample_ns = timings.sample_ns
    sent.total_ns = timings.total_ns
    if result.graph:
        message.graph_num_tokens = result.graph
    message.device_memory_bytes = result.device_memory_bytes
    if result.margin is not None:
        message.margin = raw_column(result.margin, FLOAT32)
    if result.logprobs is not None:
        _write_logprobs(result.logprobs, message.logprobs)
    if result.prompt_logprobs is not None:
        _write_prompt_logprobs(result.prompt_logprobs, message.prompt_logprobs)


def read_result(message: result_pb2.ExecutionResult) -> StepResult:
    """Read a result, or raise `SessionLost` naming the malformed field."""
    slot = read_column(message.slot, INT32, "result.slot")
    generation = read_column(message.generation, UINT32, "result.generation")
    position = read_column(message.position, INT32, "result.position")
    token = read_column(message.token, INT32, "result.token")
    margin = read_column(message.margin, FLOAT32, "result.margin") if message.margin else None
    check_length(generation, len(slot), "result.generation")
    check_length(position, len(slot), "result.position")
    check_length(token, len(slot), "result.token")
    if margin is not None:
        check_length(margin, len(slot), "result.margin")
    timings = message.timings
    return StepResult(
        boot_id=message.boot_id,
        step_id=message.step_id,
        slot=slot,
        generation=generation,
        position=position,
        token=token,
        row_errors=_read_row_errors(message) if message.row_errors else (),
        timings=StepTimings(
            queued_ns=timings.queued_ns,
            forward_ns=timings.forward_ns,
            sample_ns=timings.sample_ns,
            total_ns=timings.total_ns,
        ),
        graph=message.graph_num_tokens,
        device_memory_bytes=message.device_memory_bytes,
        margin=margin,
        logprobs=_read_logprobs(message.logprobs, slot) if message.HasField("logprobs") else None,
        prompt_logprobs=(
            _read_prompt_logprobs(message.prompt_logprobs)
            if message.HasField("prompt_logprobs")
            else None
        ),
    )


def _read_row_errors(message: result_pb2.ExecutionResult) -> tuple[RowError, ...]:
    return tuple(
        RowError(
            slot=error.slot,
            generation=error.generation,
            kind=known_kind(RowErrorKind, error.kind, f"result.row_errors[{index}].kind"),
            message=error.message,
        )
        for index, error in enumerate(message.row_errors)
    )


def _write_logprobs(columns: LogprobColumns, message: result_pb2.LogprobColumns) -> None:
    message.SetInParent()
    message.row = raw_column(columns.row, INT32)
    message.chosen = raw_column(columns.chosen, FLOAT32)
    message.top_start = raw_column(columns.top_start, INT32)
    message.top_token = raw_column(columns.top_token, INT32)
    message.top = raw_column(columns.top, FLOAT32)


def _read_logprobs(message: result_pb2.LogprobColumns, slot: Int32Column) -> LogprobColumns:
    field = "result.logprobs"
    columns = LogprobColumns(
        row=read_column(message.row, INT32, f"{field}.row"),
        chosen=read_column(message.chosen, FLOAT32, f"{field}.chosen"),
        top_start=read_column(message.top_start, INT32, f"{field}.top_start"),
        top_token=read_column(message.top_token, INT32, f"{field}.top_token"),
        top=read_column(message.top, FLOAT32, f"{field}.top"),
    )
    row = columns.row
    check_length(columns.chosen, len(row), f"{field}.chosen")
    _check_tops(columns, len(row), field)
    if len(row) and (row[0] < 0 or row[-1] >= len(slot) or (row[1:] <= row[:-1]).any()):
        raise malformed(f"{field}.row", "is not ascending rows of the result")
    return columns


def _check_tops(columns: LogprobColumns, count: int, field: str) -> None:
    """Check that the likeliest ids are divided among `count` entries."""
    start = columns.top_start
    check_length(start, count + 1, f"{field}.top_start")
    check_length(columns.top, len(columns.top_token), f"{field}.top")
    if start[0] != 0 or start[-1] != len(columns.top) or (start[1:] < start[:-1]).any():
        raise malformed(f"{field}.top_start", "does not divide the entries")


def _write_prompt_logprobs(
    told: PromptLogprobColumns, message: result_pb2.PromptLogprobColumns
) -> None:
    message.SetInParent()
    message.slot = raw_column(told.slot, INT32)
    message.generation = raw_column(told.generation, UINT32)
    message.position = raw_column(told.position, INT32)
    message.rank = raw_column(told.rank, INT32)
    message.chosen = raw_column(told.columns.chosen, FLOAT32)
    message.top_start = raw_column(told.columns.top_start, INT32)
    message.top_token = raw_column(told.columns.top_token, INT32)
    message.top = raw_column(told.columns.top, FLOAT32)


def _read_prompt_logprobs(message: result_pb2.PromptLogprobColumns) -> PromptLogprobColumns:
    field = "result.prompt_logprobs"
    slot = read_column(message.slot, INT32, f"{field}.slot")
    count = len(slot)
    told = PromptLogprobColumns(
        slot=slot,
        generation=read_column(message.generation, UINT32, f"{field}.generation"),
        position=read_column(message.position, INT32, f"{field}.position"),
        rank=read_column(message.rank, INT32, f"{field}.rank"),
        columns=LogprobColumns(
            row=np.arange(count, dtype=np.int32),
            chosen=read_column(message.chosen, FLOAT32, f"{field}.chosen"),
            top_start=read_column(message.top_start, INT32, f"{field}.top_start"),
            top_token=read_column(message.top_token, INT32, f"{field}.top_token"),
            top=read_column(message.top, FLOAT32, f"{field}.top"),
        ),
    )
    for name in ("generation", "position", "rank"):
        check_length(getattr(told, name), count, f"{field}.{name}")
    check_length(told.columns.chosen, count, f"{field}.chosen")
    _check_tops(told.columns, count, field)
    return told
