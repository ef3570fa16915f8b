from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ProfileOptions(_message.Message):
    __slots__ = ("num_steps", "duration_s", "with_stack", "record_shapes")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    WITH_STACK_FIELD_NUMBER: _ClassVar[int]
    RECORD_SHAPES_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    duration_s: float
    with_stack: bool
    record_shapes: bool
    def __init__(self, num_steps: _Optional[int] = ..., duration_s: _Optional[float] = ..., with_stack: _Optional[bool] = ..., record_shapes: _Optional[bool] = ...) -> None: ...

class ProfileProgress(_message.Message):
    __slots__ = ("num_steps", "elapsed_s", "is_recorded")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    IS_RECORDED_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    elapsed_s: float
    is_recorded: bool
    def __init__(self, num_steps: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., is_recorded: _Optional[bool] = ...) -> None: ...

class TraceChunk(_message.Message):
    __slots__ = ("chunk", "sha256")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    sha256: str
    def __init__(self, chunk: _Optional[bytes] = ..., sha256: _Optional[str] = ...) -> None: ...
