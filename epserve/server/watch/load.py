"""Computes the load of ranks and slots from tokens of logical experts. Pure functions of an EngineStatus, with NumPy only.

Legend: L served layers, E logical experts, P slots (physical experts) of all ranks, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_HEAT_CELLS = 20_000
"""The most cells of the status page's heat map. With more layers, neighbouring layers are added up."""
HOT_EXPERTS = 8
"""The number of hottest experts that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Describes the places of experts. `experts_LP`: each slot's logical expert. `bounds`: each rank's first slot, and P."""

    layers: tuple[int, ...]
    experts_LP: np.ndarray
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, status: Any) -> Layout | None:
        """Returns the layout of a status, or None while the ranks are not up, or change."""
        layers = tuple(status.expert_tokens)
        own = [expert for rank in status.ranks for expert in rank.experts]
        rows = [status.slots.get(layer, own) for layer in layers]
        if not layers or not own or any(len(row) != len(own) for row in rows):
            return None
        bounds = np.cumsum([0, *(len(rank.experts) for rank in status.ranks)])
        return cls(layers=layers, experts_LP=np.array(rows, dtype=np.int64), bounds=tuple(bounds.tolist()))

    def slot_loads(self, tokens_LE: np.ndarray) -> np.ndarray:
        """Returns `(L, P)` floats: an expert's tokens go to its copies in equal shares."""
        copies_LE = np.zeros(tokens_LE.shape, dtype=np.int64)
        rows = np.arange(len(self.layers))[:, None]
        np.add.at(copies_LE, (rows, self.experts_LP), 1)
        return tokens_LE[rows, self.experts_LP] / copies_LE[rows, self.experts_LP]

    def rank_loads(self, tokens_LE: np.ndarray) -> np.ndarray:
        """Returns `(R,)` floats, summed over all layers."""
        per_slot = self.slot_loads(tokens_LE).sum(axis=0)
        return np.array([per_slot[low:high].sum() for low, high in zip(self.bounds, self.bounds[1:], strict=False)])


def heat(layout: Layout | None, tokens_LE: np.ndarray) -> dict[str, Any]:
    """Returns rows of layers and columns of slots in percent of the row's mean, so that 100 is a fair share.

    `experts` has for each row the logical expert of each slot. It is empty if a row stands for several layers.
    """
    if layout is None or tokens_LE.shape[0] != len(layout.layers):
        return {"rows": [], "percent": [], "experts": []}
    loads_LP = layout.slot_loads(tokens_LE)
    group = max(1, -(-loads_LP.size // MAX_HEAT_CELLS))
    rows, percent, experts = [], [], []
    for start in range(0, len(loads_LP), group):
        together = loads_LP[start : start + group].sum(axis=0)
        named, mean = layout.layers[start : start + group], together.mean() or 1.0
        rows.append(f"layer {named[0]}" if len(named) == 1 else f"layers {named[0]} to {named[-1]}")
        percent.append(np.rint(100 * together / mean).astype(int).tolist())
        experts.append(layout.experts_LP[start].tolist() if len(named) == 1 else [])
    return {"rows": rows, "percent": percent, "experts": experts}


def hottest(layout: Layout | None, tokens_LE: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yields the experts with most tokens over all layers, and the ranks that hold copies in some layer."""
    if layout is None or not tokens_LE.sum():
        return
    tokens_E = tokens_LE.sum(axis=0)
    for expert in np.argsort(-tokens_E, kind="stable")[:HOT_EXPERTS].tolist():
        slots = np.unique(np.nonzero(layout.experts_LP == expert)[1])
        ranks = np.unique(np.searchsorted(layout.bounds, slots, side="right") - 1)
        yield {
            "expert": expert,
            "tokens": int(tokens_E[expert]),
            "percent": round(100 * float(tokens_E[expert] / tokens_E.mean())),
            "ranks": ranks.tolist(),
        }
