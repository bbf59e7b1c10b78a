"""Defines the contracts of the modular kernel: all-to-all managers, prepare/finalize, experts.

The names are those of vLLM's fused-MoE modular kernel. A step is a collective: every rank calls prepare and finalize the
same number of times in the same order, with zero rows too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from epserve.errors import ConfigError

from .capability import ExpertsCapability, LayerSpec, PrepareFinalizeCapability
from .handles import DispatchHandle, HandleBook, Receiver
from .quantization import QuantConfig
from .reduce import TopKWeightAndReduce
from .tuning import Tuning
from .types import ExpertWeights, FusedMoEActivationFormat, Routing
from .workspace import Workspace, WorkspaceShapes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Describes this rank's place among the ranks.

    `group`: torch.distributed process group (gloo on CPU, NCCL on CUDA), None for one rank.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    group: Any = None
    timeout_s: float = 30.0
    """The deadline of every wait on other ranks, in seconds."""
    sharers: int = 1
    """The number of ranks that may share this rank's GPU, itself included. Each plans with this fraction of its free memory."""
    hosts: tuple[int, ...] = ()
    """The number of each rank's host, from 0. Empty: unknown, so that all ranks count as on one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFinalizeOptions:
    """Configures a prepare/finalize object. All ranks have the same options."""

    max_tokens_per_rank: int = 4096
    """The most tokens of one round. Longer batches are split into rounds that all ranks agree on."""
    combine_order: str = "rank"
    """"rank": each rank sums its own slots, partial sums are added in rank order (fewest bytes). "slot": one row a slot
    comes home and is added in slot order, so the bits do not depend on the number of ranks or on placement."""
    dispatch_quantised: bool = True
    """Rows are sent quantised if both the scheme and the backend can. Otherwise they are quantised after dispatch."""
    batches_in_flight: int = 1

    def __post_init__(self):
        if self.max_tokens_per_rank < 1:
            raise ConfigError(f"max_tokens_per_rank must be at least 1, got {self.max_tokens_per_rank}")
        if self.combine_order not in ("rank", "slot"):
            raise ConfigError(f"combine_order must be 'rank' or 'slot', got {self.combine_order!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Passes one dispatched batch from prepare to the experts.

    Standard: `x` `(M', K)`, `routing` with local slots (-1: not on this rank, or padding), `expert_num_tokens` None.
    BatchedExperts: `x` `(e, T, K)`, `expert_num_tokens` int32 `(e,)` on the device, `routing` None.
    `scales`: float32, with `x` in e4m3. None when `x` is not quantised. They are `(M', K/128)` row by row, or `(e, T, K/128)` of
    any strides: experts of the batched format read them in place (DeepEP leaves them column by column, `(., 1, T)`).
    """

    x: torch.Tensor
    scales: torch.Tensor | None = None
    routing: Routing | None = None
    expert_num_tokens: torch.Tensor | None = None
    output: torch.Tensor | None = None
    """The output of experts that reduce, `(M', K)`, in memory that finalize sends from. None: they write to a workspace."""
    handle: DispatchHandle


class FusedMoEPrepareAndFinalizeModular(ABC):
    """Quantises and dispatches before the experts, and combines after them. Only handles hold a batch's state."""

    capability: ClassVar[PrepareFinalizeCapability]

    def __init__(self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions):
        self.ranks, self.spec, self.options = ranks, spec, options
        self.book = HandleBook(type(self).__name__)

    def activation_format(self) -> FusedMoEActivationFormat:
        return self.capability.activation_format

    def topk_indices_dtype(self) -> torch.dtype:
        """Returns the dtype of the physical ids that `prepare` takes. The gate writes it, so that prepare never converts ids."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """Returns the most rows that a rank may pass to one prepare, the same on all ranks."""
        return self.options.max_tokens_per_rank

    def num_dispatchers(self) -> int:
        """Returns how many ranks may send rows to this one, itself included."""
        return self.ranks.world_size

    def num_local_experts(self) -> int:
        """Returns the number of physical experts whose weights this rank holds."""
        return self.spec.layout.counts[self.ranks.rank]

    def max_rows(self) -> int:
        """Returns the most rows that prepare can return, in BatchedExperts those of one expert (T). It sizes the workspaces."""
        return self.options.max_tokens_per_rank * self.num_dispatchers()

    def has_prepare_no_receive(self) -> bool:
        """Returns whether the transfer goes on while the caller computes. Otherwise the receiver is ready at once."""
        return self.capability.async_receive

    def why_not_reduce(self, reduce: TopKWeightAndReduce) -> str | None:
        """Returns the reason why finalize cannot do the work that these experts leave to it, or None.

        It is called once, when a kernel is made.
        """
        return None

    @abstractmethod
    def prepare(
        self, x_MK: torch.Tensor, routing: Routing, *, quant: QuantConfig, tokens_per_rank: Sequence[int] | None = None
    ) -> Prepared:
        """Dispatches `x_MK` `(M, K)`, contiguous, with physical ids of `topk_indices_dtype`.

        tokens_per_rank: M of every rank, if the caller knows it (a scheduler does). None: the backend exchanges it.
        """

    def prepare_no_receive(
        self, x_MK: torch.Tensor, routing: Routing, *, quant: QuantConfig, tokens_per_rank: Sequence[int] | None = None
    ) -> Receiver[Prepared]:
        """Starts the dispatch. The receiver, called once, waits for it. `x_MK` must stay unchanged until then.

        By default the dispatch runs now and the receiver is ready: callers need no second path for such a backend.
        """
        prepared = self.prepare(x_MK, routing, quant=quant, tokens_per_rank=tokens_per_rank)
        return Receiver(self.book, lambda: prepared)

    @abstractmethod
    def finalize(
        self, handle: DispatchHandle, y: torch.Tensor, *, reduce: TopKWeightAndReduce, out_MK: torch.Tensor
    ) -> torch.Tensor:
        """Combines the experts' `y` into `out_MK` `(M, K)` for the tokens that this rank passed to prepare, and returns it.

        reduce: the work that the experts left to finalize. The backend does it at the cheapest place.
        """

    def finalize_no_wait(
        self, handle: DispatchHandle, y: torch.Tensor, *, reduce: TopKWeightAndReduce, out_MK: torch.Tensor
    ) -> Receiver[torch.Tensor]:
        """Starts the combine. The receiver waits for it. By default the combine runs now and the receiver returns its result."""
        out = self.finalize(handle, y, reduce=reduce, out_MK=out_MK)
        return Receiver(self.book, lambda: out)

    def network_bytes(self) -> int:
        """Returns the bytes that this rank has sent to ranks of other hosts. 0 for a backend that does not count them."""
        return 0

    def check(self) -> None:
        """Raises RankFailed when an earlier step is known to have failed on the device. It never blocks.

        Call it again after waiting for the device: every failure is known then.
        """

    def interrupt(self) -> None:
        """Ends every wait for a lost rank on the device now. Another thread calls it.

        The step's result is void, and `check` raises RankFailed. The default does nothing: some libraries' waits end otherwise.
        """

    def abandon(self) -> None:
        """Forgets outstanding handles after an error that ended the group, so that close() does not complain."""
        self.book.forget()

    def close(self) -> None:
        """Frees buffers. Collective. Raises HandleError when a handle or receiver was never used."""
        self.book.close()


class All2AllManager(ABC):
    """Sets a communication library up once for a rank and gives out memoised prepare/finalize objects."""

    prepare_finalize: ClassVar[type[FusedMoEPrepareAndFinalizeModular]]

    def __init__(self, ranks: RankContext):
        self.ranks = ranks
        self._made: dict[tuple, FusedMoEPrepareAndFinalizeModular] = {}

    @classmethod
    def unavailable(cls) -> str | None:
        """Returns the reason why this backend cannot run on this machine (a package, a device, a link), or None when it can."""
        return None

    @classmethod
    def buffer_bytes(cls, spec: LayerSpec, options: PrepareFinalizeOptions) -> int:
        """Returns the device memory that `get_handle` takes on each rank. It is checked before allocation and shown by `plan`."""
        return 0

    def get_handle(self, spec: LayerSpec, options: PrepareFinalizeOptions) -> FusedMoEPrepareAndFinalizeModular:
        """Returns the prepare/finalize object of a configuration. Collective on the first use of that configuration."""
        key = (spec, options)
        if key not in self._made:
            self._made[key] = self.make(spec, options)
        return self._made[key]

    def make(self, spec: LayerSpec, options: PrepareFinalizeOptions) -> FusedMoEPrepareAndFinalizeModular:
        return self.prepare_finalize(self.ranks, spec, options)

    def interrupt(self) -> None:
        for made in list(self._made.values()):
            made.interrupt()

    def abandon(self) -> None:
        for made in self._made.values():
            made.abandon()

    def destroy(self) -> None:
        """Closes all objects and the library. Collective and explicit: there is no destructor."""
        while self._made:
            _, made = self._made.popitem()
            made.close()


class FusedMoEExpertsModular(ABC):
    """Computes permute, x W1, activation and multiply, quantise, x W2, unpermute, and, if it pays, weight and reduce.

    One object serves every layer of one shape. The weights come with each call.
    """

    capability: ClassVar[ExpertsCapability]
    tunes: ClassVar[bool] = False
    """The class has variants of its kernels, and `tune` chooses among them by measurement."""

    def __init__(self, spec: LayerSpec):
        self.spec = spec

    @classmethod
    def unavailable(cls) -> str | None:
        """Returns the reason why this backend cannot run on this machine, or None when it can."""
        return None

    @classmethod
    def activation_formats(cls) -> frozenset[FusedMoEActivationFormat]:
        return cls.capability.activation_formats

    @classmethod
    def supports_expert_map(cls) -> bool:
        return cls.capability.supports_expert_map

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Repacks the weights for the kernels, once after loading. The result may share memory with `weights`."""
        return weights

    @abstractmethod
    def workspace_shapes(self, num_rows: int, top_k: int, num_experts: int, capacity: int = 0) -> WorkspaceShapes:
        """Returns the shapes for `num_rows` = M' rows in Standard format, or `num_experts` x `capacity` = e x T in batched."""

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce: ...

    @abstractmethod
    def apply(
        self, output: torch.Tensor, prepared: Prepared, *, weights: ExpertWeights, workspace: Workspace
    ) -> torch.Tensor:
        """Writes the result to `output`, whose shape `workspace_shapes` gave, and returns it."""

    def use(self, tuning: Tuning) -> None:
        """Sets the source of variants. It is called right after the constructor or never.

        Raises ConfigError when a named file is wrong.
        """

    def tune(self, weights: ExpertWeights, max_rows: int) -> None:
        """Measures variants for batches of up to `max_rows` rows within the budget of `use`. Not collective.

        It runs before workspaces are reserved and before `warm_up`, since both depend on the choice. A second call measures
        nothing.
        """

    def variant(self) -> str:
        """Returns the name of the choice that `tune` or a file made, for keys of measured times. Empty: there was none."""
        return ""

    def explain(self) -> list[str]:
        """Returns the measured choices and their reasons, in sentences for the log and `GetStatus`."""
        return []

    def warm_up(self, weights: ExpertWeights, max_rows: int) -> None:
        """Compiles and measures everything that `apply` may need up to `max_rows`. Nothing may compile afterwards."""
