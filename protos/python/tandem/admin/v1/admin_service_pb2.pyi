from tandem.admin.v1 import activity_pb2 as _activity_pb2
from tandem.admin.v1 import executors_pb2 as _executors_pb2
from tandem.admin.v1 import requests_pb2 as _requests_pb2
from tandem.admin.v1 import stats_pb2 as _stats_pb2
from tandem.common.v1 import profile_pb2 as _profile_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_MODE_UNSPECIFIED: _ClassVar[KvMode]
    KV_MODE_PERSIST: _ClassVar[KvMode]
    KV_MODE_OFFLOAD: _ClassVar[KvMode]
    KV_MODE_RECOMPUTE: _ClassVar[KvMode]
KV_MODE_UNSPECIFIED: KvMode
KV_MODE_PERSIST: KvMode
KV_MODE_OFFLOAD: KvMode
KV_MODE_RECOMPUTE: KvMode

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("remaining_requests",)
    REMAINING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    remaining_requests: int
    def __init__(self, remaining_requests: _Optional[int] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConfigEntry(_message.Message):
    __slots__ = ("name", "json_value", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    JSON_VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    json_value: str
    source: str
    def __init__(self, name: _Optional[str] = ..., json_value: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class GetConfigResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[ConfigEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[ConfigEntry, _Mapping]]] = ...) -> None: ...

class SuspendRequest(_message.Message):
    __slots__ = ("kv_mode",)
    KV_MODE_FIELD_NUMBER: _ClassVar[int]
    kv_mode: KvMode
    def __init__(self, kv_mode: _Optional[_Union[KvMode, str]] = ...) -> None: ...

class SuspendResponse(_message.Message):
    __slots__ = ("device_memory_bytes",)
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    device_memory_bytes: int
    def __init__(self, device_memory_bytes: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("freed_blocks",)
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    freed_blocks: int
    def __init__(self, freed_blocks: _Optional[int] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _profile_pb2.ProfileOptions
    def __init__(self, options: _Optional[_Union[_profile_pb2.ProfileOptions, _Mapping]] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("progress", "trace")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    progress: _profile_pb2.ProfileProgress
    trace: _profile_pb2.TraceChunk
    def __init__(self, progress: _Optional[_Union[_profile_pb2.ProfileProgress, _Mapping]] = ..., trace: _Optional[_Union[_profile_pb2.TraceChunk, _Mapping]] = ...) -> None: ...
