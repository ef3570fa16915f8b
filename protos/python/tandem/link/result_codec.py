"""Step results as `ExecutionResult` messages and back."""

from __future__ import annotations

from tandem.executor.v1 import result_pb2
from tandem.link.batch import RowError, RowErrorKind, StepResult, StepTimings
from tandem.link.fields import (
    FLOAT32,
    INT32,
    UINT32,
    check_length,
    known_kind,
    raw_column,
    read_column,
)


def write_result(result: StepResult, message: result_pb2.ExecutionResult) -> None:
    """Fill in the message of a result, which is part of a larger one."""
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
    message.graph = result.graph
    message.device_memory_bytes = result.device_memory_bytes
    if result.margin is not None:
        message.margin = raw_column(result.margin, FLOAT32)


def read_result(message: result_pb2.ExecutionResult) -> StepResult:
    """Read a result, or raise `SessionLost` naming the malformed field."""
    slot = read_column(message.slot, INT32, "result.slot")
    generation = read_column(message.generation, UINT32, "result.generation")
    position = read_column(message.position, INT32, "result.position")
    token = read_column(message.token, INT32, "result.token")
    margin = read_column(message.margin, FLOAT32, "result.margin") if message.margin else None
    for name, column in (("generation", generation), ("position", position), ("token", token)):
        check_length(column, len(slot), f"result.{name}")
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
        row_errors=tuple(
            RowError(
                slot=error.slot,
                generation=error.generation,
                kind=known_kind(RowErrorKind, error.kind, f"result.row_errors[{index}].kind"),
                message=error.message,
            )
            for index, error in enumerate(message.row_errors)
        ),
        timings=StepTimings(
            queued_ns=timings.queued_ns,
            forward_ns=timings.forward_ns,
            sample_ns=timings.sample_ns,
            total_ns=timings.total_ns,
        ),
        graph=message.graph,
        device_memory_bytes=message.device_memory_bytes,
        margin=margin,
    )
