"""Checkpoints on disk -> one rank's weights."""

from .checkpoint import Checkpoint, LayerWeights, SharedExperts, open_checkpoint
from .families import FAMILIES
from .info import ModelInfo
from .unchanged import Stamp, UnchangedCheckpoint

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "LayerWeights",
    "ModelInfo",
    "SharedExperts",
    "Stamp",
    "UnchangedCheckpoint",
    "open_checkpoint",
]
