"""
Errors that cross a process boundary: one class per reason, each with its gRPC code and retry
advice.

    TandemError
      InvalidParameter, EmptyPrompt, PromptTooLong,
      TotalTooLong, NeverFits, ChatTemplateError,
      FeatureUnsupported                                  INVALID_ARGUMENT     never retry unchanged
      RequestNotFound, ModelNotFound                      NOT_FOUND            never
      DuplicateRequestId                                  ALREADY_EXISTS       never
      EventsNotTracked                                    FAILED_PRECONDITION  not until switched on
      ProfileRunning                                      FAILED_PRECONDITION  not until it ended
      ProfileUnsupported                                  FAILED_PRECONDITION  never
      QueueFull, MemoryPressure                           RESOURCE_EXHAUSTED   after retry_after_s
      SlowConsumer                                        ABORTED              read faster
      ResponseTooLarge                                    FAILED_PRECONDITION  not as a whole
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
      DeadlineExceeded *                                  DEADLINE_EXCEEDED    never

Each derives from the class of its gRPC code (`error_codes.py`), as QueueFull from
ResourceExhausted. Clients match a class or `reason`, never the text. Reasons are names of
`tandem.common.v1.ErrorReason`, but those with a star: they are never sent, but made by a caller
that got no typed answer (`status.py`).
"""

from __future__ import annotations

from tandem.error_codes import (
    ERROR_BY_CODE,
    Aborted,
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from tandem.error_codes import TandemError as TandemError  # noqa: PLC0414  # exported from here too


class InvalidParameter(InvalidArgument):
    """A request field is out of range."""

    reason = "INVALID_PARAMETER"


class EmptyPrompt(InvalidArgument):
    """The prompt has no token."""

    reason = "EMPTY_PROMPT"


class PromptTooLong(InvalidArgument):
    """The prompt alone is longer than max_model_len."""

    reason = "PROMPT_TOO_LONG"


class TotalTooLong(InvalidArgument):
    """Prompt plus max_tokens is longer than max_model_len."""

    reason = "TOTAL_TOO_LONG"


class NeverFits(InvalidArgument):
    """The request needs more KV blocks than it may ever hold."""

    reason = "NEVER_FITS"


class ChatTemplateError(InvalidArgument):
    """The chat template rejected the messages, or there is none."""

    reason = "CHAT_TEMPLATE"


class FeatureUnsupported(InvalidArgument):
    """The request has a field that the server does not know, or needs what it cannot do."""

    reason = "FEATURE_UNSUPPORTED"


class RequestNotFound(NotFound):
    """No live request has this id."""

    reason = "REQUEST_NOT_FOUND"


class DuplicateRequestId(AlreadyExists):
    """A live request has this id."""

    reason = "DUPLICATE_REQUEST_ID"


class EventsNotTracked(FailedPrecondition):
    """Events of requests are not kept."""

    reason = "EVENTS_NOT_TRACKED"


class ProfileRunning(FailedPrecondition):
    """A profile is being recorded already."""

    reason = "PROFILE_RUNNING"


class ProfileUnsupported(FailedPrecondition):
    """The executor cannot record profiles."""

    reason = "PROFILE_UNSUPPORTED"


class ModelNotFound(NotFound):
    """No model of this name is served."""

    reason = "MODEL_NOT_FOUND"


class QueueFull(ResourceExhausted):
    """A limit on requests is reached; metadata "limit" says which."""

    reason = "QUEUE_FULL"
    default_retry_after_s = 1.0


class MemoryPressure(ResourceExhausted):
    """KV use is over memory_threshold and the engine refuses instead of queueing."""

    reason = "MEMORY_PRESSURE"
    default_retry_after_s = 1.0


class SlowConsumer(Aborted):
    """The client read too slowly."""

    reason = "SLOW_CONSUMER"


class ResponseTooLarge(FailedPrecondition):
    """A whole answer is larger than one message may be: stream it instead."""

    reason = "RESPONSE_TOO_LARGE"


class NoExecutor(Unavailable):
    """No executor has been attached yet."""

    reason = "NO_EXECUTOR"
    default_retry_after_s = 1.0


class ExecutorLost(Unavailable):
    """The executor was lost and did not come back in time, or is broken itself."""

    reason = "EXECUTOR_LOST"
    default_retry_after_s = 1.0


class Draining(Unavailable):
    """The service takes no new request."""

    reason = "DRAINING"
    default_retry_after_s = 1.0


class HandedOver(Unavailable):
    """The scheduler is stopping."""

    reason = "HANDED_OVER"
    default_retry_after_s = 1.0


class ExecutorLoading(Unavailable):
    """The executor listens but has not finished loading its model."""

    reason = "EXECUTOR_LOADING"
    default_retry_after_s = 1.0


class CoreTimeout(Unavailable):
    """The scheduler core did not answer in time."""

    reason = "CORE_TIMEOUT"
    default_retry_after_s = 1.0


class ModelChanged(FailedPrecondition):
    """The executor now serves another model than the one this request started on."""

    reason = "MODEL_CHANGED"


class InvalidLogits(DataLoss):
    """The model produced NaN or infinity for this request."""

    reason = "INVALID_LOGITS"


class PoisonRequest(Internal):
    """Executors died twice while they computed this request alone."""

    reason = "POISON_REQUEST"


class InternalError(Internal):
    """Tandem has a bug."""


class SessionHeld(FailedPrecondition):
    """Another scheduler holds the executor's session."""

    reason = "SESSION_HELD"


class SessionLost(Aborted):
    """The executor session cannot go on."""

    reason = "SESSION_LOST"


class CorruptMessage(DataLoss):
    """A message of the step link was changed on the way."""

    reason = "CORRUPT_MESSAGE"


class IncompatibleExecutor(FailedPrecondition):
    """Scheduler and executor do not fit together."""

    reason = "INCOMPATIBLE_EXECUTOR"


class StreamReplaced(FailedPrecondition):
    """A newer attach_id has replaced this Execute stream."""

    reason = "STREAM_REPLACED"


class InvalidConfig(FailedPrecondition):
    """A configuration value is missing, unknown or out of range."""

    reason = "INVALID_CONFIG"


class InvalidModel(FailedPrecondition):
    """The model directory is missing, incomplete, corrupt or of an unknown architecture."""

    reason = "INVALID_MODEL"


class OutOfMemory(FailedPrecondition):
    """KV cache or weights do not fit in memory, or the steps of one request alone do not."""

    reason = "OUT_OF_MEMORY"


class AddressInUse(Unavailable):
    """The address to listen on is in use."""

    reason = "ADDRESS_IN_USE"


def _leaves(root: type[TandemError]) -> list[type[TandemError]]:
    return [leaf for child in root.__subclasses__() for leaf in (child, *_leaves(child))]


ERROR_BY_REASON: dict[str, type[TandemError]] = {
    error.reason: error for base in ERROR_BY_CODE.values() for error in _leaves(base)
} | {error.reason: error for error in (Unauthenticated, PermissionDenied)}
"""Error classes by reason, for rebuilding an error on the client's side."""
