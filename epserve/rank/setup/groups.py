"""Groups of layers that are stored and served alike: the rows of a rank's plan. Pure functions.

A layer's experts stay packed if a pair of backends takes them so. Otherwise they are multiplied out to the model's dtype,
which is never refused. The row then gives the reason and the cost in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from epserve.errors import ConfigError, Incompatible
from epserve.experts import rows
from epserve.models import ModelInfo
from epserve.models.slices import check_slices
from epserve.models.stored.experts import StoredAs
from epserve.modular_kernel import (
    UNQUANTIZED,
    FusedMoEMethodBase,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
)
from epserve.modular_kernel.methods_quant import method_for
from epserve.modular_kernel.weights import ExpertSizes, empty_weights
from epserve.process import ranges

from .backends import Chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPlan:
    """One all-to-all with its experts. `cap` is the most tokens of the busiest rank in a step on this path. None: any."""

    chosen: Chosen
    spec: LayerSpec
    options: PrepareFinalizeOptions
    cap: int | None = None

    @property
    def inner_options(self) -> PrepareFinalizeOptions:
        """Returns the all-to-all's own options. Ranks that share experts bring each other's tokens to it too."""
        return replace(self.options, max_tokens_per_rank=self.options.max_tokens_per_rank * self.spec.layout.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of one kind. `paths` holds one path, or the candidates of measured selection.

    `why` is the reason why experts are multiplied out. Empty: they stay as stored.
    """

    stored: StoredAs
    layers: tuple[int, ...]
    spec: LayerSpec
    method: type[FusedMoEMethodBase]
    paths: tuple[PathPlan, ...]
    why: str = ""

    @property
    def chosen(self) -> Chosen:
        return self.paths[0].chosen

    @property
    def sizes(self) -> ExpertSizes:
        """Returns the sizes of a rank's slice of each expert."""
        shape = self.spec.shape
        return ExpertSizes(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            dtype=shape.dtype,
            activation=self.spec.activation,
            bias=self.spec.bias,
        )

    def expert_bytes(self, num_experts: int, quant: QuantConfig | None = None) -> int:
        """Returns the bytes of one layer with biases, scales and, on the CPU, the zeros behind its rows."""
        made = empty_weights(self.sizes, quant or self.spec.quant, num_experts, torch.device("meta"))
        total = sum(tensor.nbytes for tensor in made.tensors().values())
        for each in (made.w13_eNK, made.w2_eKN):
            width = each.shape[-1]
            more = rows.padded(width, each.dtype, self.spec.device) - width
            total += each.numel() // width * more * each.element_size()
        return total

    def describe(self) -> str:
        """Returns a line for the log, `plan` and GetStatus: stored as, served as, kernel, bytes of the largest rank."""
        most, layers = max(self.spec.layout.counts), len(self.layers)
        dtype = str(self.spec.shape.dtype).removeprefix("torch.")
        held, scheme = self.expert_bytes(most) * layers, self.spec.quant.scheme
        served = f"served as {dtype if scheme == 'none' else scheme} by {self.chosen.names[1]}, {_size(held)} a rank"
        name = f"layer{'s' * (layers > 1)} {ranges.shown(self.layers)}: stored as {self.stored.name}, {served}"
        if not self.why:
            return name
        packed = self.stored.quant
        if packed.scheme == "none":
            return f"{name}; multiplied out: {self.why}"
        least = self.expert_bytes(most, packed) * layers
        return f"{name}; multiplied out: {self.why}; packed they would take {_size(least)}"


def choose_group(
    stored: StoredAs,
    layers: tuple[int, ...],
    spec: LayerSpec,
    *,
    whole: ExpertSizes,
    named: str,
    paths_of: Callable[[LayerSpec], tuple[PathPlan, ...]],
) -> LayerGroup:
    """Returns the group with packed experts if they can be served so, else with experts that are multiplied out.

    Args:
        stored: the scheme in which the checkpoint stores the experts.
        layers: numbers of the layers.
        spec: the layer's spec, except its quantisation.
        whole: the sizes of a whole expert.
        named: the experts backend of the configuration.
        paths_of: returns the paths for a spec.

    Raises:
        ConfigError, Incompatible: neither form can be served.
    """
    quantised = stored.method != "" and not stored.name.isupper()
    why = "no kernel takes this layout" if quantised and stored.quant == UNQUANTIZED else ""
    refused: list[Exception] = []
    for quant in dict.fromkeys((stored.quant, UNQUANTIZED)):
        try:
            check_slices(whole.intermediate, quant, spec.activation, spec.layout.slices)
            asked = replace(spec, quant=quant)
            paths = paths_of(asked)
        except (ConfigError, Incompatible) as error:
            refused.append(error)
            why = _short(error, quant, spec.device)
            continue
        method = method_for(quant.scheme, named, stored.method)
        return LayerGroup(stored=stored, layers=layers, spec=paths[0].spec, method=method, paths=paths, why=why)
    raise refused[0 if named != "auto" else -1]


def _short(error: Exception, quant: QuantConfig, device: str) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    return f"no experts backend on {device} takes {quant.scheme} here"


def kinds_of(info: ModelInfo, served: tuple[int, ...]) -> list[tuple[StoredAs, tuple[int, ...]]]:
    """Returns the kinds of the served layers. Kinds that differ only in their description stay apart."""
    found = [(kind, tuple(layer for layer in kind.layers if layer in served)) for kind in info.kinds]
    return [(kind, layers) for kind, layers in found if layers]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
