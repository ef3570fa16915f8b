from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_PREFILL: _ClassVar[RequestState]
    REQUEST_STATE_DECODE: _ClassVar[RequestState]
    REQUEST_STATE_DRAINING: _ClassVar[RequestState]
    REQUEST_STATE_PAUSED: _ClassVar[RequestState]

class RequestEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_EVENT_KIND_UNSPECIFIED: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_ADD: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_SCHEDULED: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_GENERATED_TOKEN: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_PAUSE: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_EVICT: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_RETRACT: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_FINISH: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_FAIL: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_SUSPECTED: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_TRIAL: _ClassVar[RequestEventKind]
    REQUEST_EVENT_KIND_CLEARED: _ClassVar[RequestEventKind]
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_PREFILL: RequestState
REQUEST_STATE_DECODE: RequestState
REQUEST_STATE_DRAINING: RequestState
REQUEST_STATE_PAUSED: RequestState
REQUEST_EVENT_KIND_UNSPECIFIED: RequestEventKind
REQUEST_EVENT_KIND_ADD: RequestEventKind
REQUEST_EVENT_KIND_SCHEDULED: RequestEventKind
REQUEST_EVENT_KIND_GENERATED_TOKEN: RequestEventKind
REQUEST_EVENT_KIND_PAUSE: RequestEventKind
REQUEST_EVENT_KIND_EVICT: RequestEventKind
REQUEST_EVENT_KIND_RETRACT: RequestEventKind
REQUEST_EVENT_KIND_FINISH: RequestEventKind
REQUEST_EVENT_KIND_FAIL: RequestEventKind
REQUEST_EVENT_KIND_SUSPECTED: RequestEventKind
REQUEST_EVENT_KIND_TRIAL: RequestEventKind
REQUEST_EVENT_KIND_CLEARED: RequestEventKind

class ListRequestsRequest(_message.Message):
    __slots__ = ("page_size", "tenant", "states", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    tenant: str
    states: _containers.RepeatedScalarFieldContainer[RequestState]
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., tenant: _Optional[str] = ..., states: _Optional[_Iterable[_Union[RequestState, str]]] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "total", "next_page_token")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSummary]
    total: int
    next_page_token: str
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestSummary, _Mapping]]] = ..., total: _Optional[int] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequestSummary(_message.Message):
    __slots__ = ("request_id", "choice", "state", "tenant", "priority", "prompt_tokens", "output_tokens", "cached_tokens", "age_s", "preemptions", "time_to_first_token_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    state: RequestState
    tenant: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    age_s: float
    preemptions: int
    time_to_first_token_s: float
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., state: _Optional[_Union[RequestState, str]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., age_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., time_to_first_token_s: _Optional[float] = ...) -> None: ...

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

class GetRequestEventsRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class GetRequestEventsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ...) -> None: ...

class BlockStats(_message.Message):
    __slots__ = ("used_blocks", "cached_blocks", "free_blocks")
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    def __init__(self, used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("kind", "choice", "at_s", "token_id", "blocks", "detail", "time_to_first_token_s", "dropped_events")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DROPPED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    kind: RequestEventKind
    choice: int
    at_s: float
    token_id: int
    blocks: BlockStats
    detail: str
    time_to_first_token_s: float
    dropped_events: int
    def __init__(self, kind: _Optional[_Union[RequestEventKind, str]] = ..., choice: _Optional[int] = ..., at_s: _Optional[float] = ..., token_id: _Optional[int] = ..., blocks: _Optional[_Union[BlockStats, _Mapping]] = ..., detail: _Optional[str] = ..., time_to_first_token_s: _Optional[float] = ..., dropped_events: _Optional[int] = ...) -> None: ...
