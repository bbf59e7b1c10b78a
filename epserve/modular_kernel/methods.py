"""Defines method classes: one for each way in which a checkpoint stores its experts. They make and join the kernel's parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from epserve.errors import BackendFailed, Incompatible, OperatorError

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
from .measured.selection import MeasuredExperts, Measuring
from .measured.selection_batched import MeasuredBatchedExperts
from .quantization import UNQUANTIZED, QuantConfig
from .registry import Registry
from .tuning import Tuning
from .types import ExpertWeights, FusedMoEActivationFormat
from .weights import ExpertSizes, copy_part, empty_weights, slot_view
from .workspace import Workspaces

SliceManager = Callable[[RankContext, type[All2AllManager], int], All2AllManager]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """Holds the registries, and the names to try in order of preference. Empty preferences: any backend that fits."""

    all2all: Registry[All2AllManager]
    experts: Registry[FusedMoEExpertsModular]
    prefer_all2all: Sequence[str] = ()
    prefer_experts: Sequence[str] = ()
    by_slices: SliceManager | None = None
    """The manager that joins ranks that share each expert by slices, around an all-to-all of the registry."""
    measuring: Measuring | None = None
    """If set, all preferred experts that fit are candidates, and each batch takes the candidate with the best time for it."""
    tuning: Tuning = Tuning()
    """The source of one backend's kernel variants. The method sets `every_row` by the rows that the all-to-all delivers."""


def _made(backend: type[FusedMoEExpertsModular], spec: LayerSpec, tuning: Tuning) -> FusedMoEExpertsModular:
    experts = backend(spec)
    experts.use(tuning)
    return experts


class FusedMoEMethodBase(ABC):
    """Runs the layers of one quantisation method. Subclasses define the storage of their weights."""

    EXPERTS: ClassVar[str] = ""
    """The only experts backend that this method multiplies with. Empty: any that fits."""
    QUANT_METHODS: ClassVar[tuple[str, ...]] = ()
    """The names of this method in the configuration of checkpoints."""

    def __init__(self, spec: LayerSpec, backends: Backends):
        self.spec, self.backends = spec, backends
        self.kernel: FusedMoEModularKernel | None = None
        self.experts: FusedMoEExpertsModular | None = None
        """The experts object is made once. A kernel is made for each process group."""
        self.manager: All2AllManager | None = None

    @classmethod
    @abstractmethod
    def quant_config(cls) -> QuantConfig:
        """Returns the scheme that this method stores weights in."""

    @classmethod
    def quant_configs(cls) -> tuple[QuantConfig, ...]:
        """Returns every scheme that this method's layers may have."""
        return (cls.quant_config(),)

    @staticmethod
    def create_weights(sizes: ExpertSizes, quant: QuantConfig, num_experts: int, device: torch.device) -> ExpertWeights:
        """Allocates the weights of this rank's experts, in slot order. `load_weights` fills them."""
        return empty_weights(sizes, quant, num_experts, device)

    @classmethod
    @abstractmethod
    def load_weights(
        cls,
        weights: ExpertWeights,
        slot: int,
        role: str,
        matrix: Mapping[str, torch.Tensor],
        *,
        quant: QuantConfig,
        interleaved: bool = False,
    ) -> None:
        """Writes one matrix of one expert into its slot.

        Args:
            role: a role of `slot_view`. gate comes before up.
            matrix: `weight` `(out, in)` and its scales, as the checkpoint stores them.

        Raises:
            CheckpointError: a tensor is missing or has the wrong shape.
        """

    def maybe_make_prepare_finalize(
        self, ranks: RankContext, options: PrepareFinalizeOptions
    ) -> FusedMoEPrepareAndFinalizeModular | None:
        """Makes the first preferred all-to-all that some experts class fits. Returns None when the spec has no experts."""
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
                self.manager = self._make_manager(manager, ranks)
                try:
                    return self.manager.get_handle(self.spec, options)
                except (OperatorError, ImportError, OSError, RuntimeError) as error:
                    raise BackendFailed(name, f"{type(error).__name__}: {error}") from error
            reasons += [f"{name} + {reason}" for reason in candidates[1]]
        raise Incompatible("no all-to-all backend can serve this layer:", tuple(reasons))

    def _make_manager(self, manager: type[All2AllManager], ranks: RankContext) -> All2AllManager:
        slices = self.spec.layout.slices
        if slices == 1:
            return manager(ranks)
        if self.backends.by_slices is None:
            raise Incompatible(f"{slices} ranks share each expert, and these backends have nothing that joins them")
        return self.backends.by_slices(ranks, manager, slices)

    def select_gemm_impl(self, prepare_finalize: FusedMoEPrepareAndFinalizeModular) -> FusedMoEExpertsModular:
        """Makes the first preferred experts class that fits `prepare_finalize`, or measured selection among all that fit.

        Raises Incompatible with each backend's reasons.
        """
        return self._experts_of(prepare_finalize.capability, type(prepare_finalize).__name__)

    def make_experts(self, prepare_finalize: type[FusedMoEPrepareAndFinalizeModular]) -> FusedMoEExpertsModular:
        """Does the same as `select_gemm_impl`, for an all-to-all that may not exist yet."""
        return self._experts_of(prepare_finalize.capability, prepare_finalize.__name__)

    def _experts_of(self, record: capability.PrepareFinalizeCapability, name: str) -> FusedMoEExpertsModular:
        backends = self.backends
        chosen, reasons = self._experts_for(record)
        if chosen is None:
            raise Incompatible(f"no experts backend fits {name}:", tuple(reasons))
        every_row = not record.needed_rows_only
        tuning = replace(backends.tuning, every_row=every_row)
        if backends.measuring is None:
            return _made(chosen, self.spec, tuning)
        candidates = {name: _made(backends.experts.get(name), self.spec, tuning) for name in self._fitting(record)}
        if len(candidates) == 1:
            return next(iter(candidates.values()))
        if record.activation_format is FusedMoEActivationFormat.BatchedExperts:
            return MeasuredBatchedExperts(self.spec, candidates, measuring=backends.measuring)
        return MeasuredExperts(self.spec, candidates, measuring=backends.measuring, every_row=every_row)

    def init_prepare_finalize(
        self, ranks: RankContext, options: PrepareFinalizeOptions, *, workspaces: Workspaces | None = None
    ) -> FusedMoEModularKernel:
        """Makes both parts and joins them. Experts of an earlier process group are kept. Collective."""
        prepare_finalize = self.maybe_make_prepare_finalize(ranks, options)
        assert prepare_finalize is not None, "a layer without experts needs no kernel"
        if self.experts is None:
            self.experts = self.select_gemm_impl(prepare_finalize)
        self.kernel = FusedMoEModularKernel(prepare_finalize, self.experts, workspaces=workspaces)
        return self.kernel

    def process_weights_after_loading(self, weights: ExpertWeights) -> ExpertWeights:
        """Returns the weights with everything that the experts class derives from them."""
        assert self.experts is not None, "init_prepare_finalize comes first"
        return self.experts.prepare_weights(weights)

    def experts_names(self) -> Sequence[str]:
        """Returns the names of the experts backends, in order of preference."""
        return self.backends.prefer_experts or self.backends.experts.names()

    def _experts_for(self, pf_capability) -> tuple[type[FusedMoEExpertsModular] | None, list[str]]:
        reasons = []
        for name in self.experts_names():
            why = self._why_not(name, pf_capability)
            if not why:
                return self.backends.experts.get(name), []
            reasons += [f"{name}: {reason}" for reason in why]
        return None, reasons

    def _fitting(self, pf_capability) -> list[str]:
        return [name for name in self.experts_names() if not self._why_not(name, pf_capability)]

    def _why_not(self, name: str, pf_capability) -> tuple[str, ...]:
        experts = self.backends.experts.get(name)
        missing = experts.unavailable()
        return (missing,) if missing else capability.why_not(pf_capability, experts.capability, self.spec)


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """Takes bf16, fp16 or fp32 weights as the checkpoint has them."""

    @classmethod
    def quant_config(cls) -> QuantConfig:
        return UNQUANTIZED

    @classmethod
    def load_weights(cls, weights, slot, role, matrix, *, quant, interleaved=False):
        copy_part(slot_view(weights, slot, role, interleaved=interleaved), matrix["weight"])
