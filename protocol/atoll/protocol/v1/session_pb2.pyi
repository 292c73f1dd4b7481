from atoll.protocol.v1 import frames_pb2 as _frames_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Join(_message.Message):
    __slots__ = ("protocol_version", "version", "name", "address", "device", "threads", "memory_bytes", "flops_per_second", "machine", "cores", "disk_bytes", "max_upload_bytes_per_second", "max_download_bytes_per_second", "codecs", "held", "snapshots", "handling_seconds", "instance")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_UPLOAD_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_DOWNLOAD_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    HANDLING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    version: str
    name: str
    address: str
    device: str
    threads: int
    memory_bytes: int
    flops_per_second: float
    machine: str
    cores: int
    disk_bytes: int
    max_upload_bytes_per_second: float
    max_download_bytes_per_second: float
    codecs: _containers.RepeatedCompositeFieldContainer[CodecSpeed]
    held: HeldState
    snapshots: _containers.RepeatedCompositeFieldContainer[HeldSnapshot]
    handling_seconds: float
    instance: str
    def __init__(self, protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., device: _Optional[str] = ..., threads: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., flops_per_second: _Optional[float] = ..., machine: _Optional[str] = ..., cores: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., max_upload_bytes_per_second: _Optional[float] = ..., max_download_bytes_per_second: _Optional[float] = ..., codecs: _Optional[_Iterable[_Union[CodecSpeed, _Mapping]]] = ..., held: _Optional[_Union[HeldState, _Mapping]] = ..., snapshots: _Optional[_Iterable[_Union[HeldSnapshot, _Mapping]]] = ..., handling_seconds: _Optional[float] = ..., instance: _Optional[str] = ...) -> None: ...

class HeldState(_message.Message):
    __slots__ = ("run_id", "step", "generation", "reported_step", "names")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REPORTED_STEP_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    generation: int
    reported_step: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., generation: _Optional[int] = ..., reported_step: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class HeldSnapshot(_message.Message):
    __slots__ = ("run_id", "step", "names", "num_bytes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    names: _containers.RepeatedScalarFieldContainer[str]
    num_bytes: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class CodecSpeed(_message.Message):
    __slots__ = ("codec", "encode_bytes_per_second", "decode_bytes_per_second", "ratio")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    ENCODE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    codec: str
    encode_bytes_per_second: float
    decode_bytes_per_second: float
    ratio: float
    def __init__(self, codec: _Optional[str] = ..., encode_bytes_per_second: _Optional[float] = ..., decode_bytes_per_second: _Optional[float] = ..., ratio: _Optional[float] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("kind", "forward_seconds", "backward_seconds", "accumulate_seconds", "update_seconds", "cached", "failure", "declared")
    KIND_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    forward_seconds: float
    backward_seconds: float
    accumulate_seconds: float
    update_seconds: float
    cached: bool
    failure: str
    declared: bool
    def __init__(self, kind: _Optional[str] = ..., forward_seconds: _Optional[float] = ..., backward_seconds: _Optional[float] = ..., accumulate_seconds: _Optional[float] = ..., update_seconds: _Optional[float] = ..., cached: bool = ..., failure: _Optional[str] = ..., declared: bool = ...) -> None: ...

class Probed(_message.Message):
    __slots__ = ("number", "failure", "round_trip_seconds", "upload_bytes_per_second", "download_bytes_per_second", "relayed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    number: int
    failure: str
    round_trip_seconds: float
    upload_bytes_per_second: float
    download_bytes_per_second: float
    relayed: bool
    def __init__(self, number: _Optional[int] = ..., failure: _Optional[str] = ..., round_trip_seconds: _Optional[float] = ..., upload_bytes_per_second: _Optional[float] = ..., download_bytes_per_second: _Optional[float] = ..., relayed: bool = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("generation", "resident_bytes", "fetched_bytes", "fetch_seconds")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    resident_bytes: int
    fetched_bytes: int
    fetch_seconds: float
    def __init__(self, generation: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_seconds: _Optional[float] = ...) -> None: ...

class MicrobatchLoss(_message.Message):
    __slots__ = ("microbatch", "loss", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    microbatch: int
    loss: float
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, microbatch: _Optional[int] = ..., loss: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SquaredNorm(_message.Message):
    __slots__ = ("parameter", "value")
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    parameter: str
    value: float
    def __init__(self, parameter: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class LinkUse(_message.Message):
    __slots__ = ("source", "target", "direction", "codec", "bytes", "seconds_busy", "relative_error", "bytes_per_second", "round_trip_seconds", "messages", "raw_bytes", "guarded", "slope", "curvature", "bias")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BUSY_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    GUARDED_FIELD_NUMBER: _ClassVar[int]
    SLOPE_FIELD_NUMBER: _ClassVar[int]
    CURVATURE_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    direction: str
    codec: str
    bytes: int
    seconds_busy: float
    relative_error: float
    bytes_per_second: float
    round_trip_seconds: float
    messages: int
    raw_bytes: int
    guarded: int
    slope: float
    curvature: float
    bias: float
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., direction: _Optional[str] = ..., codec: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds_busy: _Optional[float] = ..., relative_error: _Optional[float] = ..., bytes_per_second: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ..., messages: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., guarded: _Optional[int] = ..., slope: _Optional[float] = ..., curvature: _Optional[float] = ..., bias: _Optional[float] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("what", "microbatch", "begin_seconds", "seconds", "peer")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    what: str
    microbatch: int
    begin_seconds: float
    seconds: float
    peer: str
    def __init__(self, what: _Optional[str] = ..., microbatch: _Optional[int] = ..., begin_seconds: _Optional[float] = ..., seconds: _Optional[float] = ..., peer: _Optional[str] = ...) -> None: ...

class StageReport(_message.Message):
    __slots__ = ("generation", "step", "evaluation", "losses", "squared_norms", "compute_seconds", "resident_bytes", "links", "spans")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORMS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    evaluation: bool
    losses: _containers.RepeatedCompositeFieldContainer[MicrobatchLoss]
    squared_norms: _containers.RepeatedCompositeFieldContainer[SquaredNorm]
    compute_seconds: float
    resident_bytes: int
    links: _containers.RepeatedCompositeFieldContainer[LinkUse]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., evaluation: bool = ..., losses: _Optional[_Iterable[_Union[MicrobatchLoss, _Mapping]]] = ..., squared_norms: _Optional[_Iterable[_Union[SquaredNorm, _Mapping]]] = ..., compute_seconds: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkUse, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("generation", "step", "kind", "reason", "accused")
    class FaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FAULT_UNSPECIFIED: _ClassVar[Fault.FaultKind]
        FAULT_NOT_FINITE: _ClassVar[Fault.FaultKind]
        FAULT_LINK: _ClassVar[Fault.FaultKind]
        FAULT_CORRUPT: _ClassVar[Fault.FaultKind]
        FAULT_REFUSED_GRAPH: _ClassVar[Fault.FaultKind]
        FAULT_MEMORY: _ClassVar[Fault.FaultKind]
        FAULT_INTERNAL: _ClassVar[Fault.FaultKind]
        FAULT_OUTLIER: _ClassVar[Fault.FaultKind]
    FAULT_UNSPECIFIED: Fault.FaultKind
    FAULT_NOT_FINITE: Fault.FaultKind
    FAULT_LINK: Fault.FaultKind
    FAULT_CORRUPT: Fault.FaultKind
    FAULT_REFUSED_GRAPH: Fault.FaultKind
    FAULT_MEMORY: Fault.FaultKind
    FAULT_INTERNAL: Fault.FaultKind
    FAULT_OUTLIER: Fault.FaultKind
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    kind: Fault.FaultKind
    reason: str
    accused: str
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., kind: _Optional[_Union[Fault.FaultKind, str]] = ..., reason: _Optional[str] = ..., accused: _Optional[str] = ...) -> None: ...

class Voided(_message.Message):
    __slots__ = ("generation", "step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("generation", "step", "phase", "waiting_for", "resident_bytes", "count", "fetched_bytes")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    phase: str
    waiting_for: str
    resident_bytes: int
    count: int
    fetched_bytes: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., waiting_for: _Optional[str] = ..., resident_bytes: _Optional[int] = ..., count: _Optional[int] = ..., fetched_bytes: _Optional[int] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("generation", "step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "hand_over_seconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    hand_over_seconds: float
    def __init__(self, reason: _Optional[str] = ..., hand_over_seconds: _Optional[float] = ...) -> None: ...

class SnapshotTaken(_message.Message):
    __slots__ = ("step", "failure", "num_bytes", "seconds", "stalled_seconds", "names")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    step: int
    failure: str
    num_bytes: int
    seconds: float
    stalled_seconds: float
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[int] = ..., failure: _Optional[str] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., stalled_seconds: _Optional[float] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class SnapshotCopied(_message.Message):
    __slots__ = ("step", "source", "failure", "num_bytes", "seconds", "names")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    step: int
    source: str
    failure: str
    num_bytes: int
    seconds: float
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[int] = ..., source: _Optional[str] = ..., failure: _Optional[str] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class PeerMessage(_message.Message):
    __slots__ = ("join", "ready", "report", "fault", "voided", "progress", "stored", "leave", "measured", "probed", "snapshot_taken", "snapshot_copied", "frame")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    VOIDED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_TAKEN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_COPIED_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    join: Join
    ready: Ready
    report: StageReport
    fault: Fault
    voided: Voided
    progress: Progress
    stored: Stored
    leave: Leave
    measured: Measured
    probed: Probed
    snapshot_taken: SnapshotTaken
    snapshot_copied: SnapshotCopied
    frame: _frames_pb2.Frame
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., report: _Optional[_Union[StageReport, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., voided: _Optional[_Union[Voided, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., stored: _Optional[_Union[Stored, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., probed: _Optional[_Union[Probed, _Mapping]] = ..., snapshot_taken: _Optional[_Union[SnapshotTaken, _Mapping]] = ..., snapshot_copied: _Optional[_Union[SnapshotCopied, _Mapping]] = ..., frame: _Optional[_Union[_frames_pb2.Frame, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run", "name", "run_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    run_id: str
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("reason", "again")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    again: bool
    def __init__(self, reason: _Optional[str] = ..., again: bool = ...) -> None: ...

class LinkCodec(_message.Message):
    __slots__ = ("target", "codec")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    target: str
    codec: str
    def __init__(self, target: _Optional[str] = ..., codec: _Optional[str] = ...) -> None: ...

class StartStep(_message.Message):
    __slots__ = ("generation", "step", "num_microbatches", "evaluation", "codecs")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    num_microbatches: int
    evaluation: bool
    codecs: _containers.RepeatedCompositeFieldContainer[LinkCodec]
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., num_microbatches: _Optional[int] = ..., evaluation: bool = ..., codecs: _Optional[_Iterable[_Union[LinkCodec, _Mapping]]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("generation", "step", "clip_factor", "learning_rate", "snapshot")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLIP_FACTOR_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    clip_factor: float
    learning_rate: float
    snapshot: bool
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., clip_factor: _Optional[float] = ..., learning_rate: _Optional[float] = ..., snapshot: bool = ...) -> None: ...

class Void(_message.Message):
    __slots__ = ("generation", "step", "next_generation", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEXT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    next_generation: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., next_generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Store(_message.Message):
    __slots__ = ("generation", "step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Lend(_message.Message):
    __slots__ = ("generation", "committed_step", "borrowers")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    BORROWERS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    committed_step: int
    borrowers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generation: _Optional[int] = ..., committed_step: _Optional[int] = ..., borrowers: _Optional[_Iterable[str]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class CopySnapshot(_message.Message):
    __slots__ = ("step", "source", "address", "names", "relayed")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    step: int
    source: str
    address: str
    names: _containers.RepeatedScalarFieldContainer[str]
    relayed: bool
    def __init__(self, step: _Optional[int] = ..., source: _Optional[str] = ..., address: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., relayed: bool = ...) -> None: ...

class KeepSnapshots(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, steps: _Optional[_Iterable[int]] = ...) -> None: ...

class MayLeave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CannotHandOver(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("number", "peer", "address", "limit_seconds", "latency_only", "relay")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_ONLY_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    number: int
    peer: str
    address: str
    limit_seconds: float
    latency_only: bool
    relay: bool
    def __init__(self, number: _Optional[int] = ..., peer: _Optional[str] = ..., address: _Optional[str] = ..., limit_seconds: _Optional[float] = ..., latency_only: bool = ..., relay: bool = ...) -> None: ...

class Permit(_message.Message):
    __slots__ = ("peer", "purpose", "step", "seconds")
    class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PERMIT_UNSPECIFIED: _ClassVar[Permit.Purpose]
        PERMIT_PROBE: _ClassVar[Permit.Purpose]
        PERMIT_COPY: _ClassVar[Permit.Purpose]
    PERMIT_UNSPECIFIED: Permit.Purpose
    PERMIT_PROBE: Permit.Purpose
    PERMIT_COPY: Permit.Purpose
    PEER_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    purpose: Permit.Purpose
    step: int
    seconds: float
    def __init__(self, peer: _Optional[str] = ..., purpose: _Optional[_Union[Permit.Purpose, str]] = ..., step: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("serials",)
    SERIALS_FIELD_NUMBER: _ClassVar[int]
    serials: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, serials: _Optional[_Iterable[str]] = ...) -> None: ...

class Reached(_message.Message):
    __slots__ = ("reachable", "reason")
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    reachable: bool
    reason: str
    def __init__(self, reachable: bool = ..., reason: _Optional[str] = ...) -> None: ...

class TunnelOffer(_message.Message):
    __slots__ = ("number", "source")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    number: int
    source: str
    def __init__(self, number: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("finished", "reason", "stopped")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    finished: bool
    reason: str
    stopped: bool
    def __init__(self, finished: bool = ..., reason: _Optional[str] = ..., stopped: bool = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "rejected", "frame", "start", "commit", "void", "store", "end", "probe", "lend", "release", "copy_snapshot", "keep_snapshots", "may_leave", "cannot_hand_over", "permit", "revoked", "reached", "tunnel")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    VOID_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    LEND_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    COPY_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    KEEP_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    MAY_LEAVE_FIELD_NUMBER: _ClassVar[int]
    CANNOT_HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    TUNNEL_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    rejected: Rejected
    frame: _frames_pb2.Frame
    start: StartStep
    commit: Commit
    void: Void
    store: Store
    end: End
    probe: Probe
    lend: Lend
    release: Release
    copy_snapshot: CopySnapshot
    keep_snapshots: KeepSnapshots
    may_leave: MayLeave
    cannot_hand_over: CannotHandOver
    permit: Permit
    revoked: Revoked
    reached: Reached
    tunnel: TunnelOffer
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., frame: _Optional[_Union[_frames_pb2.Frame, _Mapping]] = ..., start: _Optional[_Union[StartStep, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., void: _Optional[_Union[Void, _Mapping]] = ..., store: _Optional[_Union[Store, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., lend: _Optional[_Union[Lend, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., copy_snapshot: _Optional[_Union[CopySnapshot, _Mapping]] = ..., keep_snapshots: _Optional[_Union[KeepSnapshots, _Mapping]] = ..., may_leave: _Optional[_Union[MayLeave, _Mapping]] = ..., cannot_hand_over: _Optional[_Union[CannotHandOver, _Mapping]] = ..., permit: _Optional[_Union[Permit, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., reached: _Optional[_Union[Reached, _Mapping]] = ..., tunnel: _Optional[_Union[TunnelOffer, _Mapping]] = ...) -> None: ...

class FetchStateRequest(_message.Message):
    __slots__ = ("peer", "generation", "names", "max_bytes_per_second")
    PEER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    peer: str
    generation: int
    names: _containers.RepeatedScalarFieldContainer[str]
    max_bytes_per_second: float
    def __init__(self, peer: _Optional[str] = ..., generation: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., max_bytes_per_second: _Optional[float] = ...) -> None: ...
