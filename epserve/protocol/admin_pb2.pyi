from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class RebalanceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RebalanceReply(_message.Message):
    __slots__ = ("layers", "skipped", "moved", "imbalance_before", "imbalance_after", "seconds")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_AFTER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    skipped: _containers.RepeatedScalarFieldContainer[int]
    moved: int
    imbalance_before: float
    imbalance_after: float
    seconds: float
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., skipped: _Optional[_Iterable[int]] = ..., moved: _Optional[int] = ..., imbalance_before: _Optional[float] = ..., imbalance_after: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

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
