"""Method classes: one for each way in which a checkpoint stores its experts. They make and join the kernel's parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from epserve.errors import Incompatible

from . import capability
from .capability import LayerSpec
from .contracts import (
    All2AllManager,
    FusedMoEExpertsModular,
    FusedMoEPrepareAndFinalizeModular,
    PrepareFinalizeOptions,
    RankContext,
)
from .kernel import FusedMoEModularKernel
from .quantization import UNQUANTIZED, QuantConfig
from .registry import Registry
from .types import ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """The registries to choose from and, in order of preference, what to try. Empty preferences: any that fits."""

    all2all: Registry[All2AllManager]
    experts: Registry[FusedMoEExpertsModular]
    prefer_all2all: Sequence[str] = ()
    prefer_experts: Sequence[str] = ()


class FusedMoEMethodBase(ABC):
    """How one quantisation method's layer is run. Subclasses say how their weights are stored."""

    def __init__(self, spec: LayerSpec, backends: Backends):
        self.spec, self.backends = spec, backends
        self.kernel: FusedMoEModularKernel | None = None
        self.manager: All2AllManager | None = None

    @classmethod
    @abstractmethod
    def quant_config(cls) -> QuantConfig:
        """The scheme that this method stores weights in."""

    @classmethod
    def quant_configs(cls) -> tuple[QuantConfig, ...]:
        """Every scheme that this method's layers may have."""
        return (cls.quant_config(),)

    def maybe_make_prepare_finalize(
        self, ranks: RankContext, options: PrepareFinalizeOptions
    ) -> FusedMoEPrepareAndFinalizeModular | None:
        """The first preferred all-to-all that some experts class fits; None when the spec has nothing to dispatch."""
        if self.spec.shape.num_experts == 0:
            return None
        reasons = []
        for name in self.backends.prefer_all2all or self.backends.all2all.names():
            manager = self.backends.all2all.get(name)
            missing = manager.unavailable()
            if missing:
                reasons.append(f"{name}: {missing}")
                continue
            candidates = self._experts_for(manager.prepare_finalize.capability)
            if candidates[0] is not None:
                self.manager = manager(ranks)
                return self.manager.get_handle(self.spec, options)
            reasons += [f"{name} + {reason}" for reason in candidates[1]]
        raise Incompatible("no all-to-all backend can serve this layer:", tuple(reasons))

    def select_gemm_impl(self, prepare_finalize: FusedMoEPrepareAndFinalizeModular) -> FusedMoEExpertsModular:
        """The first preferred experts class that fits `prepare_finalize`; Incompatible lists why each does not."""
        chosen, reasons = self._experts_for(prepare_finalize.capability)
        if chosen is None:
            raise Incompatible(f"no experts backend fits {type(prepare_finalize).__name__}:", tuple(reasons))
        return chosen(self.spec)

    def init_prepare_finalize(self, ranks: RankContext, options: PrepareFinalizeOptions) -> FusedMoEModularKernel:
        """Make both parts and join them. Collective."""
        prepare_finalize = self.maybe_make_prepare_finalize(ranks, options)
        assert prepare_finalize is not None, "a layer without experts needs no kernel"
        self.kernel = FusedMoEModularKernel(prepare_finalize, self.select_gemm_impl(prepare_finalize))
        return self.kernel

    def process_weights_after_loading(self, weights: ExpertWeights) -> ExpertWeights:
        assert self.kernel is not None, "init_prepare_finalize comes first"
        return self.kernel.fused_experts.prepare_weights(weights)

    def _experts_for(self, pf_capability) -> tuple[type[FusedMoEExpertsModular] | None, list[str]]:
        reasons = []
        for name in self.backends.prefer_experts or self.backends.experts.names():
            experts = self.backends.experts.get(name)
            missing = experts.unavailable()
            why = (missing,) if missing else capability.why_not(pf_capability, experts.capability, self.spec)
            if not why:
                return experts, []
            reasons += [f"{name}: {reason}" for reason in why]
        return None, reasons


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """bf16, fp16 or fp32 weights, as the checkpoint has them."""

    @classmethod
    def quant_config(cls) -> QuantConfig:
        return UNQUANTIZED
