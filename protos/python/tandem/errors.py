"""
Errors that cross a process boundary: one class per reason, each with its gRPC code and retry
advice.

    TandemError
      InvalidParameter, EmptyPrompt, PromptTooLong,
      TotalTooLong, NeverFits, ChatTemplateError          INVALID_ARGUMENT     never retry unchanged
      RequestNotFound                                     NOT_FOUND            never
      DuplicateRequestId                                  ALREADY_EXISTS       never
      EventsNotTracked                                    FAILED_PRECONDITION  not until switched on
      ProfileRunning                                      FAILED_PRECONDITION  not until it ended
      ProfileUnsupported                                  FAILED_PRECONDITION  never
      QueueFull, MemoryPressure                           RESOURCE_EXHAUSTED   after retry_after_s
      SlowConsumer                                        ABORTED              read faster
      NoExecutor, ExecutorLost, Draining, HandedOver,
      ExecutorLoading, CoreTimeout                        UNAVAILABLE          after retry_after_s
      ModelChanged, SessionHeld, IncompatibleExecutor,
      StreamReplaced, InvalidConfig, InvalidModel,
      OutOfMemory                                         FAILED_PRECONDITION  not until fixed
      AddressInUse                                        UNAVAILABLE          choose another
      Unauthenticated                                     UNAUTHENTICATED      never unchanged
      PermissionDenied                                    PERMISSION_DENIED    never
      SessionLost                                         ABORTED              open a new session
      CorruptMessage                                      DATA_LOSS            attach again
      InvalidLogits                                       DATA_LOSS            never
      PoisonRequest                                       INTERNAL             never
      InternalError                                       INTERNAL             our bug: report it
      PeerUnavailable *                                   UNAVAILABLE          after a back-off
      CallCancelled *                                     CANCELLED            never: it was wanted

Clients match `reason`, never the text. Reasons are names of `tandem.common.v1.ErrorReason`, but
those with a star: they are never sent, but made by a caller that got no typed answer (`status.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class TandemError(Exception):
    """
    Root of all errors that a caller may see.

    Attributes:
        message: A sentence that says what was wrong and what to do.
        field: Path of the wrong request field, or None.
        retry_after_s: Seconds after which a retry may help; None if the error gives no such time.
        metadata: More facts for programs, for example the limit that was hit.
    """

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[str] = "INTERNAL"
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.metadata: dict[str, str] = dict(metadata or {})


class InvalidParameter(TandemError):
    """A request field is out of range."""

    reason = "INVALID_PARAMETER"
    code = "INVALID_ARGUMENT"


class EmptyPrompt(TandemError):
    """The prompt has no token."""

    reason = "EMPTY_PROMPT"
    code = "INVALID_ARGUMENT"


class PromptTooLong(TandemError):
    """The prompt alone is longer than max_model_len."""

    reason = "PROMPT_TOO_LONG"
    code = "INVALID_ARGUMENT"


class TotalTooLong(TandemError):
    """Prompt plus max_tokens is longer than max_model_len."""

    reason = "TOTAL_TOO_LONG"
    code = "INVALID_ARGUMENT"


class NeverFits(TandemError):
    """The request needs more KV blocks than it may ever hold."""

    reason = "NEVER_FITS"
    code = "INVALID_ARGUMENT"


class ChatTemplateError(TandemError):
    """The chat template rejected the messages, or there is none."""

    reason = "CHAT_TEMPLATE"
    code = "INVALID_ARGUMENT"


class RequestNotFound(TandemError):
    """No live request has this id."""

    reason = "REQUEST_NOT_FOUND"
    code = "NOT_FOUND"


class DuplicateRequestId(TandemError):
    """A live request has this id."""

    reason = "DUPLICATE_REQUEST_ID"
    code = "ALREADY_EXISTS"


class EventsNotTracked(TandemError):
    """Events of requests are not kept."""

    reason = "EVENTS_NOT_TRACKED"
    code = "FAILED_PRECONDITION"


class ProfileRunning(TandemError):
    """A profile is being recorded already."""

    reason = "PROFILE_RUNNING"
    code = "FAILED_PRECONDITION"


class ProfileUnsupported(TandemError):
    """The executor cannot record profiles."""

    reason = "PROFILE_UNSUPPORTED"
    code = "FAILED_PRECONDITION"


class QueueFull(TandemError):
    """A limit on requests is reached; metadata "limit" says which."""

    reason = "QUEUE_FULL"
    code = "RESOURCE_EXHAUSTED"
    default_retry_after_s = 1.0


class MemoryPressure(TandemError):
    """KV use is over memory_threshold and the engine refuses instead of queueing."""

    reason = "MEMORY_PRESSURE"
    code = "RESOURCE_EXHAUSTED"
    default_retry_after_s = 1.0


class SlowConsumer(TandemError):
    """The client read too slowly."""

    reason = "SLOW_CONSUMER"
    code = "ABORTED"


class NoExecutor(TandemError):
    """No executor has been attached yet."""

    reason = "NO_EXECUTOR"
    code = "UNAVAILABLE"
    default_retry_after_s = 1.0


class ExecutorLost(TandemError):
    """The executor was lost and did not come back in time, or is broken itself."""

    reason = "EXECUTOR_LOST"
    code = "UNAVAILABLE"
    default_retry_after_s = 1.0


class Draining(TandemError):
    """The service takes no new request."""

    reason = "DRAINING"
    code = "UNAVAILABLE"
    default_retry_after_s = 1.0


class HandedOver(TandemError):
    """The scheduler is stopping."""

    reason = "HANDED_OVER"
    code = "UNAVAILABLE"
    default_retry_after_s = 1.0


class ExecutorLoading(TandemError):
    """The executor listens but has not finished loading its model."""

    reason = "EXECUTOR_LOADING"
    code = "UNAVAILABLE"
    default_retry_after_s = 1.0


class CoreTimeout(TandemError):
    """The scheduler core did not answer in time."""

    reason = "CORE_TIMEOUT"
    code = "UNAVAILABLE"
    default_retry_after_s = 1.0


class ModelChanged(TandemError):
    """The executor now serves another model than the one this request started on."""

    reason = "MODEL_CHANGED"
    code = "FAILED_PRECONDITION"


class InvalidLogits(TandemError):
    """The model produced NaN or infinity for this request."""

    reason = "INVALID_LOGITS"
    code = "DATA_LOSS"


class PoisonRequest(TandemError):
    """Executors died twice while they computed this request alone."""

    reason = "POISON_REQUEST"


class InternalError(TandemError):
    """Tandem has a bug."""


class SessionHeld(TandemError):
    """Another scheduler holds the executor's session."""

    reason = "SESSION_HELD"
    code = "FAILED_PRECONDITION"


class SessionLost(TandemError):
    """The executor session cannot go on."""

    reason = "SESSION_LOST"
    code = "ABORTED"


class CorruptMessage(TandemError):
    """A message of the step link was changed on the way."""

    reason = "CORRUPT_MESSAGE"
    code = "DATA_LOSS"


class IncompatibleExecutor(TandemError):
    """Scheduler and executor do not fit together."""

    reason = "INCOMPATIBLE_EXECUTOR"
    code = "FAILED_PRECONDITION"


class StreamReplaced(TandemError):
    """A newer attach_id has replaced this Execute stream."""

    reason = "STREAM_REPLACED"
    code = "FAILED_PRECONDITION"


class InvalidConfig(TandemError):
    """A configuration value is missing, unknown or out of range."""

    reason = "INVALID_CONFIG"
    code = "FAILED_PRECONDITION"


class InvalidModel(TandemError):
    """The model directory is missing, incomplete, corrupt or of an unknown architecture."""

    reason = "INVALID_MODEL"
    code = "FAILED_PRECONDITION"


class OutOfMemory(TandemError):
    """KV cache or weights do not fit in memory, or the steps of one request alone do not."""

    reason = "OUT_OF_MEMORY"
    code = "FAILED_PRECONDITION"


class AddressInUse(TandemError):
    """The address to listen on is in use."""

    reason = "ADDRESS_IN_USE"
    code = "UNAVAILABLE"


class Unauthenticated(TandemError):
    """The call carries no credential that the server knows."""

    reason = "UNAUTHENTICATED"
    code = "UNAUTHENTICATED"


class PermissionDenied(TandemError):
    """The credential is known and may not do this."""

    reason = "PERMISSION_DENIED"
    code = "PERMISSION_DENIED"


def _leaves(root: type[TandemError]) -> list[type[TandemError]]:
    return [leaf for child in root.__subclasses__() for leaf in (child, *_leaves(child))]


ERROR_BY_REASON: dict[str, type[TandemError]] = {
    error.reason: error for error in _leaves(TandemError)
}
"""Error classes by reason, for rebuilding an error on the client's side."""
