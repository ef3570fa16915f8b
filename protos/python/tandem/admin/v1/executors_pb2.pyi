from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExecutorState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTOR_STATE_UNSPECIFIED: _ClassVar[ExecutorState]
    EXECUTOR_STATE_SERVING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_DRAINING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_DRAINED: _ClassVar[ExecutorState]
    EXECUTOR_STATE_SUSPENDED: _ClassVar[ExecutorState]
    EXECUTOR_STATE_SILENT: _ClassVar[ExecutorState]
    EXECUTOR_STATE_CONNECTING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_REFUSED: _ClassVar[ExecutorState]
EXECUTOR_STATE_UNSPECIFIED: ExecutorState
EXECUTOR_STATE_SERVING: ExecutorState
EXECUTOR_STATE_DRAINING: ExecutorState
EXECUTOR_STATE_DRAINED: ExecutorState
EXECUTOR_STATE_SUSPENDED: ExecutorState
EXECUTOR_STATE_SILENT: ExecutorState
EXECUTOR_STATE_CONNECTING: ExecutorState
EXECUTOR_STATE_REFUSED: ExecutorState

class ListExecutorsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListExecutorsResponse(_message.Message):
    __slots__ = ("executors",)
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorSummary]
    def __init__(self, executors: _Optional[_Iterable[_Union[ExecutorSummary, _Mapping]]] = ...) -> None: ...

class ExecutorSummary(_message.Message):
    __slots__ = ("address", "reached_at", "state", "why", "boot_id", "model", "device", "dtype", "running_requests", "max_requests", "used_blocks", "total_blocks", "cached_blocks", "steps", "usual_step_s", "sessions", "losses", "device_memory_bytes", "away_s")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REACHED_AT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    USUAL_STEP_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    AWAY_S_FIELD_NUMBER: _ClassVar[int]
    address: str
    reached_at: str
    state: ExecutorState
    why: str
    boot_id: str
    model: str
    device: str
    dtype: str
    running_requests: int
    max_requests: int
    used_blocks: int
    total_blocks: int
    cached_blocks: int
    steps: int
    usual_step_s: float
    sessions: int
    losses: int
    device_memory_bytes: int
    away_s: float
    def __init__(self, address: _Optional[str] = ..., reached_at: _Optional[str] = ..., state: _Optional[_Union[ExecutorState, str]] = ..., why: _Optional[str] = ..., boot_id: _Optional[str] = ..., model: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., running_requests: _Optional[int] = ..., max_requests: _Optional[int] = ..., used_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., steps: _Optional[int] = ..., usual_step_s: _Optional[float] = ..., sessions: _Optional[int] = ..., losses: _Optional[int] = ..., device_memory_bytes: _Optional[int] = ..., away_s: _Optional[float] = ...) -> None: ...

class AddExecutorRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class AddExecutorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainExecutorRequest(_message.Message):
    __slots__ = ("address", "grace_s")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    address: str
    grace_s: float
    def __init__(self, address: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class DrainExecutorResponse(_message.Message):
    __slots__ = ("moved_requests",)
    MOVED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    moved_requests: int
    def __init__(self, moved_requests: _Optional[int] = ...) -> None: ...

class RemoveExecutorRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class RemoveExecutorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
