from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProbeHello(_message.Message):
    __slots__ = ("protocol_version", "name", "limit_seconds")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    name: str
    limit_seconds: float
    def __init__(self, protocol_version: _Optional[int] = ..., name: _Optional[str] = ..., limit_seconds: _Optional[float] = ...) -> None: ...

class ProbeWelcome(_message.Message):
    __slots__ = ("name", "max_bytes_per_second")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_bytes_per_second: float
    def __init__(self, name: _Optional[str] = ..., max_bytes_per_second: _Optional[float] = ...) -> None: ...

class ProbeBusy(_message.Message):
    __slots__ = ("again_seconds",)
    AGAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    again_seconds: float
    def __init__(self, again_seconds: _Optional[float] = ...) -> None: ...

class ProbeStart(_message.Message):
    __slots__ = ("download", "round_trip_seconds", "seconds", "max_bytes_per_second")
    DOWNLOAD_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    download: bool
    round_trip_seconds: float
    seconds: float
    max_bytes_per_second: float
    def __init__(self, download: bool = ..., round_trip_seconds: _Optional[float] = ..., seconds: _Optional[float] = ..., max_bytes_per_second: _Optional[float] = ...) -> None: ...

class ProbeProgress(_message.Message):
    __slots__ = ("bytes", "enough", "bytes_per_second")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ENOUGH_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    enough: bool
    bytes_per_second: float
    def __init__(self, bytes: _Optional[int] = ..., enough: bool = ..., bytes_per_second: _Optional[float] = ...) -> None: ...

class ProbeEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeFrame(_message.Message):
    __slots__ = ("hello", "welcome", "busy", "echo", "start", "load", "progress", "end")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    hello: ProbeHello
    welcome: ProbeWelcome
    busy: ProbeBusy
    echo: int
    start: ProbeStart
    load: bytes
    progress: ProbeProgress
    end: ProbeEnd
    def __init__(self, hello: _Optional[_Union[ProbeHello, _Mapping]] = ..., welcome: _Optional[_Union[ProbeWelcome, _Mapping]] = ..., busy: _Optional[_Union[ProbeBusy, _Mapping]] = ..., echo: _Optional[int] = ..., start: _Optional[_Union[ProbeStart, _Mapping]] = ..., load: _Optional[bytes] = ..., progress: _Optional[_Union[ProbeProgress, _Mapping]] = ..., end: _Optional[_Union[ProbeEnd, _Mapping]] = ...) -> None: ...
