from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Announcement(_message.Message):
    __slots__ = ("run", "addresses", "authority", "number")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    run: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    authority: bytes
    number: int
    def __init__(self, run: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., authority: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class SignedAnnouncement(_message.Message):
    __slots__ = ("announcement", "signature")
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    announcement: bytes
    signature: bytes
    def __init__(self, announcement: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
