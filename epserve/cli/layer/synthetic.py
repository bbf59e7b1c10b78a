"""Makes one MoE layer of random weights on one rank: gate, routed experts, shared expert, and the kernel around them.

`epserve profile` and the benchmarks run it with any pair of backends, sizes of a real model, and no checkpoint. An expert's
weights depend on its number only, so that every rank can compute any other rank's result.

Legend: M tokens, K hidden size, N intermediate size, S intermediate size of the shared expert, E experts, t = top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from epserve import all2all, experts
from epserve.errors import ConfigError, Incompatible
from epserve.experts.dequantised import E8M0_BIAS, matrices
from epserve.models import SharedExperts
from epserve.modular_kernel import (
    Activation,
    All2AllManager,
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    FusedMoEExpertsModular,
    FusedMoEModularKernel,
    GateSpec,
    GateWeights,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Routing,
    Workspaces,
    why_not,
)
from epserve.modular_kernel.kernel import SharedExperts as SharedCall
from epserve.modular_kernel.quantization import FP8, FP8_MAX
from epserve.modular_kernel.weights import ExpertSizes, empty_weights
from epserve.rank.gate import route

GROUPS, TOP_GROUPS = 8, 4  # DeepSeek-V3's gate
SPREAD = {"int8_channel": 73.0, "int4": 4.6, "mxfp4": 2.9, "nvfp4": 2.9}
"""The root mean square of a scheme's random codes. Those of fp8 are drawn with FP8_SPREAD."""
FP8_SPREAD = 100.0
TOLERANCE = {scheme: 7e-2 if scheme.startswith("fp8") else 1.5e-2 for scheme in QuantConfig.SCHEMES} | {
    "int8_channel": 3e-2
}
"""Largest relative L2 error against float32 on the same weights: about 3 times a correct backend's in bf16, 1.5 times in fp8.
Weights of 4 bits are multiplied by rows in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Holds the sizes of the whole layer. The defaults are DeepSeek-V3's.

    `shared`: S, 0 for no shared expert. The shared expert is never quantised.
    """

    hidden: int = 7168
    intermediate: int = 2048
    num_experts: int = 256
    top_k: int = 8
    shared: int = 2048
    scheme: str = "none"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self):
        quant = self.quant  # refuses an unknown scheme
        for name in ("hidden", "intermediate", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % quant.shared:
                what = f"is not a multiple of {quant.shared}, which {self.scheme} needs"
                raise ConfigError(f"{name} {getattr(self, name)} {what}")
        if self.shared < 0:
            raise ConfigError(f"shared must be at least 0, got {self.shared}")
        self.gate.check_experts(self.num_experts)

    @property
    def quant(self) -> QuantConfig:
        """Returns the storage of the weights. Scales of activations are those of the batch."""
        return QuantConfig(scheme=self.scheme, dynamic=self.scheme == "fp8_tensor")

    @property
    def gate(self) -> GateSpec:
        """Returns DeepSeek-V3's gate: sigmoid scores, a bias for the choice, and 8 groups if each has at least two experts."""
        grouped = self.num_experts % GROUPS == 0 and self.num_experts >= max(2 * GROUPS, 2 * self.top_k)
        return GateSpec(
            top_k=self.top_k, scoring="sigmoid", renormalise=True, renormalise_epsilon=1e-20, correction_bias=True,
            num_groups=GROUPS if grouped else 1, top_groups=TOP_GROUPS if grouped else 1, group_score="top2_sum",
            routed_scaling_factor=2.5, logits_float32=True,
        )  # fmt: skip

    def spec(self, world_size: int, device: str) -> LayerSpec:
        shape = ExpertShape(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            top_k=self.top_k,
            dtype=self.dtype,
        )
        layout = ExpertLayout.even(self.num_experts, world_size)
        return LayerSpec(shape=shape, layout=layout, device=device, quant=self.quant)


def reasons(all2all_name: str, experts_name: str, spec: LayerSpec) -> tuple[str, ...]:
    """Returns the reasons why this pair cannot run `spec` on this machine: by the records, or missing packages. Empty: it can."""
    manager, chosen = all2all.REGISTRY.get(all2all_name), experts.REGISTRY.get(experts_name)
    why = why_not(manager.prepare_finalize.capability, chosen.capability, spec)
    if why:
        return why
    missing = ((all2all_name, manager.unavailable()), (experts_name, chosen.unavailable()))
    return tuple(f"{name}: {text}" for name, text in missing if text)


class SyntheticLayer:
    """Runs one layer on one rank. Collective: every rank makes it, calls it and closes it in the same order.

    Args:
        manager: a manager that several layers share. close() does not destroy it.
        reuse: another layer, whose workspaces serve this layer too. If the spec is the same, so do its weights and compiled
            experts. Only one of the two layers may run at a time.

    Raises:
        Incompatible: the message has every reason why the pair cannot run this layer here.
    """

    kernel: FusedMoEModularKernel
    raw_weights: ExpertWeights
    """The weights before the experts class prepared them."""
    warm_rows: int
    """The most rows that the experts are compiled for."""

    def __init__(
        self,
        ranks: RankContext,
        sizes: LayerSizes,
        *,
        all2all_name: str,
        experts_name: str,
        options: PrepareFinalizeOptions,
        reuse: SyntheticLayer | None = None,
        manager: All2AllManager | None = None,
    ):
        self.ranks, self.sizes = ranks, sizes
        self.spec = sizes.spec(ranks.world_size, ranks.device.type)
        if why := reasons(all2all_name, experts_name, self.spec):
            raise Incompatible(f"{all2all_name} and {experts_name} cannot run this layer here:", why)
        chosen = experts.REGISTRY.get(experts_name)
        same = reuse is not None and reuse.spec == self.spec
        self._own_manager = manager is None
        self.manager = manager if manager is not None else all2all.REGISTRY.get(all2all_name)(ranks)
        prepare_finalize = self.manager.get_handle(self.spec, options)
        fused: FusedMoEExpertsModular
        if reuse is not None and same and type(reuse.kernel.fused_experts) is chosen:
            fused, self.warm_rows = reuse.kernel.fused_experts, reuse.warm_rows
        else:
            fused, self.warm_rows = chosen(self.spec), 0
        spaces = reuse.kernel.workspaces if reuse is not None else Workspaces(ranks.device)
        self.kernel = FusedMoEModularKernel(prepare_finalize, fused, workspaces=spaces)
        first, end = self.spec.layout.offsets[ranks.rank : ranks.rank + 2]
        if reuse is not None and same:
            self.raw_weights = reuse.raw_weights
        else:
            self.raw_weights = expert_weights(sizes, range(first, end), ranks.device)
        self.weights = fused.prepare_weights(self.raw_weights)
        self.gate_weights = gate_weights(sizes, ranks.device)
        self.shared_weights = shared_expert(sizes, ranks.device) if sizes.shared else None
        self.shared: SharedCall | None = self.shared_weights
        self.can_graph = prepare_finalize.capability.cuda_graph and chosen.capability.cuda_graph

    def warm_up(self) -> None:
        """Compiles for every batch up to the cap. The workspaces may still grow for another layer that shares them."""
        self.kernel.workspaces.reserve(self.kernel.workspace_shapes())
        rows = self.kernel.prepare_finalize.max_rows()
        if self.shared_weights is not None:
            self.shared_weights.warm_up()
        if self.warm_rows < rows:
            self.kernel.fused_experts.warm_up(self.weights, rows)
            self.warm_rows = rows

    def gate(self, x_MK: torch.Tensor) -> Routing:
        ids_dtype = self.kernel.prepare_finalize.topk_indices_dtype()
        return route(x_MK, self.gate_weights, self.sizes.gate, ids_dtype=ids_dtype)

    def routed(self, x_MK: torch.Tensor, routing: Routing, tokens_per_rank: Sequence[int]) -> torch.Tensor:
        """Runs the layer without its gate: `(M, K)` -> `(M, K)`, with the shared expert beside dispatch and combine."""
        return self.kernel.forward(
            x_MK, routing, weights=self.weights, tokens_per_rank=tokens_per_rank, shared_experts=self.shared
        )

    def forward(self, x_MK: torch.Tensor, tokens_per_rank: Sequence[int]) -> torch.Tensor:
        return self.routed(x_MK, self.gate(x_MK), tokens_per_rank)

    def tokens(self, num_tokens: int, seed: int = 0) -> torch.Tensor:
        """Returns random tokens `(M, K)` that differ from rank to rank."""
        generator = torch.Generator(self.ranks.device).manual_seed(10_000 * seed + self.ranks.rank + 1)
        shape = (num_tokens, self.sizes.hidden)
        return torch.randn(shape, device=self.ranks.device, generator=generator).to(self.sizes.dtype)

    def error(self, x_MK: torch.Tensor, routing: Routing, out_MK: torch.Tensor, num_rows: int = 4) -> float:
        """Returns the relative L2 error of `num_rows` rows of `out_MK`, spread over the batch, against float32."""
        if not x_MK.shape[0]:
            return 0.0
        rows = torch.linspace(0, x_MK.shape[0] - 1, min(num_rows, x_MK.shape[0]), device=x_MK.device).long().unique()
        x, ids, shares = x_MK[rows].float(), routing.ids_Mt[rows], routing.weights_Mt[rows]
        want = torch.zeros_like(x)
        for expert in sorted(set(ids[ids >= 0].tolist())):
            w13, w2 = _float_expert(self.sizes, expert, self.ranks.device)
            gate, up = F.linear(x, w13).chunk(2, dim=-1)
            share = torch.where(ids == expert, shares, 0.0).sum(1, keepdim=True)
            want += share * F.linear(F.silu(gate) * up, w2)
        if self.shared_weights is not None:
            gate, up = F.linear(x, self.shared_weights.w13_SK.float()).chunk(2, dim=-1)
            want += F.linear(F.silu(gate) * up, self.shared_weights.w2_KS.float())
        return ((out_MK[rows].float() - want).norm() / want.norm().clamp(min=1e-20)).item()

    def close(self) -> None:
        """Frees the layer. Collective."""
        if self._own_manager:
            self.manager.destroy()


def expert_weights(sizes: LayerSizes, numbers: Sequence[int], device: torch.device) -> ExpertWeights:
    """Returns the experts of these numbers, stored as `sizes.scheme` says. A quantised one has random codes and scales."""
    stored = ExpertSizes(hidden=sizes.hidden, intermediate=sizes.intermediate, dtype=sizes.dtype)
    weights = empty_weights(stored, sizes.quant, len(numbers), device)
    for slot, number in enumerate(numbers):
        generator = torch.Generator(device).manual_seed(1000 + number)
        _draw(
            weights.w13_eNK[slot],
            None if weights.s13 is None else weights.s13[slot],
            sizes.hidden,
            sizes.scheme,
            generator,
        )
        _draw(
            weights.w2_eKN[slot],
            None if weights.s2 is None else weights.s2[slot],
            sizes.intermediate,
            sizes.scheme,
            generator,
        )
    return weights


def gate_weights(sizes: LayerSizes, device: torch.device) -> GateWeights:
    """Returns the weight in the layer's dtype, as checkpoints store it. The product is in float32."""
    on: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(11)}
    weight_EK = (torch.randn((sizes.num_experts, sizes.hidden), **on) * sizes.hidden**-0.5).to(sizes.dtype)
    return GateWeights(weight_EK=weight_EK, correction_bias_E=torch.rand(sizes.num_experts, **on) * 0.01)


def shared_expert(sizes: LayerSizes, device: torch.device) -> SharedExperts:
    on: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(12)}
    w13_SK = torch.randn((2 * sizes.shared, sizes.hidden), **on) * sizes.hidden**-0.5
    w2_KS = torch.randn((sizes.hidden, sizes.shared), **on) * sizes.shared**-0.5
    return SharedExperts(w13_SK=w13_SK.to(sizes.dtype), w2_KS=w2_KS.to(sizes.dtype), activation=Activation())


def _draw(
    codes: torch.Tensor, scale: torch.Tensor | None, columns: int, scheme: str, generator: torch.Generator
) -> None:
    """Fills one matrix with random values of about `columns ** -0.5`."""
    on: dict[str, Any] = {"device": codes.device, "generator": generator}
    if scale is None:
        codes.copy_(torch.randn(codes.shape, **on).mul_(columns**-0.5))
        return
    if codes.dtype == FP8:
        codes.copy_(torch.randn(codes.shape, **on).mul_(FP8_SPREAD).clamp_(-FP8_MAX, FP8_MAX))
    else:
        low, high = (-127, 128) if codes.dtype == torch.int8 else (0, 256)
        codes.copy_(torch.randint(low, high, codes.shape, dtype=codes.dtype, **on))
    factor = (0.5 + torch.rand(scale.shape, **on)) * (columns**-0.5 / SPREAD.get(scheme, FP8_SPREAD))
    scale.copy_(factor.log2().round() + E8M0_BIAS if scale.dtype == torch.uint8 else factor)


def _float_expert(sizes: LayerSizes, number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns w13 and w2 as they are stored, in float32."""
    w13, w2 = matrices(expert_weights(sizes, [number], device), 0, sizes.quant, torch.float32)
    return w13.float(), w2.float()
