from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TunnelHello(_message.Message):
    __slots__ = ("protocol_version", "source", "target", "answer")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    source: str
    target: str
    answer: int
    def __init__(self, protocol_version: _Optional[int] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., answer: _Optional[int] = ...) -> None: ...

class TunnelOpened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TunnelFrame(_message.Message):
    __slots__ = ("hello", "opened", "data")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    hello: TunnelHello
    opened: TunnelOpened
    data: bytes
    def __init__(self, hello: _Optional[_Union[TunnelHello, _Mapping]] = ..., opened: _Optional[_Union[TunnelOpened, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class GreetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GreetReply(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...
