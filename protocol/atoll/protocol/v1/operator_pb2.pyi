from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerStatus(_message.Message):
    __slots__ = ("name", "state", "address", "device", "stage", "layers", "memory_bytes", "resident_bytes", "flops_per_second", "phase", "waiting_for", "silent_seconds", "bytes_sent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    address: str
    device: str
    stage: int
    layers: str
    memory_bytes: int
    resident_bytes: int
    flops_per_second: float
    phase: str
    waiting_for: str
    silent_seconds: float
    bytes_sent: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., device: _Optional[str] = ..., stage: _Optional[int] = ..., layers: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., flops_per_second: _Optional[float] = ..., phase: _Optional[str] = ..., waiting_for: _Optional[str] = ..., silent_seconds: _Optional[float] = ..., bytes_sent: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run", "state", "reason", "state_seconds", "step", "steps", "loss", "tokens_per_second", "generation", "peers")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    run: str
    state: str
    reason: str
    state_seconds: float
    step: int
    steps: int
    loss: float
    tokens_per_second: float
    generation: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    def __init__(self, run: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., state_seconds: _Optional[float] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., generation: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExportReply(_message.Message):
    __slots__ = ("path", "step")
    PATH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    path: str
    step: int
    def __init__(self, path: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...
