from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    BF16: _ClassVar[DType]
    FP16: _ClassVar[DType]
    FP32: _ClassVar[DType]
    FP64: _ClassVar[DType]
    INT8: _ClassVar[DType]
    INT16: _ClassVar[DType]
    INT32: _ClassVar[DType]
    INT64: _ClassVar[DType]
    UINT8: _ClassVar[DType]
    UINT16: _ClassVar[DType]
    UINT32: _ClassVar[DType]
    FP8_E4M3: _ClassVar[DType]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    LOW: _ClassVar[Priority]
    NORMAL: _ClassVar[Priority]
    HIGH: _ClassVar[Priority]

class Field(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FIELD_UNSPECIFIED: _ClassVar[Field]
    HIDDEN_STATES: _ClassVar[Field]
    TOPK_IDS: _ClassVar[Field]
    TOPK_WEIGHTS: _ClassVar[Field]
    HIDDEN_SCALES: _ClassVar[Field]
    OUTPUT_GRADIENTS: _ClassVar[Field]
DTYPE_UNSPECIFIED: DType
BF16: DType
FP16: DType
FP32: DType
FP64: DType
INT8: DType
INT16: DType
INT32: DType
INT64: DType
UINT8: DType
UINT16: DType
UINT32: DType
FP8_E4M3: DType
PRIORITY_UNSPECIFIED: Priority
LOW: Priority
NORMAL: Priority
HIGH: Priority
FIELD_UNSPECIFIED: Field
HIDDEN_STATES: Field
TOPK_IDS: Field
TOPK_WEIGHTS: Field
HIDDEN_SCALES: Field
OUTPUT_GRADIENTS: Field

class Tensor(_message.Message):
    __slots__ = ("data", "dtype", "shape", "region")
    DATA_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    region: RegionSlice
    def __init__(self, data: _Optional[bytes] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., region: _Optional[_Union[RegionSlice, _Mapping]] = ...) -> None: ...

class RegionSlice(_message.Message):
    __slots__ = ("region", "offset", "byte_size")
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    region: str
    offset: int
    byte_size: int
    def __init__(self, region: _Optional[str] = ..., offset: _Optional[int] = ..., byte_size: _Optional[int] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("request_id", "layer", "hidden_states", "topk_ids", "topk_weights", "timeout_ms", "hidden_scales", "output", "reply_dtype", "priority", "keep_not_finite", "output_gradients")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    TOPK_IDS_FIELD_NUMBER: _ClassVar[int]
    TOPK_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SCALES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REPLY_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    KEEP_NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    layer: int
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    timeout_ms: int
    hidden_scales: Tensor
    output: RegionSlice
    reply_dtype: DType
    priority: Priority
    keep_not_finite: bool
    output_gradients: Tensor
    def __init__(self, request_id: _Optional[str] = ..., layer: _Optional[int] = ..., hidden_states: _Optional[_Union[Tensor, _Mapping]] = ..., topk_ids: _Optional[_Union[Tensor, _Mapping]] = ..., topk_weights: _Optional[_Union[Tensor, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., hidden_scales: _Optional[_Union[Tensor, _Mapping]] = ..., output: _Optional[_Union[RegionSlice, _Mapping]] = ..., reply_dtype: _Optional[_Union[DType, str]] = ..., priority: _Optional[_Union[Priority, str]] = ..., keep_not_finite: _Optional[bool] = ..., output_gradients: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class ForwardReply(_message.Message):
    __slots__ = ("request_id", "hidden_states", "timings", "hidden_scales", "left_out_experts", "not_finite_rows", "topk_weights", "gradients")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SCALES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_ROWS_FIELD_NUMBER: _ClassVar[int]
    TOPK_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    hidden_states: Tensor
    timings: Timings
    hidden_scales: Tensor
    left_out_experts: _containers.RepeatedScalarFieldContainer[int]
    not_finite_rows: _containers.RepeatedScalarFieldContainer[int]
    topk_weights: Tensor
    gradients: bool
    def __init__(self, request_id: _Optional[str] = ..., hidden_states: _Optional[_Union[Tensor, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., hidden_scales: _Optional[_Union[Tensor, _Mapping]] = ..., left_out_experts: _Optional[_Iterable[int]] = ..., not_finite_rows: _Optional[_Iterable[int]] = ..., topk_weights: _Optional[_Union[Tensor, _Mapping]] = ..., gradients: _Optional[bool] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("codec_us", "engine_us", "queue_us", "steps_us")
    CODEC_US_FIELD_NUMBER: _ClassVar[int]
    ENGINE_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    STEPS_US_FIELD_NUMBER: _ClassVar[int]
    codec_us: int
    engine_us: int
    queue_us: int
    steps_us: int
    def __init__(self, codec_us: _Optional[int] = ..., engine_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., steps_us: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("field", "data")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    field: Field
    data: bytes
    def __init__(self, field: _Optional[_Union[Field, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestFrame(_message.Message):
    __slots__ = ("call", "begin", "part", "cancel")
    CALL_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    call: int
    begin: ForwardRequest
    part: Part
    cancel: Cancel
    def __init__(self, call: _Optional[int] = ..., begin: _Optional[_Union[ForwardRequest, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class ReplyFrame(_message.Message):
    __slots__ = ("call", "begin", "part", "failure")
    CALL_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    call: int
    begin: ForwardReply
    part: Part
    failure: Failure
    def __init__(self, call: _Optional[int] = ..., begin: _Optional[_Union[ForwardReply, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "error", "message", "field", "retryable", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    error: str
    message: str
    field: str
    retryable: bool
    retry_after_ms: int
    def __init__(self, code: _Optional[str] = ..., error: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class HoldRegionRequest(_message.Message):
    __slots__ = ("key", "offset", "byte_size", "proof", "cuda")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    key: str
    offset: int
    byte_size: int
    proof: bytes
    cuda: CudaMemory
    def __init__(self, key: _Optional[str] = ..., offset: _Optional[int] = ..., byte_size: _Optional[int] = ..., proof: _Optional[bytes] = ..., cuda: _Optional[_Union[CudaMemory, _Mapping]] = ...) -> None: ...

class CudaMemory(_message.Message):
    __slots__ = ("handle", "gpu_uuid")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    gpu_uuid: str
    def __init__(self, handle: _Optional[bytes] = ..., gpu_uuid: _Optional[str] = ...) -> None: ...

class HoldRegionReply(_message.Message):
    __slots__ = ("region", "doorbell", "doorbell_key")
    REGION_FIELD_NUMBER: _ClassVar[int]
    DOORBELL_FIELD_NUMBER: _ClassVar[int]
    DOORBELL_KEY_FIELD_NUMBER: _ClassVar[int]
    region: str
    doorbell: str
    doorbell_key: bytes
    def __init__(self, region: _Optional[str] = ..., doorbell: _Optional[str] = ..., doorbell_key: _Optional[bytes] = ...) -> None: ...

class OpenLaneRequest(_message.Message):
    __slots__ = ("max_tokens", "slots", "layers", "timeout_ms", "priority", "cuda", "proof")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    slots: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    timeout_ms: int
    priority: Priority
    cuda: CudaMemory
    proof: bytes
    def __init__(self, max_tokens: _Optional[int] = ..., slots: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., timeout_ms: _Optional[int] = ..., priority: _Optional[_Union[Priority, str]] = ..., cuda: _Optional[_Union[CudaMemory, _Mapping]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class OpenLaneReply(_message.Message):
    __slots__ = ("lane", "socket", "key", "byte_size", "slots", "max_tokens", "dtype", "hidden", "top_k", "layers", "timeout_ms", "queued")
    LANE_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    lane: str
    socket: str
    key: bytes
    byte_size: int
    slots: int
    max_tokens: int
    dtype: DType
    hidden: int
    top_k: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    timeout_ms: int
    queued: bool
    def __init__(self, lane: _Optional[str] = ..., socket: _Optional[str] = ..., key: _Optional[bytes] = ..., byte_size: _Optional[int] = ..., slots: _Optional[int] = ..., max_tokens: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., hidden: _Optional[int] = ..., top_k: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., timeout_ms: _Optional[int] = ..., queued: _Optional[bool] = ...) -> None: ...

class ListRegionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegionInfo(_message.Message):
    __slots__ = ("region", "key", "offset", "byte_size", "users", "gpu_uuid")
    REGION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    region: str
    key: str
    offset: int
    byte_size: int
    users: int
    gpu_uuid: str
    def __init__(self, region: _Optional[str] = ..., key: _Optional[str] = ..., offset: _Optional[int] = ..., byte_size: _Optional[int] = ..., users: _Optional[int] = ..., gpu_uuid: _Optional[str] = ...) -> None: ...

class ListRegionsReply(_message.Message):
    __slots__ = ("regions",)
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[RegionInfo]
    def __init__(self, regions: _Optional[_Iterable[_Union[RegionInfo, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Gate(_message.Message):
    __slots__ = ("scoring", "top_k", "renormalise", "renormalise_epsilon", "num_groups", "top_groups", "group_score", "correction_bias", "routed_scaling_factor", "logits_float32", "round_weights", "sorted", "refusal")
    SCORING_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    RENORMALISE_FIELD_NUMBER: _ClassVar[int]
    RENORMALISE_EPSILON_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOP_GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SCORE_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_BIAS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_SCALING_FACTOR_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FLOAT32_FIELD_NUMBER: _ClassVar[int]
    ROUND_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SORTED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    scoring: str
    top_k: int
    renormalise: bool
    renormalise_epsilon: float
    num_groups: int
    top_groups: int
    group_score: str
    correction_bias: bool
    routed_scaling_factor: float
    logits_float32: bool
    round_weights: bool
    sorted: bool
    refusal: str
    def __init__(self, scoring: _Optional[str] = ..., top_k: _Optional[int] = ..., renormalise: _Optional[bool] = ..., renormalise_epsilon: _Optional[float] = ..., num_groups: _Optional[int] = ..., top_groups: _Optional[int] = ..., group_score: _Optional[str] = ..., correction_bias: _Optional[bool] = ..., routed_scaling_factor: _Optional[float] = ..., logits_float32: _Optional[bool] = ..., round_weights: _Optional[bool] = ..., sorted: _Optional[bool] = ..., refusal: _Optional[str] = ...) -> None: ...

class Activation(_message.Message):
    __slots__ = ("kind", "gated", "limit", "alpha", "output_norm_eps")
    KIND_FIELD_NUMBER: _ClassVar[int]
    GATED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_NORM_EPS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    gated: bool
    limit: float
    alpha: float
    output_norm_eps: float
    def __init__(self, kind: _Optional[str] = ..., gated: _Optional[bool] = ..., limit: _Optional[float] = ..., alpha: _Optional[float] = ..., output_norm_eps: _Optional[float] = ...) -> None: ...

class GetModelReply(_message.Message):
    __slots__ = ("family", "name", "hidden", "intermediate", "num_experts", "top_k", "dtype", "layers", "activation", "scoring", "shared_intermediate", "quantisation", "fingerprint", "max_tokens_per_request", "max_message_bytes", "server_version", "gate", "expert_activation")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    SCORING_FIELD_NUMBER: _ClassVar[int]
    SHARED_INTERMEDIATE_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    family: str
    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: DType
    layers: _containers.RepeatedScalarFieldContainer[int]
    activation: str
    scoring: str
    shared_intermediate: int
    quantisation: str
    fingerprint: str
    max_tokens_per_request: int
    max_message_bytes: int
    server_version: str
    gate: Gate
    expert_activation: Activation
    def __init__(self, family: _Optional[str] = ..., name: _Optional[str] = ..., hidden: _Optional[int] = ..., intermediate: _Optional[int] = ..., num_experts: _Optional[int] = ..., top_k: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., layers: _Optional[_Iterable[int]] = ..., activation: _Optional[str] = ..., scoring: _Optional[str] = ..., shared_intermediate: _Optional[int] = ..., quantisation: _Optional[str] = ..., fingerprint: _Optional[str] = ..., max_tokens_per_request: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., server_version: _Optional[str] = ..., gate: _Optional[_Union[Gate, _Mapping]] = ..., expert_activation: _Optional[_Union[Activation, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LayerExperts(_message.Message):
    __slots__ = ("layer", "experts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "node", "pid", "device", "gpu_uuid", "experts", "tokens_done", "weights_bytes", "alive", "phase", "expert_tokens", "late_compiles", "phase_seconds", "layer_experts", "experts_choices")
    class PhaseSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATE_COMPILES_FIELD_NUMBER: _ClassVar[int]
    PHASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAYER_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_CHOICES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node: str
    pid: int
    device: str
    gpu_uuid: str
    experts: _containers.RepeatedScalarFieldContainer[int]
    tokens_done: int
    weights_bytes: int
    alive: bool
    phase: str
    expert_tokens: _containers.RepeatedScalarFieldContainer[int]
    late_compiles: int
    phase_seconds: _containers.ScalarMap[str, float]
    layer_experts: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    experts_choices: _containers.RepeatedCompositeFieldContainer[ExpertsChoice]
    def __init__(self, rank: _Optional[int] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., gpu_uuid: _Optional[str] = ..., experts: _Optional[_Iterable[int]] = ..., tokens_done: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., alive: _Optional[bool] = ..., phase: _Optional[str] = ..., expert_tokens: _Optional[_Iterable[int]] = ..., late_compiles: _Optional[int] = ..., phase_seconds: _Optional[_Mapping[str, float]] = ..., layer_experts: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ..., experts_choices: _Optional[_Iterable[_Union[ExpertsChoice, _Mapping]]] = ...) -> None: ...

class ExpertsChoice(_message.Message):
    __slots__ = ("rows", "backend", "microseconds")
    class MicrosecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    backend: str
    microseconds: _containers.ScalarMap[str, float]
    def __init__(self, rows: _Optional[int] = ..., backend: _Optional[str] = ..., microseconds: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("p50_ms", "p90_ms", "p99_ms", "count")
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P90_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    p50_ms: float
    p90_ms: float
    p99_ms: float
    count: int
    def __init__(self, p50_ms: _Optional[float] = ..., p90_ms: _Optional[float] = ..., p99_ms: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("tokens", "requests", "errors", "steps")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    tokens: float
    requests: float
    errors: float
    steps: float
    def __init__(self, tokens: _Optional[float] = ..., requests: _Optional[float] = ..., errors: _Optional[float] = ..., steps: _Optional[float] = ...) -> None: ...

class Lanes(_message.Message):
    __slots__ = ("open", "calls", "joined", "refused", "waited", "polling_share", "on_gpu", "gpu_polling_share")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    POLLING_SHARE_FIELD_NUMBER: _ClassVar[int]
    ON_GPU_FIELD_NUMBER: _ClassVar[int]
    GPU_POLLING_SHARE_FIELD_NUMBER: _ClassVar[int]
    open: int
    calls: int
    joined: int
    refused: int
    waited: int
    polling_share: float
    on_gpu: int
    gpu_polling_share: float
    def __init__(self, open: _Optional[int] = ..., calls: _Optional[int] = ..., joined: _Optional[int] = ..., refused: _Optional[int] = ..., waited: _Optional[int] = ..., polling_share: _Optional[float] = ..., on_gpu: _Optional[int] = ..., gpu_polling_share: _Optional[float] = ...) -> None: ...

class GetStatusReply(_message.Message):
    __slots__ = ("state", "generation", "steps", "ranks", "queue_tokens", "backends", "calls_in_flight", "buffered_bytes", "uptime_s", "server_version", "recoveries", "replayed_requests", "latency", "rates", "spares", "rebalances", "rebalances_skipped", "front_ends", "missing_experts", "lanes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    CALLS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    REBALANCES_FIELD_NUMBER: _ClassVar[int]
    REBALANCES_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    FRONT_ENDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    state: str
    generation: int
    steps: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    queue_tokens: int
    backends: str
    calls_in_flight: int
    buffered_bytes: int
    uptime_s: float
    server_version: str
    recoveries: int
    replayed_requests: int
    latency: Latency
    rates: Rates
    spares: int
    rebalances: int
    rebalances_skipped: int
    front_ends: int
    missing_experts: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    lanes: Lanes
    def __init__(self, state: _Optional[str] = ..., generation: _Optional[int] = ..., steps: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., queue_tokens: _Optional[int] = ..., backends: _Optional[str] = ..., calls_in_flight: _Optional[int] = ..., buffered_bytes: _Optional[int] = ..., uptime_s: _Optional[float] = ..., server_version: _Optional[str] = ..., recoveries: _Optional[int] = ..., replayed_requests: _Optional[int] = ..., latency: _Optional[_Union[Latency, _Mapping]] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., spares: _Optional[int] = ..., rebalances: _Optional[int] = ..., rebalances_skipped: _Optional[int] = ..., front_ends: _Optional[int] = ..., missing_experts: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ..., lanes: _Optional[_Union[Lanes, _Mapping]] = ...) -> None: ...
