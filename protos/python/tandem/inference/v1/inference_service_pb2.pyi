from tandem.common.v1 import errors_pb2 as _errors_pb2
from tandem.common.v1 import finish_reason_pb2 as _finish_reason_pb2
from tandem.inference.v1 import batch_pb2 as _batch_pb2
from tandem.inference.v1 import chat_pb2 as _chat_pb2
from tandem.inference.v1 import model_pb2 as _model_pb2
from tandem.inference.v1 import request_pb2 as _request_pb2
from tandem.inference.v1 import resume_pb2 as _resume_pb2
from tandem.inference.v1 import stream_pb2 as _stream_pb2
from tandem.inference.v1 import tokens_pb2 as _tokens_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "parse_special_tokens", "sampling", "stopping", "response", "structured_output", "n", "priority", "tenant", "cache_salt", "time_limit_s", "queue_limit_s", "resume", "attempt_key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: _request_pb2.TokenIds
    chat: _chat_pb2.ChatPrompt
    parse_special_tokens: bool
    sampling: _request_pb2.SamplingParams
    stopping: _request_pb2.StoppingParams
    response: _request_pb2.ResponseOptions
    structured_output: _request_pb2.StructuredOutput
    n: int
    priority: int
    tenant: str
    cache_salt: str
    time_limit_s: float
    queue_limit_s: float
    resume: _resume_pb2.Resume
    attempt_key: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_request_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[_chat_pb2.ChatPrompt, _Mapping]] = ..., parse_special_tokens: _Optional[bool] = ..., sampling: _Optional[_Union[_request_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_request_pb2.StoppingParams, _Mapping]] = ..., response: _Optional[_Union[_request_pb2.ResponseOptions, _Mapping]] = ..., structured_output: _Optional[_Union[_request_pb2.StructuredOutput, _Mapping]] = ..., n: _Optional[int] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., time_limit_s: _Optional[float] = ..., queue_limit_s: _Optional[float] = ..., resume: _Optional[_Union[_resume_pb2.Resume, _Mapping]] = ..., attempt_key: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "progress", "delta", "finished", "done", "prompt_logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: _stream_pb2.Started
    progress: _stream_pb2.Progress
    delta: _stream_pb2.Delta
    finished: _stream_pb2.Finished
    done: _stream_pb2.Done
    prompt_logprobs: _stream_pb2.PromptLogprobs
    def __init__(self, started: _Optional[_Union[_stream_pb2.Started, _Mapping]] = ..., progress: _Optional[_Union[_stream_pb2.Progress, _Mapping]] = ..., delta: _Optional[_Union[_stream_pb2.Delta, _Mapping]] = ..., finished: _Optional[_Union[_stream_pb2.Finished, _Mapping]] = ..., done: _Optional[_Union[_stream_pb2.Done, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_stream_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class BatchItem(_message.Message):
    __slots__ = ("item", "request")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    item: int
    request: GenerateRequest
    def __init__(self, item: _Optional[int] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class GenerateBatchRequest(_message.Message):
    __slots__ = ("add", "cancel")
    ADD_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    add: _containers.RepeatedCompositeFieldContainer[BatchItem]
    cancel: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, add: _Optional[_Iterable[_Union[BatchItem, _Mapping]]] = ..., cancel: _Optional[_Iterable[int]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("choice", "text", "token_ids", "reason", "stop_string", "token_id", "logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    reason: _finish_reason_pb2.FinishReason
    stop_string: str
    token_id: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_stream_pb2.TokenLogprobs]
    def __init__(self, choice: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[_finish_reason_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_stream_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("started", "completions", "done", "prompt_logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: _stream_pb2.Started
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    done: _stream_pb2.Done
    prompt_logprobs: _stream_pb2.PromptLogprobs
    def __init__(self, started: _Optional[_Union[_stream_pb2.Started, _Mapping]] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., done: _Optional[_Union[_stream_pb2.Done, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_stream_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
