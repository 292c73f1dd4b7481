from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dimension(_message.Message):
    __slots__ = ("size", "symbol", "operation")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    size: int
    symbol: str
    operation: Operation
    def __init__(self, size: _Optional[int] = ..., symbol: _Optional[str] = ..., operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("operator", "operands")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    OPERANDS_FIELD_NUMBER: _ClassVar[int]
    operator: str
    operands: _containers.RepeatedCompositeFieldContainer[Dimension]
    def __init__(self, operator: _Optional[str] = ..., operands: _Optional[_Iterable[_Union[Dimension, _Mapping]]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("shape", "dtype")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedCompositeFieldContainer[Dimension]
    dtype: str
    def __init__(self, shape: _Optional[_Iterable[_Union[Dimension, _Mapping]]] = ..., dtype: _Optional[str] = ...) -> None: ...

class ValueReference(_message.Message):
    __slots__ = ("node", "output")
    NODE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    node: int
    output: int
    def __init__(self, node: _Optional[int] = ..., output: _Optional[int] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ComplexNumber(_message.Message):
    __slots__ = ("real", "imaginary")
    REAL_FIELD_NUMBER: _ClassVar[int]
    IMAGINARY_FIELD_NUMBER: _ClassVar[int]
    real: float
    imaginary: float
    def __init__(self, real: _Optional[float] = ..., imaginary: _Optional[float] = ...) -> None: ...

class ArgumentList(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Argument]
    def __init__(self, items: _Optional[_Iterable[_Union[Argument, _Mapping]]] = ...) -> None: ...

class Argument(_message.Message):
    __slots__ = ("none", "boolean", "integer", "number", "complex", "text", "dtype", "layout", "memory_format", "own_device", "value", "parameter", "buffer", "input", "expression", "list")
    NONE_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMPLEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FORMAT_FIELD_NUMBER: _ClassVar[int]
    OWN_DEVICE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    none: Nothing
    boolean: bool
    integer: int
    number: float
    complex: ComplexNumber
    text: str
    dtype: str
    layout: str
    memory_format: str
    own_device: Nothing
    value: ValueReference
    parameter: str
    buffer: str
    input: str
    expression: Dimension
    list: ArgumentList
    def __init__(self, none: _Optional[_Union[Nothing, _Mapping]] = ..., boolean: bool = ..., integer: _Optional[int] = ..., number: _Optional[float] = ..., complex: _Optional[_Union[ComplexNumber, _Mapping]] = ..., text: _Optional[str] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ..., memory_format: _Optional[str] = ..., own_device: _Optional[_Union[Nothing, _Mapping]] = ..., value: _Optional[_Union[ValueReference, _Mapping]] = ..., parameter: _Optional[str] = ..., buffer: _Optional[str] = ..., input: _Optional[str] = ..., expression: _Optional[_Union[Dimension, _Mapping]] = ..., list: _Optional[_Union[ArgumentList, _Mapping]] = ...) -> None: ...

class Keyword(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: Argument
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[Argument, _Mapping]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("tensor",)
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    tensor: TensorSpec
    def __init__(self, tensor: _Optional[_Union[TensorSpec, _Mapping]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("index", "operator", "arguments", "keywords", "outputs", "module", "evaluation", "training_only", "no_gradient", "full_precision")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    KEYWORDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    TRAINING_ONLY_FIELD_NUMBER: _ClassVar[int]
    NO_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    FULL_PRECISION_FIELD_NUMBER: _ClassVar[int]
    index: int
    operator: str
    arguments: _containers.RepeatedCompositeFieldContainer[Argument]
    keywords: _containers.RepeatedCompositeFieldContainer[Keyword]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    module: str
    evaluation: ArgumentList
    training_only: bool
    no_gradient: bool
    full_precision: bool
    def __init__(self, index: _Optional[int] = ..., operator: _Optional[str] = ..., arguments: _Optional[_Iterable[_Union[Argument, _Mapping]]] = ..., keywords: _Optional[_Iterable[_Union[Keyword, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., module: _Optional[str] = ..., evaluation: _Optional[_Union[ArgumentList, _Mapping]] = ..., training_only: bool = ..., no_gradient: bool = ..., full_precision: bool = ...) -> None: ...

class Initialisation(_message.Message):
    __slots__ = ("nodes", "result", "seed")
    NODES_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    result: ValueReference
    seed: str
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., result: _Optional[_Union[ValueReference, _Mapping]] = ..., seed: _Optional[str] = ...) -> None: ...

class Parameter(_message.Message):
    __slots__ = ("name", "shape", "dtype", "frozen", "ties", "initialisation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    TIES_FIELD_NUMBER: _ClassVar[int]
    INITIALISATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    frozen: bool
    ties: _containers.RepeatedScalarFieldContainer[str]
    initialisation: Initialisation
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., frozen: bool = ..., ties: _Optional[_Iterable[str]] = ..., initialisation: _Optional[_Union[Initialisation, _Mapping]] = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ("name", "shape", "dtype", "persistent", "mutated", "ties", "initialisation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PERSISTENT_FIELD_NUMBER: _ClassVar[int]
    MUTATED_FIELD_NUMBER: _ClassVar[int]
    TIES_FIELD_NUMBER: _ClassVar[int]
    INITIALISATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    persistent: bool
    mutated: bool
    ties: _containers.RepeatedScalarFieldContainer[str]
    initialisation: Initialisation
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., persistent: bool = ..., mutated: bool = ..., ties: _Optional[_Iterable[str]] = ..., initialisation: _Optional[_Union[Initialisation, _Mapping]] = ...) -> None: ...

class NamedSpec(_message.Message):
    __slots__ = ("name", "spec")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: TensorSpec
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[TensorSpec, _Mapping]] = ...) -> None: ...

class NamedValue(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: ValueReference
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[ValueReference, _Mapping]] = ...) -> None: ...

class Example(_message.Message):
    __slots__ = ("symbol", "size")
    SYMBOL_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    symbol: str
    size: int
    def __init__(self, symbol: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class OpGraph(_message.Message):
    __slots__ = ("nodes", "parameters", "buffers", "inputs", "loss", "metrics", "example")
    NODES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    inputs: _containers.RepeatedCompositeFieldContainer[NamedSpec]
    loss: ValueReference
    metrics: _containers.RepeatedCompositeFieldContainer[NamedValue]
    example: _containers.RepeatedCompositeFieldContainer[Example]
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., inputs: _Optional[_Iterable[_Union[NamedSpec, _Mapping]]] = ..., loss: _Optional[_Union[ValueReference, _Mapping]] = ..., metrics: _Optional[_Iterable[_Union[NamedValue, _Mapping]]] = ..., example: _Optional[_Iterable[_Union[Example, _Mapping]]] = ...) -> None: ...

class Boundary(_message.Message):
    __slots__ = ("value", "spec", "source", "target", "differentiable")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DIFFERENTIABLE_FIELD_NUMBER: _ClassVar[int]
    value: ValueReference
    spec: TensorSpec
    source: int
    target: int
    differentiable: bool
    def __init__(self, value: _Optional[_Union[ValueReference, _Mapping]] = ..., spec: _Optional[_Union[TensorSpec, _Mapping]] = ..., source: _Optional[int] = ..., target: _Optional[int] = ..., differentiable: bool = ...) -> None: ...

class Use(_message.Message):
    __slots__ = ("node", "position", "stage")
    NODE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    node: int
    position: int
    stage: int
    def __init__(self, node: _Optional[int] = ..., position: _Optional[int] = ..., stage: _Optional[int] = ...) -> None: ...

class SharedParameter(_message.Message):
    __slots__ = ("name", "uses")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    name: str
    uses: _containers.RepeatedCompositeFieldContainer[Use]
    def __init__(self, name: _Optional[str] = ..., uses: _Optional[_Iterable[_Union[Use, _Mapping]]] = ...) -> None: ...

class StageGraph(_message.Message):
    __slots__ = ("stage", "num_stages", "nodes", "recomputed", "parameters", "buffers", "inputs", "receives", "sends", "shared", "loss", "metrics", "example")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVES_FIELD_NUMBER: _ClassVar[int]
    SENDS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_FIELD_NUMBER: _ClassVar[int]
    stage: int
    num_stages: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    recomputed: _containers.RepeatedScalarFieldContainer[int]
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    inputs: _containers.RepeatedCompositeFieldContainer[NamedSpec]
    receives: _containers.RepeatedCompositeFieldContainer[Boundary]
    sends: _containers.RepeatedCompositeFieldContainer[Boundary]
    shared: _containers.RepeatedCompositeFieldContainer[SharedParameter]
    loss: ValueReference
    metrics: _containers.RepeatedCompositeFieldContainer[NamedValue]
    example: _containers.RepeatedCompositeFieldContainer[Example]
    def __init__(self, stage: _Optional[int] = ..., num_stages: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., recomputed: _Optional[_Iterable[int]] = ..., parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., inputs: _Optional[_Iterable[_Union[NamedSpec, _Mapping]]] = ..., receives: _Optional[_Iterable[_Union[Boundary, _Mapping]]] = ..., sends: _Optional[_Iterable[_Union[Boundary, _Mapping]]] = ..., shared: _Optional[_Iterable[_Union[SharedParameter, _Mapping]]] = ..., loss: _Optional[_Union[ValueReference, _Mapping]] = ..., metrics: _Optional[_Iterable[_Union[NamedValue, _Mapping]]] = ..., example: _Optional[_Iterable[_Union[Example, _Mapping]]] = ...) -> None: ...

class Neighbour(_message.Message):
    __slots__ = ("stage", "peer", "address", "dial", "max_bytes_per_second", "codec", "relayed")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DIAL_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    stage: int
    peer: str
    address: str
    dial: bool
    max_bytes_per_second: float
    codec: str
    relayed: bool
    def __init__(self, stage: _Optional[int] = ..., peer: _Optional[str] = ..., address: _Optional[str] = ..., dial: bool = ..., max_bytes_per_second: _Optional[float] = ..., codec: _Optional[str] = ..., relayed: bool = ...) -> None: ...

class OptimizerSettings(_message.Message):
    __slots__ = ("name", "weight_decay", "momentum", "nesterov", "beta1", "beta2", "epsilon")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    NESTEROV_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight_decay: float
    momentum: float
    nesterov: bool
    beta1: float
    beta2: float
    epsilon: float
    def __init__(self, name: _Optional[str] = ..., weight_decay: _Optional[float] = ..., momentum: _Optional[float] = ..., nesterov: bool = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., epsilon: _Optional[float] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("stage", "replicas", "deal")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DEAL_FIELD_NUMBER: _ClassVar[int]
    stage: int
    replicas: _containers.RepeatedScalarFieldContainer[str]
    deal: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stage: _Optional[int] = ..., replicas: _Optional[_Iterable[str]] = ..., deal: _Optional[_Iterable[int]] = ...) -> None: ...

class Donor(_message.Message):
    __slots__ = ("peer", "address", "names", "relayed")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    address: str
    names: _containers.RepeatedScalarFieldContainer[str]
    relayed: bool
    def __init__(self, peer: _Optional[str] = ..., address: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., relayed: bool = ...) -> None: ...

class Averaging(_message.Message):
    __slots__ = ("transport", "compression", "bandwidths")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTHS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    compression: str
    bandwidths: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, transport: _Optional[str] = ..., compression: _Optional[str] = ..., bandwidths: _Optional[_Iterable[float]] = ...) -> None: ...

class LocalSteps(_message.Message):
    __slots__ = ("count", "optimizer")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    count: int
    optimizer: OptimizerSettings
    def __init__(self, count: _Optional[int] = ..., optimizer: _Optional[_Union[OptimizerSettings, _Mapping]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("generation", "graph", "neighbours", "run_seed", "in_flight", "recompute", "precision", "optimizer", "fetch", "link_seconds", "committed_step", "donors", "groups", "replica", "averaging", "local", "predicted_memory_bytes")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    RUN_SEED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    LINK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    graph: StageGraph
    neighbours: _containers.RepeatedCompositeFieldContainer[Neighbour]
    run_seed: int
    in_flight: int
    recompute: bool
    precision: str
    optimizer: OptimizerSettings
    fetch: _containers.RepeatedScalarFieldContainer[str]
    link_seconds: float
    committed_step: int
    donors: _containers.RepeatedCompositeFieldContainer[Donor]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    replica: int
    averaging: Averaging
    local: LocalSteps
    predicted_memory_bytes: int
    def __init__(self, generation: _Optional[int] = ..., graph: _Optional[_Union[StageGraph, _Mapping]] = ..., neighbours: _Optional[_Iterable[_Union[Neighbour, _Mapping]]] = ..., run_seed: _Optional[int] = ..., in_flight: _Optional[int] = ..., recompute: bool = ..., precision: _Optional[str] = ..., optimizer: _Optional[_Union[OptimizerSettings, _Mapping]] = ..., fetch: _Optional[_Iterable[str]] = ..., link_seconds: _Optional[float] = ..., committed_step: _Optional[int] = ..., donors: _Optional[_Iterable[_Union[Donor, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., replica: _Optional[int] = ..., averaging: _Optional[_Union[Averaging, _Mapping]] = ..., local: _Optional[_Union[LocalSteps, _Mapping]] = ..., predicted_memory_bytes: _Optional[int] = ...) -> None: ...

class MeasurementRequest(_message.Message):
    __slots__ = ("kind", "graph", "precision", "optimizer", "clips", "limit_seconds")
    KIND_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    CLIPS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    graph: StageGraph
    precision: str
    optimizer: OptimizerSettings
    clips: bool
    limit_seconds: float
    def __init__(self, kind: _Optional[str] = ..., graph: _Optional[_Union[StageGraph, _Mapping]] = ..., precision: _Optional[str] = ..., optimizer: _Optional[_Union[OptimizerSettings, _Mapping]] = ..., clips: bool = ..., limit_seconds: _Optional[float] = ...) -> None: ...
