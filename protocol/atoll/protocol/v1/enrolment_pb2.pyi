from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolRequest(_message.Message):
    __slots__ = ("protocol_version", "name", "signing_request")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    name: str
    signing_request: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., name: _Optional[str] = ..., signing_request: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("signing_request",)
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    signing_request: bytes
    def __init__(self, signing_request: _Optional[bytes] = ...) -> None: ...

class Enrolled(_message.Message):
    __slots__ = ("certificate", "time", "lifetime_seconds", "revoked")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    time: float
    lifetime_seconds: float
    revoked: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, certificate: _Optional[bytes] = ..., time: _Optional[float] = ..., lifetime_seconds: _Optional[float] = ..., revoked: _Optional[_Iterable[str]] = ...) -> None: ...
