from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor
COUNTER_FIELD_NUMBER: _ClassVar[int]
counter: _descriptor.FieldDescriptor
GAUGE_FIELD_NUMBER: _ClassVar[int]
gauge: _descriptor.FieldDescriptor

class Metric(_message.Message):
    __slots__ = ("name", "help")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HELP_FIELD_NUMBER: _ClassVar[int]
    name: str
    help: str
    def __init__(self, name: _Optional[str] = ..., help: _Optional[str] = ...) -> None: ...
