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


def result_message(result: StepResult) -> result_pb2.ExecutionResult:
    """Build the message of a result."""
    timings = result.timings
    return result_pb2.ExecutionResult(
        boot_id=result.boot_id,
        step_id=result.step_id,
        slot=raw_column(result.slot, INT32),
        generation=raw_column(result.generation, UINT32),
        position=raw_column(result.position, INT32),
        token=raw_column(result.token, INT32),
        row_errors=[
            result_pb2.RowError(
                slot=error.slot,
                generation=error.generation,
                kind=error.kind.value,  # type: ignore[arg-type]  # generated enums are ints
                message=error.message,
            )
            for error in result.row_errors
        ],
        timings=result_pb2.StepTimings(
            queued_ns=timings.queued_ns,
            forward_ns=timings.forward_ns,
            sample_ns=timings.sample_ns,
            total_ns=timings.total_ns,
        ),
        graph=result.graph,
        device_memory_bytes=result.device_memory_bytes,
        margin=b"" if result.margin is None else raw_column(result.margin, FLOAT32),
    )


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
