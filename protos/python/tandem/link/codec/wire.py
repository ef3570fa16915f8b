"""
Encoding of the step link: values of `tandem.link` as serialized `ExecuteRequest` and
`ExecuteResponse`, and back.

Both services run `Execute` with identity serializers, so a message is encoded once and replayed as
the same bytes. Columns travel as little-endian arrays and come back as read-only views of the
received bytes. Received bytes either decode or raise: `CorruptMessage` if they were changed on the
way, else `SessionLost` with the field. The meaning (is the slot live? is the step next?) is checked
by `SlotState` and the two ends.
"""

from __future__ import annotations

from tandem.errors import SessionLost
from tandem.executor.v1 import batch_pb2, result_pb2, session_pb2
from tandem.link.batch import Batch
from tandem.link.codec.batch_codec import read_batch, write_batch
from tandem.link.codec.checksum import check_seal, seal
from tandem.link.codec.fields import MAX_MESSAGE_BYTES, known_kind, malformed, parsed
from tandem.link.codec.result_codec import read_result, write_result
from tandem.link.commands import Command, KvMode, Resume, Step, Suspend
from tandem.link.refusal import refused_batch
from tandem.link.results import StepFailed, StepResult
from tandem.link.session import Attach, Attached, Heartbeat

__all__ = [
    "MAX_MESSAGE_BYTES",
    "decode_request",
    "decode_response",
    "encode_attach",
    "encode_response",
    "encode_step",
]


def encode_attach(attach: Attach) -> bytes:
    """Serialize the first message of a stream, as an ExecuteRequest."""
    message = session_pb2.Attach(
        boot_id=attach.boot_id,
        session_epoch=attach.session_epoch,
        attach_id=attach.attach_id,
        acked_step_id=attach.acked_step_id,
    )
    return seal(batch_pb2.ExecuteRequest(attach=message).SerializeToString())


def encode_step(step: Step) -> bytes:
    """
    Serialize a step, as an ExecuteRequest.

    Raises:
        TypeError: A column's type is not the documented one and cannot be widened to it.
    """
    request = batch_pb2.ExecuteRequest()
    message = request.step
    message.session_epoch = step.session_epoch
    message.step_id = step.step_id
    message.acked_step_id = step.acked_step_id
    message.state_hash = step.state_hash
    match step.command:
        case Batch() as batch:
            write_batch(batch, message.batch)
        case Suspend(kv_mode=kv_mode):
            message.suspend.kv_mode = kv_mode.value  # type: ignore[assignment]  # generated enums are ints
        case Resume():
            message.resume.SetInParent()
    return seal(request.SerializeToString())


def decode_request(raw: bytes) -> Attach | Step:
    """
    Decode a message from the scheduler.

    Raises:
        CorruptMessage: The checksum does not match.
        SessionLost: It is no ExecuteRequest, or a field is malformed; the text names it.
    """
    check_seal(raw)
    request = parsed(batch_pb2.ExecuteRequest(), raw)
    which = request.WhichOneof("message")
    if which == "attach":
        attach = request.attach
        return Attach(
            boot_id=attach.boot_id,
            session_epoch=attach.session_epoch,
            attach_id=attach.attach_id,
            acked_step_id=attach.acked_step_id,
        )
    if which == "step":
        step = request.step
        try:
            command = _command(step)
        except SessionLost as error:
            raise refused_batch(error, step.step_id) from error
        return Step(
            session_epoch=step.session_epoch,
            step_id=step.step_id,
            acked_step_id=step.acked_step_id,
            state_hash=step.state_hash,
            command=command,
        )
    raise malformed("message", "is unset or of an unknown kind")


def encode_response(value: Attached | StepResult | StepFailed | Heartbeat) -> bytes:
    """
    Serialize a message from the executor, as an ExecuteResponse.

    Raises:
        TypeError: A column's type is not the documented one and cannot be widened to it.
    """
    response = result_pb2.ExecuteResponse()
    match value:
        case StepResult():
            write_result(value, response.result)
        case Heartbeat():
            response.heartbeat.SetInParent()
            response.heartbeat.running_step_id = value.running_step_id
            response.heartbeat.elapsed_ms = value.elapsed_ms
            response.heartbeat.last_completed_step_id = value.last_completed_step_id
        case Attached():
            response.attached.SetInParent()
            response.attached.boot_id = value.boot_id
            response.attached.last_received_step_id = value.last_received_step_id
            response.attached.last_completed_step_id = value.last_completed_step_id
        case StepFailed():
            response.step_failed.SetInParent()
            response.step_failed.boot_id = value.boot_id
            response.step_failed.step_id = value.step_id
            response.step_failed.reason = value.reason
            response.step_failed.message = value.message
            response.step_failed.sticky = value.sticky
    return seal(response.SerializeToString())


def decode_response(raw: bytes) -> Attached | StepResult | StepFailed | Heartbeat:
    """
    Decode a message from the executor.

    Raises:
        CorruptMessage: The checksum does not match.
        SessionLost: It is no ExecuteResponse, or a field is malformed; the text names it.
    """
    check_seal(raw)
    response = parsed(result_pb2.ExecuteResponse(), raw)
    which = response.WhichOneof("message")
    if which == "result":
        return read_result(response.result)
    if which == "heartbeat":
        beat = response.heartbeat
        return Heartbeat(
            running_step_id=beat.running_step_id,
            elapsed_ms=beat.elapsed_ms,
            last_completed_step_id=beat.last_completed_step_id,
        )
    if which == "attached":
        attached = response.attached
        return Attached(
            boot_id=attached.boot_id,
            last_received_step_id=attached.last_received_step_id,
            last_completed_step_id=attached.last_completed_step_id,
        )
    if which == "step_failed":
        failed = response.step_failed
        return StepFailed(
            boot_id=failed.boot_id,
            step_id=failed.step_id,
            reason=failed.reason,
            message=failed.message,
            sticky=failed.sticky,
        )
    raise malformed("message", "is unset or of an unknown kind")


def _command(step: batch_pb2.Step) -> Command:
    which = step.WhichOneof("command")
    if which == "batch":
        return read_batch(step.batch)
    if which == "suspend":
        return Suspend(kv_mode=known_kind(KvMode, step.suspend.kv_mode, "step.suspend.kv_mode"))
    if which == "resume":
        return Resume()
    raise malformed("step.command", "is unset or of an unknown kind")
