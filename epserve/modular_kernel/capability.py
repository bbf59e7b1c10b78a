"""Describes each backend's abilities as data (capability records), with the one check that two of them fit.

The error message, the `epserve compat` table, the docs and the test matrix are all made from these records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from epserve.errors import Incompatible

from .quantization import BLOCK, QuantConfig
from .types import Activation, ExpertLayout, ExpertShape, FusedMoEActivationFormat

Reach = Literal["host", "nvlink", "rdma", "anywhere"]
"""How far apart the ranks of an all-to-all may be: on one host, in one NVLink domain, on hosts with RDMA devices (or in one
NVLink domain), or anywhere that a process group reaches."""

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFinalizeCapability:
    """Lists the limits of one prepare/finalize class. None or an empty set means "no limit"."""

    activation_format: FusedMoEActivationFormat
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[torch.dtype] = FLOATS
    quant_dispatch: frozenset[str] = frozenset()
    """Quantisation schemes whose rows can be dispatched already quantised. Others are quantised after dispatch."""
    max_ranks: int | None = None
    rank_counts: frozenset[int] = frozenset()
    max_top_k: int | None = None
    max_hidden: int | None = None
    hidden_sizes: frozenset[int] = frozenset()
    hidden_multiple_of: int = 1
    uneven_experts: bool = True
    async_receive: bool = False
    """After prepare_no_receive the transfer goes on while the caller computes. Otherwise it has ended by then."""
    cuda_graph: bool = False
    combine_orders: frozenset[str] = frozenset({"rank", "slot"})
    """The values of `PrepareFinalizeOptions.combine_order` that the class can keep."""
    most_tokens: int | None = None
    """The largest cap of one round."""
    needed_rows_only: bool = False
    """Standard format: the class delivers only rows that have a slot on this rank. Others deliver every row, or room for it."""
    reach: Reach = "anywhere"
    spans_hosts: bool = False
    """The class saves bytes between hosts that have several ranks each, and nothing elsewhere."""
    interruptible: bool = True
    """A wait on the device for a lost rank can be ended from outside. Otherwise only the end of the process ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCapability:
    """Lists the limits of one experts class."""

    activation_formats: frozenset[FusedMoEActivationFormat]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype] = FLOATS
    quant_schemes: frozenset[str] = frozenset({"none"})
    activations: frozenset[str] = frozenset(Activation.KINDS)
    exact_activations: frozenset[Activation] = frozenset()
    """The only activations that the class computes, with their numbers. Empty: no such limit."""
    ungated: bool = True
    bias: bool = True
    output_norm: bool = False
    hidden_multiple_of: int = 1
    intermediate_multiple_of: int = 1
    block_aligned: bool = False
    """The class takes fp8_block only if hidden and intermediate are multiples of its 128 x 128 blocks."""
    packs_weights: bool = False
    """The class changes the layout of the weights. Beside it, only classes of Standard format on the CPU read that layout."""
    supports_expert_map: bool = True
    """The class skips slots whose expert is not on this rank (id -1). Standard format over several ranks needs that."""
    cuda_graph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Describes the requirements on a pair: the layer's sizes and numerics, the ranks and the device."""

    shape: ExpertShape
    layout: ExpertLayout
    device: str = "cpu"
    quant: QuantConfig = QuantConfig()
    activation: Activation = Activation()
    bias: bool = False
    cuda_graph: bool = False


def why_not(
    pf: PrepareFinalizeCapability, experts: ExpertsCapability, spec: LayerSpec | None = None
) -> tuple[str, ...]:
    """Returns every reason why this pair cannot serve `spec` (or anything at all, without a spec). Empty: it fits."""
    reasons = []
    if pf.activation_format not in experts.activation_formats:
        takes = " or ".join(sorted(f.name for f in experts.activation_formats))
        reasons.append(f"prepare delivers {pf.activation_format.name}, the experts take {takes}")
    if not pf.devices & experts.devices:
        reasons.append(f"no common device: {_list(pf.devices)} against {_list(experts.devices)}")
    if not pf.dtypes & experts.dtypes:
        reasons.append(f"no common activation dtype: {_list(pf.dtypes)} against {_list(experts.dtypes)}")
    if spec is not None and not reasons:
        reasons += _spec_reasons(pf, experts, spec)
    return tuple(reasons)


def _spec_reasons(pf: PrepareFinalizeCapability, experts: ExpertsCapability, spec: LayerSpec) -> list[str]:
    shape, ranks, counts = spec.shape, spec.layout.num_ranks, spec.layout.counts
    checks = [
        (spec.device in pf.devices, f"prepare/finalize runs on {_list(pf.devices)}, not on {spec.device}"),
        (spec.device in experts.devices, f"the experts run on {_list(experts.devices)}, not on {spec.device}"),
        (shape.dtype in pf.dtypes, f"prepare/finalize moves {_list(pf.dtypes)}, not {_name(shape.dtype)}"),
        (shape.dtype in experts.dtypes, f"the experts compute in {_list(experts.dtypes)}, not {_name(shape.dtype)}"),
        (spec.quant.scheme in experts.quant_schemes,
         f"quantisation {spec.quant.scheme}: the experts have {_list(experts.quant_schemes)}"),
        (spec.activation.kind in experts.activations,
         f"activation {spec.activation.kind}: the experts have {_list(experts.activations)}"),
        (not experts.exact_activations or spec.activation in experts.exact_activations,
         f"{spec.activation}: the experts have {_list(experts.exact_activations)}"),
        (spec.activation.gated or experts.ungated, "the experts have no ungated form"),
        (not spec.bias or experts.bias, "the experts have no biases"),
        (spec.activation.output_norm_eps is None or experts.output_norm, "the experts do not normalise their outputs"),
        (pf.max_ranks is None or ranks <= pf.max_ranks, f"{ranks} ranks, at most {pf.max_ranks}"),
        (not pf.rank_counts or ranks in pf.rank_counts, f"{ranks} ranks, not one of {_list(pf.rank_counts)}"),
        (pf.max_top_k is None or shape.top_k <= pf.max_top_k, f"top-k {shape.top_k}, at most {pf.max_top_k}"),
        (pf.max_hidden is None or shape.hidden <= pf.max_hidden,
         f"hidden size {shape.hidden}, at most {pf.max_hidden}"),
        (not pf.hidden_sizes or shape.hidden in pf.hidden_sizes,
         f"hidden size {shape.hidden} is not one of {_list(pf.hidden_sizes)}"),
        (shape.hidden % pf.hidden_multiple_of == 0,
         f"hidden size {shape.hidden} is not a multiple of {pf.hidden_multiple_of} (prepare/finalize)"),
        (shape.hidden % experts.hidden_multiple_of == 0,
         f"hidden size {shape.hidden} is not a multiple of {experts.hidden_multiple_of} (experts)"),
        (shape.intermediate % experts.intermediate_multiple_of == 0,
         f"intermediate size {shape.intermediate} is not a multiple of {experts.intermediate_multiple_of} (experts)"),
        (not experts.block_aligned or spec.quant.scheme != "fp8_block"
         or (shape.hidden % BLOCK == 0 and shape.intermediate % BLOCK == 0),
         f"fp8_block: hidden {shape.hidden} and intermediate {shape.intermediate} must be multiples of {BLOCK} (experts)"),
        (pf.uneven_experts or len(set(counts)) == 1, f"uneven experts per rank {counts}"),
        (spec.layout.num_experts == shape.num_experts,
         f"the layout places {spec.layout.num_experts} experts, the layer has {shape.num_experts}"),
        (ranks == 1 or experts.supports_expert_map
         or pf.activation_format is FusedMoEActivationFormat.BatchedExperts,
         "the experts cannot skip slots of other ranks (supports_expert_map)"),
        (not spec.cuda_graph or pf.cuda_graph, "CUDA graphs: prepare/finalize waits on the CPU"),
        (not spec.cuda_graph or experts.cuda_graph, "CUDA graphs: the experts wait on the CPU"),
    ]  # fmt: skip
    return [text for ok, text in checks if not ok]


def check(names: tuple[str, str], pf: PrepareFinalizeCapability, experts: ExpertsCapability, spec: LayerSpec) -> None:
    """Raises Incompatible with every reason. It costs microseconds: run it before any weight is read."""
    reasons = why_not(pf, experts, spec)
    if reasons:
        raise Incompatible(f"prepare/finalize {names[0]!r} and experts {names[1]!r} cannot serve this layer:", reasons)


def _name(value) -> str:
    return str(value).removeprefix("torch.")


def _list(values) -> str:
    return ", ".join(sorted(_name(value) for value in values)) or "nothing"
