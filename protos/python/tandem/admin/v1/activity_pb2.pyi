from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_KIND_UNSPECIFIED: _ClassVar[FaultKind]
    FAULT_KIND_EXECUTOR_LOST: _ClassVar[FaultKind]
    FAULT_KIND_REQUESTS_FAILED: _ClassVar[FaultKind]
    FAULT_KIND_FRONTEND_GONE: _ClassVar[FaultKind]
    FAULT_KIND_BOOKKEEPING: _ClassVar[FaultKind]
FAULT_KIND_UNSPECIFIED: FaultKind
FAULT_KIND_EXECUTOR_LOST: FaultKind
FAULT_KIND_REQUESTS_FAILED: FaultKind
FAULT_KIND_FRONTEND_GONE: FaultKind
FAULT_KIND_BOOKKEEPING: FaultKind

class GetActivityRequest(_message.Message):
    __slots__ = ("max_steps",)
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    max_steps: int
    def __init__(self, max_steps: _Optional[int] = ...) -> None: ...

class GetActivityResponse(_message.Message):
    __slots__ = ("uptime_s", "histograms", "steps", "faults")
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    histograms: _containers.RepeatedCompositeFieldContainer[Histogram]
    steps: _containers.RepeatedCompositeFieldContainer[StepSample]
    faults: _containers.RepeatedCompositeFieldContainer[Fault]
    def __init__(self, uptime_s: _Optional[float] = ..., histograms: _Optional[_Iterable[_Union[Histogram, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[StepSample, _Mapping]]] = ..., faults: _Optional[_Iterable[_Union[Fault, _Mapping]]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("name", "upper_bounds_s", "counts", "sum_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UPPER_BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    upper_bounds_s: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum_s: float
    def __init__(self, name: _Optional[str] = ..., upper_bounds_s: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum_s: _Optional[float] = ...) -> None: ...

class StepSample(_message.Message):
    __slots__ = ("number", "executor", "at_s", "total_s", "compute_s", "tokens", "requests", "is_graph")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IS_GRAPH_FIELD_NUMBER: _ClassVar[int]
    number: int
    executor: str
    at_s: float
    total_s: float
    compute_s: float
    tokens: int
    requests: int
    is_graph: bool
    def __init__(self, number: _Optional[int] = ..., executor: _Optional[str] = ..., at_s: _Optional[float] = ..., total_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., tokens: _Optional[int] = ..., requests: _Optional[int] = ..., is_graph: _Optional[bool] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("kind", "at_s", "where", "reason", "message", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: FaultKind
    at_s: float
    where: str
    reason: str
    message: str
    count: int
    def __init__(self, kind: _Optional[_Union[FaultKind, str]] = ..., at_s: _Optional[float] = ..., where: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...
