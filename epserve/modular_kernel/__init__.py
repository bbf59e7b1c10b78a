"""Holds the fused-MoE modular kernel: the contracts, the kernel itself, and the values that pass between its parts."""

from .capability import ExpertsCapability, LayerSpec, PrepareFinalizeCapability, check, why_not
from .contracts import (
    All2AllManager,
    FusedMoEExpertsModular,
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    PrepareFinalizeOptions,
    RankContext,
)
from .gating import GateSpec, GateWeights
from .handles import DispatchHandle, HandleBook, Receiver
from .kernel import FusedMoEModularKernel, check_routing
from .methods import Backends, FusedMoEMethodBase, UnquantizedFusedMoEMethod
from .quantization import UNQUANTIZED, QuantConfig
from .reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOP,
    weighted_sum,
)
from .registry import Entry, Registry
from .tuning import Tuning
from .types import Activation, ExpertLayout, ExpertShape, ExpertWeights, FusedMoEActivationFormat, Routing
from .workspace import Workspace, Workspaces, WorkspaceShapes

__all__ = [
    "UNQUANTIZED",
    "Activation",
    "All2AllManager",
    "Backends",
    "DispatchHandle",
    "Entry",
    "ExpertLayout",
    "ExpertShape",
    "ExpertWeights",
    "ExpertsCapability",
    "FusedMoEActivationFormat",
    "FusedMoEExpertsModular",
    "FusedMoEMethodBase",
    "FusedMoEModularKernel",
    "FusedMoEPrepareAndFinalizeModular",
    "GateSpec",
    "GateWeights",
    "HandleBook",
    "LayerSpec",
    "PrepareFinalizeCapability",
    "PrepareFinalizeOptions",
    "Prepared",
    "QuantConfig",
    "RankContext",
    "Receiver",
    "Registry",
    "Routing",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOP",
    "Tuning",
    "UnquantizedFusedMoEMethod",
    "Workspace",
    "WorkspaceShapes",
    "Workspaces",
    "check",
    "check_routing",
    "weighted_sum",
    "why_not",
]
