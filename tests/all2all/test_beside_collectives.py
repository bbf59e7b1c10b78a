"""Row T19 of the trials: large NCCL all-gathers on a stream of their own beside the steps of an all-to-all, for a minute.

Kernels that wait for other ranks must not hold what the other library's kernels need to get on: a deadlock shows as a step that
passes its deadline. The results are compared all along.
"""

import time

import pytest
import torch
import torch.distributed as dist

from epserve import all2all, experts
from epserve.modular_kernel import FusedMoEModularKernel, PrepareFinalizeOptions, RankContext
from tests.kernel.test_quantised_combinations import case_of
from tests.support import triton_cases
from tests.support.ranks import run_ranks

SECONDS = 60.0
GATHERED = 64 << 20  # elements of bfloat16 from each rank
PAIRS = [
    ("nvlink", "triton"), ("nvlink_batched", "triton_batched"), ("deepep_ht", "triton"), ("deepep_ll", "triton_batched")
]  # fmt: skip


def steps_beside_gathers(ranks: RankContext, pf_name, experts_name, seconds):
    """(steps, gathers) in `seconds`, on every rank the same number of steps."""
    case, spec = case_of("none", False, ranks.rank, ranks.world_size)
    every, _ = triton_cases.make_weights(case, "cpu")
    start, stop = spec.layout.offsets[ranks.rank], spec.layout.offsets[ranks.rank + 1]
    mine = {name: value[start:stop].contiguous().to(ranks.device) for name, value in every.tensors().items()}
    manager = all2all.REGISTRY.get(pf_name)(ranks)
    pf = manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=64))
    kernel = FusedMoEModularKernel(pf, experts.REGISTRY.get(experts_name)(spec))
    weights = kernel.fused_experts.prepare_weights(type(every)(activation=every.activation, **mine))
    kernel.warm_up(weights)
    x, _ = triton_cases.make_input(case, ranks.device, seed=ranks.rank)
    routing = triton_cases.make_routing(case, ranks.device, seed=ranks.rank)
    counts = tuple(case_of("none", False, rank, ranks.world_size)[0].tokens for rank in range(ranks.world_size))
    first = kernel.forward(x, routing, weights=weights, tokens_per_rank=counts).clone()
    stream = torch.cuda.Stream(ranks.device)
    part = torch.full((GATHERED,), float(ranks.rank), dtype=torch.bfloat16, device=ranks.device)
    whole = torch.empty(GATHERED * ranks.world_size, dtype=torch.bfloat16, device=ranks.device)
    going = torch.ones(1, device=ranks.device)
    steps = gathers = 0
    end = time.monotonic() + seconds
    while going.item():
        with torch.cuda.stream(stream):
            dist.all_gather_into_tensor(whole, part, group=ranks.group)
        gathers += 1
        for _ in range(20):
            out = kernel.forward(x, routing, weights=weights, tokens_per_rank=counts)
            steps += 1
        torch.cuda.synchronize(ranks.device)
        assert torch.allclose(out, first, rtol=2e-2, atol=2e-2)
        pf.check()
        going.fill_(float(time.monotonic() < end))
        dist.broadcast(going, 0, group=ranks.group)  # all stop after the same step
    assert whole.view(ranks.world_size, -1)[:, 0].tolist() == list(range(ranks.world_size))
    manager.destroy()
    return steps, gathers


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("pf_name", "experts_name"), PAIRS)
def test_no_deadlock_beside_large_all_gathers(pf_name, experts_name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    for registry, name in ((all2all.REGISTRY, pf_name), (experts.REGISTRY, experts_name)):
        if reason := registry.get(name).unavailable():
            pytest.skip(f"{name}: {reason}")
    done = run_ranks(steps_beside_gathers, 2, pf_name, experts_name, SECONDS, device="cuda", timeout=SECONDS + 120)
    assert done[0] == done[1] and min(done[0]) > 20
