from tandem.inference.v1 import stream_pb2 as _stream_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchEvent(_message.Message):
    __slots__ = ("started", "progress", "delta", "finished", "done", "prompt_logprobs", "error", "item")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    started: _stream_pb2.Started
    progress: _stream_pb2.Progress
    delta: _stream_pb2.Delta
    finished: _stream_pb2.Finished
    done: _stream_pb2.Done
    prompt_logprobs: _stream_pb2.PromptLogprobs
    error: bytes
    item: int
    def __init__(self, started: _Optional[_Union[_stream_pb2.Started, _Mapping]] = ..., progress: _Optional[_Union[_stream_pb2.Progress, _Mapping]] = ..., delta: _Optional[_Union[_stream_pb2.Delta, _Mapping]] = ..., finished: _Optional[_Union[_stream_pb2.Finished, _Mapping]] = ..., done: _Optional[_Union[_stream_pb2.Done, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_stream_pb2.PromptLogprobs, _Mapping]] = ..., error: _Optional[bytes] = ..., item: _Optional[int] = ...) -> None: ...

class GenerateBatchResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[BatchEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[BatchEvent, _Mapping]]] = ...) -> None: ...
