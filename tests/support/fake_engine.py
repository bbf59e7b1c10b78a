"""An engine in this process: the local modular kernel, or a function of the batch. For tests of serving and client only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import torch

from epserve.all2all.local import LocalAll2AllManager
from epserve.config import ServerConfig
from epserve.engine.face import EngineFace
from epserve.engine.planning import Answer, Batch
from epserve.errors import NotReady
from epserve.experts.loop import LoopExperts, expert_mlp
from epserve.joining.peers import Peers
from epserve.modular_kernel import (
    Activation,
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    FusedMoEModularKernel,
    GateSpec,
    LayerSpec,
    PrepareFinalizeOptions,
    RankContext,
    Routing,
)
from epserve.rank.backward.kernel import RankGradients
from epserve.rank.step import joined_gradients
from epserve.server.server import Server

Compute = Callable[[Batch], Awaitable[torch.Tensor | Answer]]


def tiny_info(**changes) -> SimpleNamespace:
    """The public data of a model, as epserve.models.ModelInfo has it."""
    values = {
        "family": "tiny", "name": "tiny-moe", "hidden": 32, "intermediate": 16, "num_experts": 8, "top_k": 3,
        "dtype": torch.float32, "layers": (1, 2, 3, 7), "activation": Activation(), "bias": False,
        "gate": GateSpec(top_k=3), "shared_intermediate": 0, "fingerprint": "0123abcd",
        "quant": SimpleNamespace(scheme="none"),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


async def echo(batch: Batch) -> torch.Tensor:
    return batch.hidden


def echo_after(gate: asyncio.Event) -> Compute:
    """Returns an `echo` that waits for the gate first."""

    async def held(batch: Batch) -> torch.Tensor:
        await gate.wait()
        return batch.hidden

    return held


async def hang(batch: Batch) -> torch.Tensor:
    """Answers later than any test waits."""
    await asyncio.sleep(600)
    return batch.hidden


class FakeEngine(EngineFace):
    """An engine without ranks. `compute` may be replaced at any time; `seen` keeps what came."""

    def __init__(self, compute: Compute = echo, **info):
        super().__init__()
        self.info = tiny_info(**info)
        self.compute = compute
        self.seen: list[Batch] = []
        self.running = 0
        self.cancelled = 0
        self._state = "serving"

    @property
    def layers(self) -> tuple[int, ...]:
        return self.info.layers

    async def answer(self, batch: Batch) -> Answer:
        if self._state != "serving":
            raise NotReady(f"the engine is {self._state}")
        self.seen.append(batch)
        self.running += 1
        try:
            made = await self.compute(batch)
            return made if isinstance(made, Answer) else Answer(out_MK=made)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def rebalance(self, explain=False):
        raise NotReady("there are no ranks")

    async def scale(self, ranks):
        raise NotReady("there are no ranks")

    def state(self) -> str:
        return self._state

    def set_state(self, state: str) -> None:
        self._state = state
        self._tell_state(state)

    def tell_step(self, record) -> None:
        self._tell_step(record)

    def status(self) -> SimpleNamespace:
        rank = SimpleNamespace(
            rank=0,
            node="here",
            pid=1,
            device="cpu",
            gpu_uuid="",
            experts=(0, 1),
            tokens_done=5,
            weights_bytes=77,
            alive=True,
            phase="idle",
            late_compiles=0,
            layer_experts={},
            experts_choices=(),
        )
        return SimpleNamespace(
            state=self._state,
            generation=1,
            steps=len(self.seen),
            ranks=(rank,),
            queue_tokens=0,
            backends="local",
            recoveries=0,
            replayed_requests=0,
            expert_tokens={},
            slots={},
            spares=0,
            rebalances=0,
            rebalances_skipped=0,
            front_ends=0,
            missing_experts={1: (4, 5)},
        )


class LocalExperts:
    """`compute` with real experts: one rank, the local all-to-all and the loop experts; a softmax gate of its own."""

    def __init__(self, seed: int = 0):
        info = tiny_info()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / 4

        E, N, K = info.num_experts, info.intermediate, info.hidden
        self.top_k = info.top_k
        self.gate_EK = draw(E, K)
        self.weights = ExpertWeights(w13_eNK=draw(E, 2 * N, K), w2_eKN=draw(E, K, N))
        shape = ExpertShape(hidden=K, intermediate=N, num_experts=E, top_k=info.top_k, dtype=info.dtype)
        spec = LayerSpec(shape=shape, layout=ExpertLayout.even(E, 1))
        prepare_finalize = LocalAll2AllManager(RankContext()).get_handle(spec, PrepareFinalizeOptions())
        self.kernel = FusedMoEModularKernel(prepare_finalize, LoopExperts(spec))
        self.gradients = RankGradients(RankContext(), spec, PrepareFinalizeOptions(max_tokens_per_rank=1 << 20))

    async def __call__(self, batch: Batch) -> torch.Tensor:
        if batch.gradient is not None:
            return joined_gradients(*self.backward(batch.hidden, batch.gradient, batch.ids, batch.weights))
        return self.forward(batch.hidden, batch.ids, batch.weights)

    def backward(self, x, g, ids, weights) -> tuple[torch.Tensor, torch.Tensor]:
        routing = Routing(ids_Mt=ids.int().contiguous(), weights_Mt=weights.contiguous())
        with torch.no_grad():
            return self.gradients.backward(
                x, g, routing, weights=self.weights, tokens_per_rank=(len(x),), on_phase=lambda phase: None
            )

    def plain(self, x, ids, weights) -> torch.Tensor:
        """The routed experts in operators that have derivatives."""
        total = torch.zeros_like(x)
        for expert in range(self.weights.num_experts):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            y = expert_mlp(x[token], self.weights, expert)
            total = total.index_add(0, token, y * weights[token, slot, None].to(y.dtype))
        return total

    def forward(self, x, ids=None, weights=None) -> torch.Tensor:
        if ids is None:
            scores = torch.softmax(x @ self.gate_EK.T, dim=-1)
            weights, ids = scores.topk(self.top_k, dim=-1)
        routing = Routing(ids_Mt=ids.int().contiguous(), weights_Mt=weights.contiguous())
        return self.kernel.forward(x, routing, weights=self.weights)


@asynccontextmanager
async def serving(engine: FakeEngine, *, peers: Peers | None = None, **config) -> AsyncIterator[Server]:
    """A real gRPC server on a free loopback port."""
    server = Server(engine, ServerConfig(port=0, **config), peers=peers)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
