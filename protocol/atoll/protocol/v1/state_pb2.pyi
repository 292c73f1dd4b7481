from atoll.protocol.v1 import frames_pb2 as _frames_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StateRequest(_message.Message):
    __slots__ = ("peer", "generation", "step", "names", "max_bytes_per_second", "snapshot", "run_id", "have_bytes", "have_checksum")
    PEER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HAVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAVE_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    peer: str
    generation: int
    step: int
    names: _containers.RepeatedScalarFieldContainer[str]
    max_bytes_per_second: float
    snapshot: bool
    run_id: str
    have_bytes: int
    have_checksum: int
    def __init__(self, peer: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., max_bytes_per_second: _Optional[float] = ..., snapshot: bool = ..., run_id: _Optional[str] = ..., have_bytes: _Optional[int] = ..., have_checksum: _Optional[int] = ...) -> None: ...

class StatePart(_message.Message):
    __slots__ = ("frame", "digest", "goes_on_at")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_AT_FIELD_NUMBER: _ClassVar[int]
    frame: _frames_pb2.Frame
    digest: bytes
    goes_on_at: int
    def __init__(self, frame: _Optional[_Union[_frames_pb2.Frame, _Mapping]] = ..., digest: _Optional[bytes] = ..., goes_on_at: _Optional[int] = ...) -> None: ...
