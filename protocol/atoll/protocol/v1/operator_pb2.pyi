from atoll.protocol.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerStatus(_message.Message):
    __slots__ = ("name", "state", "address", "device", "stage", "layers", "memory_bytes", "resident_bytes", "flops_per_second", "phase", "waiting_for", "silent_seconds", "bytes_sent", "machine", "cores", "threads", "predicted_memory_bytes", "measured_memory_bytes", "predicted_compute_seconds", "measured_compute_seconds", "measurement", "reach", "unreached")
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
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENT_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
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
    machine: str
    cores: int
    threads: int
    predicted_memory_bytes: int
    measured_memory_bytes: int
    predicted_compute_seconds: float
    measured_compute_seconds: float
    measurement: str
    reach: str
    unreached: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., device: _Optional[str] = ..., stage: _Optional[int] = ..., layers: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., flops_per_second: _Optional[float] = ..., phase: _Optional[str] = ..., waiting_for: _Optional[str] = ..., silent_seconds: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., machine: _Optional[str] = ..., cores: _Optional[int] = ..., threads: _Optional[int] = ..., predicted_memory_bytes: _Optional[int] = ..., measured_memory_bytes: _Optional[int] = ..., predicted_compute_seconds: _Optional[float] = ..., measured_compute_seconds: _Optional[float] = ..., measurement: _Optional[str] = ..., reach: _Optional[str] = ..., unreached: _Optional[str] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("source", "target", "codec", "estimated", "predicted_bytes_per_second", "measured_bytes_per_second", "round_trip_seconds", "predicted_seconds", "measured_seconds", "bytes", "direction", "relative_error", "damage", "raw_bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MEASURED_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    codec: str
    estimated: bool
    predicted_bytes_per_second: float
    measured_bytes_per_second: float
    round_trip_seconds: float
    predicted_seconds: float
    measured_seconds: float
    bytes: int
    direction: str
    relative_error: float
    damage: float
    raw_bytes: int
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., codec: _Optional[str] = ..., estimated: bool = ..., predicted_bytes_per_second: _Optional[float] = ..., measured_bytes_per_second: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ..., predicted_seconds: _Optional[float] = ..., measured_seconds: _Optional[float] = ..., bytes: _Optional[int] = ..., direction: _Optional[str] = ..., relative_error: _Optional[float] = ..., damage: _Optional[float] = ..., raw_bytes: _Optional[int] = ...) -> None: ...

class StageTimeline(_message.Message):
    __slots__ = ("peer", "step", "spans")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    step: int
    spans: _containers.RepeatedCompositeFieldContainer[_session_pb2.Span]
    def __init__(self, peer: _Optional[str] = ..., step: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[_session_pb2.Span, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("timelines",)
    TIMELINES_FIELD_NUMBER: _ClassVar[int]
    timelines: bool
    def __init__(self, timelines: bool = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run", "state", "reason", "state_seconds", "step", "steps", "loss", "tokens_per_second", "generation", "peers", "links", "predicted_step_seconds", "measured_step_seconds", "journal_step", "complete_snapshot", "safe_snapshot", "timelines")
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
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_STEP_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SAFE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TIMELINES_FIELD_NUMBER: _ClassVar[int]
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
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    predicted_step_seconds: float
    measured_step_seconds: float
    journal_step: int
    complete_snapshot: SnapshotStatus
    safe_snapshot: SnapshotStatus
    timelines: _containers.RepeatedCompositeFieldContainer[StageTimeline]
    def __init__(self, run: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., state_seconds: _Optional[float] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., generation: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., predicted_step_seconds: _Optional[float] = ..., measured_step_seconds: _Optional[float] = ..., journal_step: _Optional[int] = ..., complete_snapshot: _Optional[_Union[SnapshotStatus, _Mapping]] = ..., safe_snapshot: _Optional[_Union[SnapshotStatus, _Mapping]] = ..., timelines: _Optional[_Iterable[_Union[StageTimeline, _Mapping]]] = ...) -> None: ...

class SnapshotStatus(_message.Message):
    __slots__ = ("step", "age_seconds", "bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    age_seconds: float
    bytes: int
    def __init__(self, step: _Optional[int] = ..., age_seconds: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class FleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FleetPeer(_message.Message):
    __slots__ = ("name", "device", "flops_per_second", "memory_bytes", "machine", "cores", "threads", "max_upload_bytes_per_second", "max_download_bytes_per_second", "measured", "coordinator_round_trip_seconds", "trusted")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    MAX_UPLOAD_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_DOWNLOAD_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRUSTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    device: str
    flops_per_second: float
    memory_bytes: int
    machine: str
    cores: int
    threads: int
    max_upload_bytes_per_second: float
    max_download_bytes_per_second: float
    measured: _containers.RepeatedCompositeFieldContainer[_session_pb2.Measured]
    coordinator_round_trip_seconds: float
    trusted: bool
    def __init__(self, name: _Optional[str] = ..., device: _Optional[str] = ..., flops_per_second: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., machine: _Optional[str] = ..., cores: _Optional[int] = ..., threads: _Optional[int] = ..., max_upload_bytes_per_second: _Optional[float] = ..., max_download_bytes_per_second: _Optional[float] = ..., measured: _Optional[_Iterable[_Union[_session_pb2.Measured, _Mapping]]] = ..., coordinator_round_trip_seconds: _Optional[float] = ..., trusted: bool = ...) -> None: ...

class FleetLink(_message.Message):
    __slots__ = ("source", "target", "bytes_per_second", "latency_seconds", "estimated", "relayed")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    bytes_per_second: float
    latency_seconds: float
    estimated: bool
    relayed: bool
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., bytes_per_second: _Optional[float] = ..., latency_seconds: _Optional[float] = ..., estimated: bool = ..., relayed: bool = ...) -> None: ...

class FleetReply(_message.Message):
    __slots__ = ("peers", "links", "relay_bytes_per_second")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    RELAY_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[FleetPeer]
    links: _containers.RepeatedCompositeFieldContainer[FleetLink]
    relay_bytes_per_second: float
    def __init__(self, peers: _Optional[_Iterable[_Union[FleetPeer, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[FleetLink, _Mapping]]] = ..., relay_bytes_per_second: _Optional[float] = ...) -> None: ...

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

class ReplanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplanReply(_message.Message):
    __slots__ = ("moved", "reason")
    MOVED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    moved: bool
    reason: str
    def __init__(self, moved: bool = ..., reason: _Optional[str] = ...) -> None: ...

class RemovePeerRequest(_message.Message):
    __slots__ = ("name", "hand_over_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    hand_over_seconds: float
    def __init__(self, name: _Optional[str] = ..., hand_over_seconds: _Optional[float] = ...) -> None: ...

class RemovePeerReply(_message.Message):
    __slots__ = ("was_here",)
    WAS_HERE_FIELD_NUMBER: _ClassVar[int]
    was_here: bool
    def __init__(self, was_here: bool = ...) -> None: ...

class AllowPeerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class AllowPeerReply(_message.Message):
    __slots__ = ("was_barred",)
    WAS_BARRED_FIELD_NUMBER: _ClassVar[int]
    was_barred: bool
    def __init__(self, was_barred: bool = ...) -> None: ...
