"""Opens the checkpoint of a rank that started without it: its weights came from other ranks, and the files may appear later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from epserve.modular_kernel import QuantConfig

from .info import ModelInfo
from .unchanged import Stamp, UnchangedCheckpoint
from .weights import LayerWeights


class LateCheckpoint:
    """Acts as an UnchangedCheckpoint that is opened on first use. The constructor reads nothing."""

    def __init__(self, path: Path, dtype: str, *, start: Stamp, info: ModelInfo):
        self.info = info
        self._path, self._dtype, self._start = path, dtype, start
        self._opened: UnchangedCheckpoint | None = None
        self._served: dict[int, QuantConfig] = {}

    def check(self) -> None:
        """Raises CheckpointError when the checkpoint cannot be read."""
        self._open().check()

    def serve_as(self, served: Mapping[int, QuantConfig]) -> None:
        """Does the same as `Checkpoint.serve_as`, now or when the checkpoint is opened."""
        self._served = dict(served)
        if self._opened is not None:
            self._opened.serve_as(served)

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device | str = "cpu") -> LayerWeights:
        """Returns the weights of `layer`, as `Checkpoint.load_layer` does. Raises CheckpointError."""
        return self._open().load_layer(layer, experts, device)

    def _open(self) -> UnchangedCheckpoint:
        if self._opened is None:
            self._opened = UnchangedCheckpoint(self._path, self._dtype, start=self._start)
            self._opened.serve_as(self._served)
        return self._opened
