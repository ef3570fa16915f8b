from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSessionRequest(_message.Message):
    __slots__ = ("protocol_version", "scheduler_name", "take_over", "lease_ms", "scheduler_incarnation")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_NAME_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    scheduler_name: str
    take_over: bool
    lease_ms: int
    scheduler_incarnation: str
    def __init__(self, protocol_version: _Optional[int] = ..., scheduler_name: _Optional[str] = ..., take_over: _Optional[bool] = ..., lease_ms: _Optional[int] = ..., scheduler_incarnation: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("boot_id", "session_epoch")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    session_epoch: int
    def __init__(self, boot_id: _Optional[str] = ..., session_epoch: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("boot_id", "session_epoch", "attach_id", "acked_step_id")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACH_ID_FIELD_NUMBER: _ClassVar[int]
    ACKED_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    session_epoch: int
    attach_id: int
    acked_step_id: int
    def __init__(self, boot_id: _Optional[str] = ..., session_epoch: _Optional[int] = ..., attach_id: _Optional[int] = ..., acked_step_id: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("boot_id", "last_received_step_id", "last_completed_step_id")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_RECEIVED_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_COMPLETED_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    last_received_step_id: int
    last_completed_step_id: int
    def __init__(self, boot_id: _Optional[str] = ..., last_received_step_id: _Optional[int] = ..., last_completed_step_id: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("running_step_id", "elapsed_ms", "last_completed_step_id")
    RUNNING_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_COMPLETED_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    running_step_id: int
    elapsed_ms: int
    last_completed_step_id: int
    def __init__(self, running_step_id: _Optional[int] = ..., elapsed_ms: _Optional[int] = ..., last_completed_step_id: _Optional[int] = ...) -> None: ...
