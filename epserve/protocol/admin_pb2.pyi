from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RebalanceRequest(_message.Message):
    __slots__ = ("explain",)
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    explain: bool
    def __init__(self, explain: _Optional[bool] = ...) -> None: ...

class RebalanceReply(_message.Message):
    __slots__ = ("layers", "skipped", "moved", "imbalance_before", "imbalance_after", "seconds", "moves")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_AFTER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    skipped: _containers.RepeatedScalarFieldContainer[int]
    moved: int
    imbalance_before: float
    imbalance_after: float
    seconds: float
    moves: _containers.RepeatedCompositeFieldContainer[LayerMoves]
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., skipped: _Optional[_Iterable[int]] = ..., moved: _Optional[int] = ..., imbalance_before: _Optional[float] = ..., imbalance_after: _Optional[float] = ..., seconds: _Optional[float] = ..., moves: _Optional[_Iterable[_Union[LayerMoves, _Mapping]]] = ...) -> None: ...

class LayerMoves(_message.Message):
    __slots__ = ("layer", "moved", "bytes", "imbalance_before", "imbalance_after", "reason")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_AFTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    layer: int
    moved: int
    bytes: int
    imbalance_before: float
    imbalance_after: float
    reason: str
    def __init__(self, layer: _Optional[int] = ..., moved: _Optional[int] = ..., bytes: _Optional[int] = ..., imbalance_before: _Optional[float] = ..., imbalance_after: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    def __init__(self, ranks: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("before", "after", "seconds", "paused_seconds")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    before: int
    after: int
    seconds: float
    paused_seconds: float
    def __init__(self, before: _Optional[int] = ..., after: _Optional[int] = ..., seconds: _Optional[float] = ..., paused_seconds: _Optional[float] = ...) -> None: ...
