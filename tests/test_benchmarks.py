"""The benchmarks on CPU ranks: what they measure is checked, failures are told apart, and their conclusions are the numbers'."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import all2all
from benchmarks import all2all as all2all_benchmark
from benchmarks import layer
from epserve.modular_kernel import Entry, ExpertWeights, PrepareFinalizeOptions
from epserve.synthetic import LayerSizes, SyntheticLayer

from .ranks import run_ranks
from .test_deepep import manager_on_cpu

ROOT = Path(__file__).parent.parent
SMALL = LayerSizes(hidden=256, intermediate=128, num_experts=8, top_k=2, shared=64)


class Gathering:
    """What benchmarks call `Ranks`, on a pool's ranks."""

    def __init__(self, ranks):
        self.rank, self.world, self.device, self.group = ranks.rank, ranks.world_size, ranks.device, ranks.group

    def gather(self, value):
        values = [None] * self.world
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values


def bare_calls(ranks, name: str) -> list[dict]:
    """`layer.bare` over the stand-in of DeepEP; torch's peer is replaced, since its kernels are Triton's."""
    registered = all2all.REGISTRY._entries[name]
    manager = manager_on_cpu(name, ranks)
    on_cpu = type(manager)
    on_cpu.unavailable = classmethod(lambda cls: None)
    all2all.REGISTRY._entries[name] = Entry(name=name, summary="", load=lambda: on_cpu)
    timed = all2all_benchmark.time_graph

    def eager(call, ranks):
        start = time.perf_counter()
        out = call()
        return (time.perf_counter() - start) * 1e6, out

    class Peer:
        def __init__(self, weights: ExpertWeights, topk: int):
            self.weights = weights

        def run(self, inputs):
            out = torch.zeros(inputs.x.shape, dtype=torch.float32)
            for token, slot in (inputs.ids_local >= 0).nonzero().tolist():
                expert = inputs.ids_local[token, slot]
                gate, up = (self.weights.w13_eNK[expert].float() @ inputs.x[token].float()).chunk(2)
                y = self.weights.w2_eKN[expert].float() @ (torch.nn.functional.silu(gate) * up)
                out[token] += inputs.weights[token, slot] * y
            return out.bfloat16()

    layer.time_graph, layer.TorchGroupedMM = eager, Peer
    try:
        sizes = dataclasses.replace(SMALL, hidden=2048 if name == "deepep_ll" else 256)
        experts_name = "batched_loop" if name == "deepep_ll" else "loop"
        made = SyntheticLayer(
            ranks, sizes, all2all_name=name, experts_name=experts_name,
            options=PrepareFinalizeOptions(max_tokens_per_rank=8), manager=manager,
        )  # fmt: skip
        x = made.tokens(5)
        routing = made.gate(x)
        error = made.error(x, routing, made.routed(x, routing, (5,) * ranks.world_size))
        if name == "deepep_ht":  # apply() of our own experts must be what torch's are compared with
            layer.apply = lambda fused, prepared, made: (
                lambda: Peer(made.raw_weights, 2).run(
                    SimpleNamespace(
                        x=prepared.x, ids_local=prepared.routing.ids_Mt, weights=prepared.routing.weights_Mt
                    )
                )
            )
        cells = list(layer.bare(name, Gathering(ranks), made, 5))
        manager.destroy()
        return [{"error": error}, *cells]
    finally:
        all2all.REGISTRY._entries[name] = registered
        layer.time_graph = timed


@pytest.mark.parametrize("name", ["deepep_ht", "deepep_ll"])
def test_bare_deepep_runs_on_our_buffer_and_its_results_are_checked(name):
    first, second = run_ranks(bare_calls, 2, name)
    assert first[0]["error"] < 1e-2
    assert [cell["backend"] for cell in first[1:]] == [f"bare_{name}", "peer_torch"][: 2 if name == "deepep_ht" else 1]
    bare = first[1]
    assert bare["dispatch_us"] > 0 and bare["combine_us"] > 0 and bare["error"] < 1e-2
    assert [cell["us"] for cell in first[1:]] == [cell["us"] for cell in second[1:]], (
        "the slowest rank's, on every rank"
    )
