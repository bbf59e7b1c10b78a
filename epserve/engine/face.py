"""The face of an engine: the methods that servers and joined front ends use. No Ray.

`Engine` has the ranks in its own process. `RemoteEngine` (room `joining`) passes everything to another process.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from .planning import Answer, Batch
from .records import StepRecord

log = logging.getLogger(__name__)


class OpenedRegion(Protocol):
    """A client's GPU memory that a rank has open."""

    @property
    def number(self) -> int: ...

    @property
    def handle(self) -> bytes: ...

    @property
    def offset(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def gpu_uuid(self) -> str: ...


class RegionOpener(Protocol):
    """Opens GPU memory of clients on the ranks of this host (`DeviceRegions`, `RemoteDeviceRegions`)."""

    @property
    def offered(self) -> bool:
        """Whether a rank of this host may compute on a GPU."""
        ...

    async def open(
        self,
        *,
        handle: bytes,
        offset: int,
        size: int,
        proof: bytes = b"",
        gpu_uuid: str = "",
        device_id: int | None = None,
    ) -> Any:
        """Returns an OpenedRegion. Raises InvalidRequest or NotReady."""
        ...

    def close(self, region: Any) -> None: ...


class LaneOpener(Protocol):
    """Opens lanes whose rows lie on GPUs of this host's ranks (`DeviceRegions`)."""

    async def open(
        self, *, handle: bytes, offset: int, size: int, proof: bytes = b"", gpu_uuid: str = "",
        device_id: int | None = None, lane: Callable[[], dict[str, Any]] | None = None,
    ) -> Any:  # fmt: skip
        """Returns the region of its slots, with `most` tokens of a call, and `lost`, why no rank serves it any more."""
        ...

    def close(self, region: Any) -> None: ...

    async def lanes(self) -> dict[int, dict[str, Any]]:
        """Returns what each lane has done, by the number of its region."""
        ...


class QuickSteps(Protocol):
    """Steps that a thread of its own runs at once (`StepsNow`)."""

    max_tokens: int
    """Most tokens of one step."""

    @property
    def join_wait_s(self) -> float: ...

    def memory(self, nbytes: int) -> Any: ...

    def ready(self, batches: Sequence[Batch]) -> Any: ...

    def run(self, ready: Any) -> list[torch.Tensor] | None: ...

    def tell(self) -> None: ...


class LaneServer(Protocol):
    """Lets the only rank serve lanes in this host's memory itself (`direct_lanes.DirectLanes`)."""

    cpu_s: float
    max_tokens: int

    @property
    def possible(self) -> bool: ...

    async def give(self, lane: Mapping[str, Any], name: str, done: Callable[[Any], None]) -> Any: ...

    def take(self, served: Any) -> None: ...

    async def news(self) -> None: ...


class EngineFace(ABC):
    """Runs batches, tells its state, and carries out an operator's changes. All methods run in one event loop."""

    info: Any
    """The ModelInfo of the checkpoint, or an object with its public fields."""

    def __init__(self) -> None:
        self._state_listeners: list[Callable[[Any], None]] = []
        self._step_listeners: list[Callable[[StepRecord], None]] = []

    @property
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """The MoE layers that are served."""

    @abstractmethod
    async def answer(self, batch: Batch) -> Answer:
        """Runs one layer on one batch. Raises only EpserveErrors."""

    async def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the result of `answer` alone."""
        return (await self.answer(batch)).out_MK

    def buffer(self, nbytes: int) -> Any:
        """Returns a writable buffer for a request's bytes, if possible in memory that the ranks share."""
        return bytearray(nbytes)

    @property
    def now(self) -> QuickSteps | None:
        """Returns the steps of other threads than the loop's, or None while there are none."""
        return None

    @property
    def device_regions(self) -> RegionOpener | None:
        """Opens memory of clients on the GPUs of this host's ranks. None: there are no ranks that could."""
        return None

    @property
    def lane_opener(self) -> LaneOpener | None:
        """Opens lanes on the GPUs of this host's ranks. None: there are no ranks in this process."""
        return None

    @property
    def direct_lanes(self) -> LaneServer | None:
        """Lets a rank serve lanes itself. None: there is no rank in this process that could."""
        return None

    @abstractmethod
    def state(self) -> str:
        """Returns a State (`records`), or "disconnected" in a front end whose ranks cannot be reached."""

    @abstractmethod
    def status(self) -> Any:
        """Returns the EngineStatus, or an object with its fields."""

    def on_state_change(self, callback: Callable[[Any], None]) -> None:
        """Calls `callback(state)` in the loop after each change."""
        self._state_listeners.append(callback)

    def on_step(self, callback: Callable[[StepRecord], None]) -> None:
        """Calls `callback(record)` in the loop after each finished step with requests of this process. It must be quick."""
        self._step_listeners.append(callback)

    def _tell_state(self, state: str) -> None:
        _tell(self._state_listeners, state)

    def _tell_step(self, record: StepRecord) -> None:
        _tell(self._step_listeners, record)

    @abstractmethod
    async def rebalance(self, explain: bool = False) -> Any:
        """Moves experts to balance the counted load, while serving. Returns a Rebalance. Raises NotReady, RankFailed.

        explain: moves nothing, and returns the reasons for and against a move.
        """

    @abstractmethod
    async def scale(self, ranks: int) -> Any:
        """Goes on with another number of ranks. Returns a Resize. Raises NotReady, ConfigError."""


def _tell(listeners: Sequence[Callable[[Any], None]], what: Any) -> None:
    for callback in listeners:
        try:
            callback(what)
        except Exception:  # a listener's defect must stop neither a step nor a recovery
            log.exception("a listener of the engine failed")
