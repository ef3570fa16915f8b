from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_PARAMETER: _ClassVar[ErrorReason]
    ERROR_REASON_EMPTY_PROMPT: _ClassVar[ErrorReason]
    ERROR_REASON_PROMPT_TOO_LONG: _ClassVar[ErrorReason]
    ERROR_REASON_TOTAL_TOO_LONG: _ClassVar[ErrorReason]
    ERROR_REASON_NEVER_FITS: _ClassVar[ErrorReason]
    ERROR_REASON_CHAT_TEMPLATE: _ClassVar[ErrorReason]
    ERROR_REASON_FEATURE_UNSUPPORTED: _ClassVar[ErrorReason]
    ERROR_REASON_REQUEST_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_DUPLICATE_REQUEST_ID: _ClassVar[ErrorReason]
    ERROR_REASON_EVENTS_NOT_TRACKED: _ClassVar[ErrorReason]
    ERROR_REASON_PROFILE_RUNNING: _ClassVar[ErrorReason]
    ERROR_REASON_PROFILE_UNSUPPORTED: _ClassVar[ErrorReason]
    ERROR_REASON_MODEL_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_QUEUE_FULL: _ClassVar[ErrorReason]
    ERROR_REASON_MEMORY_PRESSURE: _ClassVar[ErrorReason]
    ERROR_REASON_SLOW_CONSUMER: _ClassVar[ErrorReason]
    ERROR_REASON_RESPONSE_TOO_LARGE: _ClassVar[ErrorReason]
    ERROR_REASON_NO_EXECUTOR: _ClassVar[ErrorReason]
    ERROR_REASON_EXECUTOR_LOST: _ClassVar[ErrorReason]
    ERROR_REASON_DRAINING: _ClassVar[ErrorReason]
    ERROR_REASON_MODEL_CHANGED: _ClassVar[ErrorReason]
    ERROR_REASON_HANDED_OVER: _ClassVar[ErrorReason]
    ERROR_REASON_EXECUTOR_LOADING: _ClassVar[ErrorReason]
    ERROR_REASON_CORE_TIMEOUT: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_LOGITS: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
    ERROR_REASON_POISON_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_SESSION_HELD: _ClassVar[ErrorReason]
    ERROR_REASON_SESSION_LOST: _ClassVar[ErrorReason]
    ERROR_REASON_INCOMPATIBLE_EXECUTOR: _ClassVar[ErrorReason]
    ERROR_REASON_STREAM_REPLACED: _ClassVar[ErrorReason]
    ERROR_REASON_CORRUPT_MESSAGE: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_CONFIG: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_MODEL: _ClassVar[ErrorReason]
    ERROR_REASON_OUT_OF_MEMORY: _ClassVar[ErrorReason]
    ERROR_REASON_ADDRESS_IN_USE: _ClassVar[ErrorReason]
    ERROR_REASON_UNAUTHENTICATED: _ClassVar[ErrorReason]
    ERROR_REASON_PERMISSION_DENIED: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_PARAMETER: ErrorReason
ERROR_REASON_EMPTY_PROMPT: ErrorReason
ERROR_REASON_PROMPT_TOO_LONG: ErrorReason
ERROR_REASON_TOTAL_TOO_LONG: ErrorReason
ERROR_REASON_NEVER_FITS: ErrorReason
ERROR_REASON_CHAT_TEMPLATE: ErrorReason
ERROR_REASON_FEATURE_UNSUPPORTED: ErrorReason
ERROR_REASON_REQUEST_NOT_FOUND: ErrorReason
ERROR_REASON_DUPLICATE_REQUEST_ID: ErrorReason
ERROR_REASON_EVENTS_NOT_TRACKED: ErrorReason
ERROR_REASON_PROFILE_RUNNING: ErrorReason
ERROR_REASON_PROFILE_UNSUPPORTED: ErrorReason
ERROR_REASON_MODEL_NOT_FOUND: ErrorReason
ERROR_REASON_QUEUE_FULL: ErrorReason
ERROR_REASON_MEMORY_PRESSURE: ErrorReason
ERROR_REASON_SLOW_CONSUMER: ErrorReason
ERROR_REASON_RESPONSE_TOO_LARGE: ErrorReason
ERROR_REASON_NO_EXECUTOR: ErrorReason
ERROR_REASON_EXECUTOR_LOST: ErrorReason
ERROR_REASON_DRAINING: ErrorReason
ERROR_REASON_MODEL_CHANGED: ErrorReason
ERROR_REASON_HANDED_OVER: ErrorReason
ERROR_REASON_EXECUTOR_LOADING: ErrorReason
ERROR_REASON_CORE_TIMEOUT: ErrorReason
ERROR_REASON_INVALID_LOGITS: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
ERROR_REASON_POISON_REQUEST: ErrorReason
ERROR_REASON_SESSION_HELD: ErrorReason
ERROR_REASON_SESSION_LOST: ErrorReason
ERROR_REASON_INCOMPATIBLE_EXECUTOR: ErrorReason
ERROR_REASON_STREAM_REPLACED: ErrorReason
ERROR_REASON_CORRUPT_MESSAGE: ErrorReason
ERROR_REASON_INVALID_CONFIG: ErrorReason
ERROR_REASON_INVALID_MODEL: ErrorReason
ERROR_REASON_OUT_OF_MEMORY: ErrorReason
ERROR_REASON_ADDRESS_IN_USE: ErrorReason
ERROR_REASON_UNAUTHENTICATED: ErrorReason
ERROR_REASON_PERMISSION_DENIED: ErrorReason
REASONS_FIELD_NUMBER: _ClassVar[int]
reasons: _descriptor.FieldDescriptor

class ErrorReasons(_message.Message):
    __slots__ = ("reasons",)
    REASONS_FIELD_NUMBER: _ClassVar[int]
    reasons: _containers.RepeatedScalarFieldContainer[ErrorReason]
    def __init__(self, reasons: _Optional[_Iterable[_Union[ErrorReason, str]]] = ...) -> None: ...
