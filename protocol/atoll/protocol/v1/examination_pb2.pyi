from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ExamineRequest(_message.Message):
    __slots__ = ("protocol_version", "name", "address")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    name: str
    address: str
    def __init__(self, protocol_version: _Optional[int] = ..., name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class ExamineReply(_message.Message):
    __slots__ = ("protocol_version", "version", "time", "unreachable")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    version: str
    time: float
    unreachable: str
    def __init__(self, protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., time: _Optional[float] = ..., unreachable: _Optional[str] = ...) -> None: ...
