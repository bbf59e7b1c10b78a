"""Defines the values that pass between prepare, experts and finalize.

Legend of suffixes: M tokens, K hidden size, N intermediate size, E physical experts of all ranks, e experts of this
rank, T capacity per expert, t = top-k, R ranks.
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from epserve.errors import ConfigError

from .packing import HowPacked


class FusedMoEActivationFormat(enum.Enum):
    """Names the layout of activations between prepare and finalize."""

    Standard = "standard"
    """`(M, K)` rows with ids and weights `(M, t)`."""
    BatchedExperts = "batched_experts"
    """`(e, T, K)` with `expert_num_tokens (e,)`. Rows past the count are undefined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Holds each token's experts and their weights.

    `ids_Mt`: contiguous. -1 means "no expert", and its weight is ignored. Before prepare these are physical expert ids,
    0 .. E-1, in the dtype that the prepare/finalize asks for (`topk_indices_dtype`: int32 or int64). In the result of prepare
    they are int32 local slots of this rank, 0 .. e-1, and every other slot is -1.
    `weights_Mt`: float32, contiguous.
    """

    ids_Mt: torch.Tensor
    weights_Mt: torch.Tensor

    def __post_init__(self):
        assert self.ids_Mt.dtype in (torch.int32, torch.int64) and self.weights_Mt.dtype == torch.float32
        assert self.ids_Mt.shape == self.weights_Mt.shape and self.ids_Mt.ndim == 2

    def rows(self, start: int, stop: int) -> Routing:
        return Routing(ids_Mt=self.ids_Mt[start:stop], weights_Mt=self.weights_Mt[start:stop])

    def with_ids(self, dtype: torch.dtype) -> Routing:
        """Returns the same routing with ids of `dtype`, and itself where they have it already."""
        return self if self.ids_Mt.dtype == dtype else Routing(ids_Mt=self.ids_Mt.to(dtype), weights_Mt=self.weights_Mt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Holds each rank's number of physical experts. Rank r holds the ids `offsets[r] .. offsets[r+1]-1`. Counts may differ.

    slices: the number of ranks that share each entry, each with a slice of all its experts (tensor parallelism). Entry g belongs
    to the ranks g * slices .. (g + 1) * slices - 1, and "rank" means an entry wherever experts are counted.
    """

    counts: tuple[int, ...]
    slices: int = 1
    offsets: tuple[int, ...] = field(init=False)

    def __post_init__(self):
        if not self.counts or any(count < 0 for count in self.counts) or sum(self.counts) == 0:
            raise ConfigError(f"experts per rank must be non-negative and not all zero, got {self.counts}")
        if self.slices < 1:
            raise ConfigError(f"ranks that share an expert must be at least 1, got {self.slices}")
        object.__setattr__(self, "offsets", (0, *accumulate(self.counts)))

    @classmethod
    def even(cls, num_experts: int, num_ranks: int, *, slices: int = 1) -> ExpertLayout:
        """Returns the most even layout: the first `num_experts % num_ranks` ranks hold one more."""
        base, extra = divmod(num_experts, num_ranks)
        return cls(counts=tuple(base + (rank < extra) for rank in range(num_ranks)), slices=slices)

    @property
    def num_experts(self) -> int:
        return self.offsets[-1]

    @property
    def num_ranks(self) -> int:
        return len(self.counts)

    def rank_of(self, expert: int) -> int:
        return bisect.bisect_right(self.offsets, expert) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """Describes the expert's non-linearity as data.

    kind: "silu", "gelu" (erf), "gelu_tanh", "relu2", "swigluoai" (gate * sigmoid(alpha * gate) * (up + 1)) or
    "swiglu_softcap" (cap(gate, alpha) * sigmoid(gate) * cap(up, limit) with cap(x, c) = c * tanh(x / c)).
    gated: x W1 yields gate and up, and the result is act(gate) * up. Otherwise act(x W1).
    limit: clamp of gate (above) and up (both sides) before the non-linearity, as gpt-oss and DeepSeek-V4 have it.
    output_norm_eps: where set, an expert's output y becomes y / sqrt(mean(y * y) + eps) before it is weighted (Muse Spark).
    """

    kind: str = "silu"
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.702
    output_norm_eps: float | None = None

    KINDS = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai")
    RARE = ("swiglu_softcap",)
    """Kinds that a backend computes only if its capability record says so."""
    GATED_ONLY = ("swigluoai", "swiglu_softcap")

    def __post_init__(self):
        if self.kind not in self.KINDS + self.RARE:
            raise ConfigError(f"activation {self.kind!r} is not one of {', '.join(self.KINDS + self.RARE)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Holds one rank's experts of one layer: weights, scales and everything derived from them, moved as one unit.

    `w13_eNK` `(e, 2N, K)`: the N rows of gate, then the N rows of up (`(e, N, K)` when not gated). `w2_eKN` `(e, K, N)`.
    `b13`, `b2`: optional biases `(e, 2N)`, `(e, K)`. `s13`, `s2`, `a1`, `a2`: scales of weights and activations, whose
    shapes `QuantConfig` gives. Loaders bring other layouts (interleaved, transposed) into this one, so that every experts
    class knows one.
    """

    w13_eNK: torch.Tensor
    w2_eKN: torch.Tensor
    activation: Activation = Activation()
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    s13: torch.Tensor | None = None
    s2: torch.Tensor | None = None
    a1: torch.Tensor | None = None
    a2: torch.Tensor | None = None
    packing: HowPacked | None = None
    """The layout of `w13_eNK` and `w2_eKN` in memory after an experts class packed them. None: plain rows."""
    derived: dict = field(default_factory=dict, compare=False, repr=False)
    """Values that an experts class made from these tensors (repacked weights, TMA descriptors), keyed by its own name."""

    @property
    def num_experts(self) -> int:
        return self.w13_eNK.shape[0]

    def matrices(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the two matrices of one expert as plain rows: views, or copies of packed ones."""
        if self.packing is None:
            return self.w13_eNK[expert], self.w2_eKN[expert]
        return self.packing.matrices(self, expert)

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("w13_eNK", "w2_eKN", "b13", "b2", "s13", "s2", "a1", "a2")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Holds the sizes of one MoE layer. `hidden` = K, `intermediate` = N, `num_experts` = E (physical), `top_k` = t."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16
    """The dtype of the activations that enter and leave the layer."""
