"""Rows that cross the network once a host: right sums for any places of ranks, and the bytes that travel."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epserve import all2all
from epserve.modular_kernel import PrepareFinalizeOptions, QuantConfig, RankContext
from epserve.modular_kernel.quantization import quantise_blocks
from tests.kernel.test_modular_kernel_combinations import make_kernel, poison_new_memory
from tests.support.cases import CASES, TOLERANCE, make_inputs, reference
from tests.support.ranks import run_ranks

PLACES = {
    "one host": (0, 0, 0, 0),
    "two hosts": (0, 0, 1, 1),
    "ranks that are not side by side": (0, 1, 0, 1),
    "uneven hosts": (0, 0, 0, 1),
    "three hosts": (0, 1, 1, 2),
    "one rank a host": (0, 1, 2, 3),
}
NAMES = ("plain", "bf16", "zipf", "cap_plus_1", "cap_on_one", "holes", "repeats", "one_token", "all_empty", "lopsided")


def forward(ranks: RankContext, hosts, case_name: str) -> list[tuple[float, float]]:
    """Squared errors and norms of this rank's rows, for two ways and twice."""
    poison_new_memory(ranks)
    case = CASES[case_name]
    manager = all2all.REGISTRY.get("all_to_all_by_host")(dataclasses.replace(ranks, hosts=hosts))
    kernel, inputs = make_kernel(manager, "loop", case, ranks)
    want = reference(inputs.x_MK, inputs.routing, inputs.every)
    outs = [
        kernel.forward(inputs.x_MK, inputs.routing, weights=inputs.weights, tokens_per_rank=known)
        for known in (inputs.tokens_per_rank, None, None)
    ]
    assert all(torch.equal(out, outs[0]) for out in outs), "repeats give the same bits"
    manager.destroy()
    return float((outs[0].double() - want).square().sum()), float(want.square().sum())


@pytest.mark.parametrize("case_name", NAMES)
@pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES.keys())
def test_sums_are_right_wherever_ranks_are(hosts, case_name):
    results = run_ranks(forward, 4, hosts, case_name)
    error, norm = (sum(part) for part in zip(*results, strict=True))
    assert (error / norm) ** 0.5 <= TOLERANCE[CASES[case_name].dtype] if norm else error == 0


def bytes_between(ranks: RankContext, hosts, name: str) -> tuple[int, int]:
    """Bytes to other hosts of one forward, and the number of (token, other host) pairs."""
    case = dataclasses.replace(
        CASES["plain"], hidden=1024, num_experts=16, top_k=8, cap=64, tokens=lambda rank, world: 40
    )
    manager = all2all.REGISTRY.get(name)(dataclasses.replace(ranks, hosts=hosts))
    kernel, inputs = make_kernel(manager, "loop", case, ranks)
    kernel.forward(inputs.x_MK, inputs.routing, weights=inputs.weights, tokens_per_rank=inputs.tokens_per_rank)
    sent = kernel.prepare_finalize.network_bytes()
    host_of_expert = torch.tensor(hosts).repeat_interleave(4)[inputs.routing.ids_Mt.long()]
    pairs = sum(int((host_of_expert == host).any(1).sum()) for host in set(hosts) - {hosts[ranks.rank]})
    manager.destroy()
    return sent, pairs


def test_a_row_crosses_the_network_once_a_host_and_its_sum_once():
    """Two hosts of two ranks, top-8 of 16: 1.05 of the rows at most, where a row to each rank sends nearly twice as many."""
    hosts, row = PLACES["two hosts"], 1024 * 4
    told = run_ranks(bytes_between, 4, hosts, "all_to_all_by_host")
    sent, pairs = (sum(part) for part in zip(*told, strict=True))
    assert 2 * pairs * row < sent <= 1.05 * 2 * pairs * row
    flat, _ = (sum(part) for part in zip(*run_ranks(bytes_between, 4, hosts, "all_to_all"), strict=True))
    assert flat > 1.5 * sent
    for name in ("all_to_all_by_host", "all_to_all", "allgather_reducescatter"):
        alone = run_ranks(bytes_between, 4, PLACES["one host"], name)
        assert sum(sent for sent, _ in alone) == 0, "nothing leaves a host that has all ranks"


def quantised(ranks: RankContext, hosts) -> tuple[bool, bool]:
    """Rows in fp8 blocks with their scales, as they arrive behind both exchanges."""
    case = dataclasses.replace(CASES["bf16"], hidden=256, tokens=lambda rank, world: 3 + rank)
    spec = dataclasses.replace(case.spec(4), quant=QuantConfig(scheme="fp8_block"))
    manager = all2all.REGISTRY.get("all_to_all_by_host")(dataclasses.replace(ranks, hosts=hosts))
    pf = manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=16))
    _, inputs = make_kernel(all2all.REGISTRY.get("all_to_all")(ranks), "loop", case, ranks)
    prepared = pf.prepare(inputs.x_MK, inputs.routing, quant=spec.quant)
    every = [quantise_blocks(make_inputs(case, rank, 4).x_MK) for rank in range(4)]
    wanted = {
        (x.view(torch.uint8).numpy().tobytes(), scales.numpy().tobytes())
        for rows in every
        for x, scales in zip(*rows, strict=True)
    }
    got = {
        (x.view(torch.uint8).numpy().tobytes(), scales.numpy().tobytes())
        for x, scales in zip(prepared.x, prepared.scales, strict=True)
    }
    pf.abandon()
    return bool(got), got <= wanted


def test_quantised_rows_arrive_with_their_scales():
    assert run_ranks(quantised, 4, PLACES["two hosts"]) == [(True, True)] * 4
