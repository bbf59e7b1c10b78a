"""The case table of the modular kernel, and the truth that every case is held to: a dense reference in float64.

Each case says why it exists. It is crossed with every prepare/finalize, every experts class and several numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from epserve.modular_kernel import Activation, ExpertLayout, ExpertShape, ExpertWeights, LayerSpec, Routing

# Relative L2 error against float64: about four times what the plain loop has in that dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    why: str
    tokens: Callable[[int, int], int] = lambda rank, world: 5 + 2 * rank
    """(rank, world size) -> tokens of that rank."""
    route: Callable[[torch.Generator, int, Case, ExpertLayout, int], torch.Tensor]
    """(generator, tokens, case, layout, rank) -> ids `(tokens, top_k)`."""
    counts: Callable[[int, int], tuple[int, ...]] = lambda experts, world: ExpertLayout.even(experts, world).counts
    """(experts, world size) -> experts on each rank."""
    hidden: int = 80
    intermediate: int = 48
    num_experts: int = 8
    top_k: int = 3
    dtype: torch.dtype = torch.float32
    activation: Activation = Activation()
    bias: bool = False
    cap: int = 64
    magnitude: float = 1.0

    def spec(self, world: int, device: str = "cpu") -> LayerSpec:
        shape = ExpertShape(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            top_k=self.top_k,
            dtype=self.dtype,
        )
        layout = ExpertLayout(counts=self.counts(self.num_experts, world))
        return LayerSpec(shape=shape, layout=layout, device=device, activation=self.activation, bias=self.bias)


def distinct(gen, tokens, case, layout, rank):
    scores = torch.rand((tokens, case.num_experts), generator=gen)
    return scores.topk(case.top_k, dim=1).indices


def one_hot_expert(gen, tokens, case, layout, rank):
    return torch.full((tokens, case.top_k), case.num_experts - 1)


def same_set(gen, tokens, case, layout, rank):
    return torch.arange(case.top_k).repeat(tokens, 1)


def zipf(gen, tokens, case, layout, rank):
    chances = 1.0 / torch.arange(1, case.num_experts + 1)
    picks = [torch.multinomial(chances, case.top_k, generator=gen) for _ in range(tokens)]
    return torch.stack(picks) if picks else torch.empty((0, case.top_k), dtype=torch.long)


def remote_only(gen, tokens, case, layout, rank):
    """Only experts of the next rank (of this one, when it is alone)."""
    there = (rank + 1) % layout.num_ranks
    start, stop = layout.offsets[there], layout.offsets[there + 1]
    return torch.randint(start, stop, (tokens, case.top_k), generator=gen)


def with_holes(gen, tokens, case, layout, rank):
    ids = distinct(gen, tokens, case, layout, rank)
    ids[torch.rand(ids.shape, generator=gen) < 0.4] = -1
    return ids


def nothing(gen, tokens, case, layout, rank):
    return torch.full((tokens, case.top_k), -1)


def repeats(gen, tokens, case, layout, rank):
    return torch.randint(0, 2, (tokens, case.top_k), generator=gen)


def _only(which: int, tokens: int):
    return lambda rank, world: tokens if rank == which else 0


def _every(tokens: int):
    return lambda rank, world: tokens


def _all_on(which: int):
    return lambda experts, world: tuple(experts if rank == which % world else 0 for rank in range(world))


_ACTIVATIONS = (
    Activation(kind="silu", limit=0.5),
    Activation(kind="gelu"),
    Activation(kind="gelu_tanh"),
    Activation(kind="relu2"),
    Activation(kind="swigluoai", limit=0.7),
    Activation(kind="silu", gated=False),
    Activation(kind="gelu", gated=False),
    Activation(kind="relu2", gated=False),
)

_ROWS = [
    Case(name="plain", why="float32, uneven batches: the sums themselves", route=distinct),
    Case(name="bf16", why="the dtype that models have", route=distinct, dtype=torch.bfloat16),
    Case(name="fp16", why="T4: a dtype that libraries forget", route=distinct, dtype=torch.float16),
    Case(name="hidden_360", why="T4: gpt-oss's 2880 in small: no power of two divides it beyond 8", route=distinct,
         hidden=360, intermediate=360, dtype=torch.bfloat16),
    Case(name="hidden_67", why="T4: 7169 in small, an odd size: right, or refused with the number", route=distinct,
         hidden=67, intermediate=33),
    Case(name="all_empty", why="T1: no rank has a token", route=distinct, tokens=_every(0)),
    Case(name="one_token", why="T1: one token in the whole system", route=distinct, tokens=_only(0, 1)),
    Case(name="silent_owner", why="T1: the rank without tokens owns all experts", route=distinct,
         tokens=lambda rank, world: 0 if rank == world - 1 and world > 1 else 4, counts=_all_on(-1)),
    Case(name="all_remote", why="T1: no rank computes anything of its own", route=remote_only),
    Case(name="hot_expert", why="T5: every slot of every token to one expert, top-1", route=one_hot_expert, top_k=1,
         tokens=_every(30)),
    Case(name="same_set", why="T5: every token to the same experts; most ranks get nothing", route=same_set),
    Case(name="zipf", why="T5: the skew of real traffic", route=zipf, num_experts=16, top_k=4, tokens=_every(60)),
    Case(name="cap_less_1", why="T3: one below the cap", route=distinct, cap=8, tokens=_every(7)),
    Case(name="cap", why="T3: the cap itself, one round", route=distinct, cap=8, tokens=_every(8)),
    Case(name="cap_plus_1", why="T3: a second round of one token", route=distinct, cap=8, tokens=_every(9)),
    Case(name="cap_times_10", why="T3: ten rounds", route=distinct, cap=8, tokens=_every(80)),
    Case(name="cap_on_one", why="T3: only rank 0 needs a second round; the others must enter it too", route=distinct,
         cap=8, tokens=lambda rank, world: 9 if rank == 0 else 3),
    Case(name="cap_hot", why="T3: all ranks fill one expert's block to its capacity", route=one_hot_expert, top_k=1,
         cap=8, tokens=_every(8)),
    Case(name="holes", why="-1 in any column, with NaN as its weight", route=with_holes),
    Case(name="holes_only", why="every id is -1: exact zeros", route=nothing),
    Case(name="repeats", why="TX2: an expert twice in one row counts with both weights", route=repeats, tokens=_every(9),
         cap=9),
    Case(name="five_experts", why="T11: 5 experts do not divide by 2 or 4", route=distinct, num_experts=5),
    Case(name="three_experts", why="T11: 3 experts on 4 ranks, one holds none", route=distinct, num_experts=3, top_k=2),
    Case(name="sixty_experts", why="T11: 60 experts, as Qwen1.5-MoE has them", route=distinct, num_experts=60, top_k=4),
    Case(name="lopsided", why="T11: rank 0 holds one expert, the last holds the rest, any between none", route=distinct,
         counts=lambda experts, world: (experts,) if world == 1 else (1, *[0] * (world - 2), experts - 1)),
    Case(name="top_12", why="T4: more slots than a library's limit of 8 or 9", route=distinct, num_experts=16, top_k=12),
    Case(name="large_values", why="rows of 1e3 must not pass through a narrower type", route=distinct, magnitude=1e3,
         activation=Activation(kind="relu2")),
    Case(name="bias", why="gpt-oss: biases on both projections, with its clamped non-linearity", route=distinct, bias=True,
         activation=Activation(kind="swigluoai", limit=7.0)),
    Case(name="bias_ungated", why="biases without a gate have other shapes", route=distinct, bias=True,
         activation=Activation(kind="gelu", gated=False)),
    *(Case(name=f"act_{a.kind}{'' if a.gated else '_ungated'}", why="each non-linearity, its limit within reach",
           route=distinct, activation=a) for a in _ACTIVATIONS),
]  # fmt: skip

CASES = {case.name: case for case in _ROWS}
assert len(CASES) == len(_ROWS), "two cases of one name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One rank's share of a case."""

    x_MK: torch.Tensor
    routing: Routing
    weights: ExpertWeights
    """Of this rank's experts."""
    every: ExpertWeights
    """Of all experts, for the reference."""
    tokens_per_rank: tuple[int, ...]

    def to(self, device: torch.device) -> Inputs:
        routing = Routing(ids_Mt=self.routing.ids_Mt.to(device), weights_Mt=self.routing.weights_Mt.to(device))
        moved = {name: value.to(device) for name, value in self.weights.tensors().items()}
        weights = ExpertWeights(activation=self.weights.activation, **moved)
        return Inputs(
            x_MK=self.x_MK.to(device),
            routing=routing,
            weights=weights,
            every=self.every,
            tokens_per_rank=self.tokens_per_rank,
        )


def make_inputs(case: Case, rank: int, world: int) -> Inputs:
    """The same weights on every rank; tokens that depend on the rank. On the CPU."""
    layout = case.spec(world).layout
    every = make_weights(case)
    start, stop = layout.offsets[rank], layout.offsets[rank + 1]
    mine = ExpertWeights(
        activation=case.activation, **{name: value[start:stop].clone() for name, value in every.tensors().items()}
    )
    gen = torch.Generator().manual_seed(1000 + rank)
    tokens = case.tokens(rank, world)
    x_MK = (torch.randn((tokens, case.hidden), generator=gen) * case.magnitude).to(case.dtype)
    ids_Mt = case.route(gen, tokens, case, layout, rank).int().contiguous()
    weights_Mt = torch.rand(ids_Mt.shape, generator=gen) + 0.1
    weights_Mt[ids_Mt < 0] = float("nan")
    return Inputs(
        x_MK=x_MK,
        routing=Routing(ids_Mt=ids_Mt, weights_Mt=weights_Mt),
        weights=mine,
        every=every,
        tokens_per_rank=tuple(case.tokens(other, world) for other in range(world)),
    )


def make_weights(case: Case) -> ExpertWeights:
    gen = torch.Generator().manual_seed(7)
    e, k, n = case.num_experts, case.hidden, case.intermediate
    width = 2 * n if case.activation.gated else n

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=gen) * scale).to(case.dtype)

    return ExpertWeights(
        w13_eNK=draw(e, width, k, scale=k**-0.5),
        w2_eKN=draw(e, k, n, scale=n**-0.5),
        b13=draw(e, width, scale=0.5) if case.bias else None,
        b2=draw(e, k, scale=0.5) if case.bias else None,
        activation=case.activation,
    )


def reference(x_MK: torch.Tensor, routing: Routing, every: ExpertWeights) -> torch.Tensor:
    """Float64 `(M, K)`: every expert on every token, then the weighted sum. Shares no code with what it judges."""
    x_MK, out_MK = x_MK.double(), torch.zeros(x_MK.shape, dtype=torch.float64)
    for expert in range(every.num_experts):
        hit_Mt = routing.ids_Mt == expert
        share_M = torch.where(hit_Mt, routing.weights_Mt.double(), 0.0).sum(1)
        h = x_MK @ every.w13_eNK[expert].double().T
        if every.b13 is not None:
            h = h + every.b13[expert].double()
        y_MK = _act64(h, every.activation) @ every.w2_eKN[expert].double().T
        if every.b2 is not None:
            y_MK = y_MK + every.b2[expert].double()
        out_MK += torch.where(hit_Mt.any(1)[:, None], share_M[:, None] * y_MK, 0.0)
    return out_MK


def _act64(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = h, torch.ones((), dtype=h.dtype)
    if activation.gated:
        gate, up = h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :]
        if activation.limit is not None:
            gate, up = gate.minimum(torch.tensor(activation.limit)), up.clip(-activation.limit, activation.limit)
    if activation.kind == "silu":
        return gate / (1 + (-gate).exp()) * up
    if activation.kind == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    if activation.kind == "gelu_tanh":
        return gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    if activation.kind == "relu2":
        return torch.where(gate > 0, gate, 0.0) ** 2 * up
    assert activation.kind == "swigluoai"
    return gate / (1 + (-activation.alpha * gate).exp()) * (up + 1)
