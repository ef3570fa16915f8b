from tandem.executor.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_ERROR_KIND_UNSPECIFIED: _ClassVar[RowErrorKind]
    ROW_ERROR_KIND_INVALID_LOGITS: _ClassVar[RowErrorKind]
    ROW_ERROR_KIND_TOKEN_OUT_OF_RANGE: _ClassVar[RowErrorKind]
ROW_ERROR_KIND_UNSPECIFIED: RowErrorKind
ROW_ERROR_KIND_INVALID_LOGITS: RowErrorKind
ROW_ERROR_KIND_TOKEN_OUT_OF_RANGE: RowErrorKind

class ExecuteResponse(_message.Message):
    __slots__ = ("attached", "result", "step_failed", "heartbeat", "crc32")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STEP_FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    attached: _session_pb2.Attached
    result: ExecutionResult
    step_failed: StepFailed
    heartbeat: _session_pb2.Heartbeat
    crc32: int
    def __init__(self, attached: _Optional[_Union[_session_pb2.Attached, _Mapping]] = ..., result: _Optional[_Union[ExecutionResult, _Mapping]] = ..., step_failed: _Optional[_Union[StepFailed, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., crc32: _Optional[int] = ...) -> None: ...

class ExecutionResult(_message.Message):
    __slots__ = ("boot_id", "step_id", "slot", "generation", "position", "token", "row_errors", "timings", "device_memory_bytes", "margin", "logprobs", "graph_num_tokens", "prompt_logprobs")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    step_id: int
    slot: bytes
    generation: bytes
    position: bytes
    token: bytes
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    timings: StepTimings
    device_memory_bytes: int
    margin: bytes
    logprobs: LogprobColumns
    graph_num_tokens: int
    prompt_logprobs: PromptLogprobColumns
    def __init__(self, boot_id: _Optional[str] = ..., step_id: _Optional[int] = ..., slot: _Optional[bytes] = ..., generation: _Optional[bytes] = ..., position: _Optional[bytes] = ..., token: _Optional[bytes] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., device_memory_bytes: _Optional[int] = ..., margin: _Optional[bytes] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., graph_num_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobColumns, _Mapping]] = ...) -> None: ...

class LogprobColumns(_message.Message):
    __slots__ = ("row", "chosen", "top_start", "top_token", "top")
    ROW_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_START_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    chosen: bytes
    top_start: bytes
    top_token: bytes
    top: bytes
    def __init__(self, row: _Optional[bytes] = ..., chosen: _Optional[bytes] = ..., top_start: _Optional[bytes] = ..., top_token: _Optional[bytes] = ..., top: _Optional[bytes] = ...) -> None: ...

class PromptLogprobColumns(_message.Message):
    __slots__ = ("slot", "generation", "position", "chosen", "rank", "top_start", "top_token", "top")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_START_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    slot: bytes
    generation: bytes
    position: bytes
    chosen: bytes
    rank: bytes
    top_start: bytes
    top_token: bytes
    top: bytes
    def __init__(self, slot: _Optional[bytes] = ..., generation: _Optional[bytes] = ..., position: _Optional[bytes] = ..., chosen: _Optional[bytes] = ..., rank: _Optional[bytes] = ..., top_start: _Optional[bytes] = ..., top_token: _Optional[bytes] = ..., top: _Optional[bytes] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("slot", "generation", "kind", "message")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    kind: RowErrorKind
    message: str
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., kind: _Optional[_Union[RowErrorKind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queued_ns", "forward_ns", "sample_ns", "total_ns")
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    queued_ns: int
    forward_ns: int
    sample_ns: int
    total_ns: int
    def __init__(self, queued_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ..., total_ns: _Optional[int] = ...) -> None: ...

class StepFailed(_message.Message):
    __slots__ = ("boot_id", "step_id", "reason", "message", "sticky")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STICKY_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    step_id: int
    reason: str
    message: str
    sticky: bool
    def __init__(self, boot_id: _Optional[str] = ..., step_id: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., sticky: _Optional[bool] = ...) -> None: ...
