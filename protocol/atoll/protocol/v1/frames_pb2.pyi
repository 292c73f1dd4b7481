from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_BATCH: _ClassVar[Kind]
    KIND_ACTIVATION: _ClassVar[Kind]
    KIND_GRADIENT: _ClassVar[Kind]
    KIND_TIED_GRADIENT: _ClassVar[Kind]
    KIND_STATE: _ClassVar[Kind]
    KIND_ASSIGNMENT: _ClassVar[Kind]
    KIND_MEASUREMENT: _ClassVar[Kind]
    KIND_PART: _ClassVar[Kind]
    KIND_TOTAL: _ClassVar[Kind]
    KIND_AGREEMENT: _ClassVar[Kind]
KIND_UNSPECIFIED: Kind
KIND_BATCH: Kind
KIND_ACTIVATION: Kind
KIND_GRADIENT: Kind
KIND_TIED_GRADIENT: Kind
KIND_STATE: Kind
KIND_ASSIGNMENT: Kind
KIND_MEASUREMENT: Kind
KIND_PART: Kind
KIND_TOTAL: Kind
KIND_AGREEMENT: Kind

class MessageKey(_message.Message):
    __slots__ = ("generation", "step", "microbatch", "kind", "source_stage", "target_stage", "evaluation")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_STAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_STAGE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    microbatch: int
    kind: Kind
    source_stage: int
    target_stage: int
    evaluation: bool
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., microbatch: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., source_stage: _Optional[int] = ..., target_stage: _Optional[int] = ..., evaluation: bool = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("name", "dtype", "shape", "codec", "num_bytes", "order")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: str
    num_bytes: int
    order: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[str] = ..., num_bytes: _Optional[int] = ..., order: _Optional[_Iterable[int]] = ...) -> None: ...

class MessageHeader(_message.Message):
    __slots__ = ("key", "tensors", "numbers", "num_bytes", "checksum", "attempt", "chunk_bytes", "header_checksum")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADER_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    key: MessageKey
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    numbers: _containers.ScalarMap[str, float]
    num_bytes: int
    checksum: int
    attempt: int
    chunk_bytes: int
    header_checksum: int
    def __init__(self, key: _Optional[_Union[MessageKey, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ..., numbers: _Optional[_Mapping[str, float]] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., attempt: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., header_checksum: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("peer", "generation", "protocol_version")
    PEER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    peer: str
    generation: int
    protocol_version: int
    def __init__(self, peer: _Optional[str] = ..., generation: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("message", "hello", "header", "chunk", "acknowledged", "refused", "credit", "ping", "pong")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    message: int
    hello: Hello
    header: MessageHeader
    chunk: bytes
    acknowledged: Acknowledged
    refused: Refused
    credit: Credit
    ping: int
    pong: int
    def __init__(self, message: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., header: _Optional[_Union[MessageHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., ping: _Optional[int] = ..., pong: _Optional[int] = ...) -> None: ...

class Acknowledged(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "final")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    final: bool
    def __init__(self, reason: _Optional[str] = ..., final: bool = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("generation", "kind", "messages")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    kind: Kind
    messages: int
    def __init__(self, generation: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., messages: _Optional[int] = ...) -> None: ...
