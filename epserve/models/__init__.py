"""Turns checkpoints on disk into one rank's weights."""

from .checkpoint import Checkpoint, open_checkpoint
from .families import FAMILIES
from .info import ModelInfo
from .late import LateCheckpoint
from .unchanged import Stamp, UnchangedCheckpoint
from .weights import LayerWeights, SharedExperts

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "LateCheckpoint",
    "LayerWeights",
    "ModelInfo",
    "SharedExperts",
    "Stamp",
    "UnchangedCheckpoint",
    "open_checkpoint",
]
