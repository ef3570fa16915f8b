from tandem.inference.v1 import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelCapabilities(_message.Message):
    __slots__ = ("text", "chat", "logprobs", "prompt_logprobs", "logprob_token_ids", "token_bytes", "parse_output", "structured_output", "allowed_token_ids", "include_stop")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARSE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    text: bool
    chat: bool
    logprobs: bool
    prompt_logprobs: bool
    logprob_token_ids: bool
    token_bytes: bool
    parse_output: bool
    structured_output: bool
    allowed_token_ids: bool
    include_stop: bool
    def __init__(self, text: _Optional[bool] = ..., chat: _Optional[bool] = ..., logprobs: _Optional[bool] = ..., prompt_logprobs: _Optional[bool] = ..., logprob_token_ids: _Optional[bool] = ..., token_bytes: _Optional[bool] = ..., parse_output: _Optional[bool] = ..., structured_output: _Optional[bool] = ..., allowed_token_ids: _Optional[bool] = ..., include_stop: _Optional[bool] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "revision", "architecture", "vocab_size", "max_model_len", "eos_token_ids", "dtype", "default_sampling", "default_stopping", "capabilities", "max_request_bytes", "max_complete_bytes", "max_items_in_flight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_STOPPING_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_COMPLETE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    default_sampling: _request_pb2.SamplingParams
    default_stopping: _request_pb2.StoppingParams
    capabilities: ModelCapabilities
    max_request_bytes: int
    max_complete_bytes: int
    max_items_in_flight: int
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., default_sampling: _Optional[_Union[_request_pb2.SamplingParams, _Mapping]] = ..., default_stopping: _Optional[_Union[_request_pb2.StoppingParams, _Mapping]] = ..., capabilities: _Optional[_Union[ModelCapabilities, _Mapping]] = ..., max_request_bytes: _Optional[int] = ..., max_complete_bytes: _Optional[int] = ..., max_items_in_flight: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...
