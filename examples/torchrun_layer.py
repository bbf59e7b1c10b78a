"""One expert-parallel MoE layer in a plain torch program: no Ray, no gRPC, no configuration file.

    torchrun --nproc-per-node 2 examples/torchrun_layer.py                # 2 CPU ranks over gloo, or 2 GPUs over NCCL
    mpirun -n 2 -x MASTER_ADDR=HOST -x MASTER_PORT=29500 python examples/torchrun_layer.py
    torchrun --nproc-per-node 2 examples/torchrun_layer.py --all2all nvlink --experts triton --dtype bfloat16

Each rank holds its own tokens and its own share of the experts. The result is compared with all experts on one rank.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist

from epserve import all2all, experts
from epserve.experts.loop import expert_mlp
from epserve.modular_kernel import (
    Backends,
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    GateSpec,
    GateWeights,
    LayerSpec,
    PrepareFinalizeOptions,
    RankContext,
    UnquantizedFusedMoEMethod,
)
from epserve.rank.gate import route

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # relative L2 error


def join() -> RankContext:
    """torchrun sets RANK and WORLD_SIZE, Open MPI its own names; MASTER_ADDR and MASTER_PORT are read by torch."""
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0)))
    world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", 1)))
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "nccl" if cuda else "gloo", rank=rank, world_size=world_size, device_id=device if cuda else None
        )
    group = dist.group.WORLD if world_size > 1 else None
    return RankContext(rank=rank, world_size=world_size, device=device, group=group)


def expert_weights(shape: ExpertShape, ids: range, device: torch.device) -> ExpertWeights:
    """The same expert is the same on every rank; a real program would read these from a checkpoint."""

    def matrix(expert: int, rows: int, columns: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * expert + rows)
        return torch.randn((rows, columns), generator=generator) / columns**0.5

    w13_eNK = torch.stack([matrix(expert, 2 * shape.intermediate, shape.hidden) for expert in ids])
    w2_eKN = torch.stack([matrix(expert, shape.hidden, shape.intermediate) for expert in ids])
    return ExpertWeights(w13_eNK=w13_eNK.to(device, shape.dtype), w2_eKN=w2_eKN.to(device, shape.dtype))


def reference(x_MK: torch.Tensor, routing, weights: ExpertWeights) -> torch.Tensor:
    """All experts here, one after the other, in float32."""
    out_MK = torch.zeros_like(x_MK, dtype=torch.float32)
    for expert in range(weights.num_experts):
        token, slot = (routing.ids_Mt == expert).nonzero(as_tuple=True)
        rows = expert_mlp(x_MK[token], weights, expert).float() * routing.weights_Mt[token, slot, None]
        out_MK.index_add_(0, token, rows)
    return out_MK


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=100, help="of each rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=128)
    parser.add_argument("--num-experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--all2all", default="all_to_all", choices=all2all.REGISTRY.names())
    parser.add_argument("--experts", default="grouped_mm", choices=experts.REGISTRY.names())
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()

    ranks = join()
    shape = ExpertShape(
        hidden=options.hidden, intermediate=options.intermediate, num_experts=options.num_experts,
        top_k=options.top_k, dtype=getattr(torch, options.dtype),
    )  # fmt: skip
    layout = ExpertLayout.even(options.num_experts, ranks.world_size)
    spec = LayerSpec(shape=shape, layout=layout, device=ranks.device.type)
    all2all_name = "local" if ranks.world_size == 1 else options.all2all
    backends = Backends(
        all2all=all2all.REGISTRY,
        experts=experts.REGISTRY,
        prefer_all2all=(all2all_name,),
        prefer_experts=(options.experts,),
    )

    method = UnquantizedFusedMoEMethod(spec, backends)
    kernel = method.init_prepare_finalize(ranks, PrepareFinalizeOptions(max_tokens_per_rank=options.tokens))
    mine = range(layout.offsets[ranks.rank], layout.offsets[ranks.rank + 1])
    weights = method.process_weights_after_loading(expert_weights(shape, mine, ranks.device))
    kernel.warm_up(weights)

    own = torch.Generator().manual_seed(ranks.rank)
    x_MK = torch.randn((options.tokens, shape.hidden), generator=own).to(ranks.device, shape.dtype)
    gate_EK = torch.randn((shape.num_experts, shape.hidden), generator=torch.Generator().manual_seed(7))
    gate = GateWeights(weight_EK=(gate_EK / shape.hidden**0.5).to(ranks.device, shape.dtype))
    ids_dtype = kernel.prepare_finalize.topk_indices_dtype()  # so that the all-to-all takes the gate's ids as they are
    routing = route(x_MK, gate, GateSpec(top_k=shape.top_k, renormalise=True), ids_dtype=ids_dtype)

    with torch.inference_mode():
        y_MK = kernel.forward(x_MK, routing, weights=weights)
        start = time.perf_counter()
        for _ in range(options.repeat):
            kernel.forward(x_MK, routing, weights=weights)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        ms = (time.perf_counter() - start) / options.repeat * 1e3
        want_MK = reference(x_MK, routing, expert_weights(shape, range(shape.num_experts), ranks.device))
    error = float((y_MK.float() - want_MK).norm() / want_MK.norm())
    print(
        f"rank {ranks.rank} of {ranks.world_size}, {ranks.device}: {options.tokens} tokens,"
        f" experts {mine.start}..{mine.stop - 1},"
        f" {all2all_name} + {options.experts}: relative error {error:.1e}, {ms:.2f} ms a step",
        flush=True,
    )
    assert method.manager is not None
    method.manager.destroy()
    if ranks.world_size > 1:
        dist.destroy_process_group()
    if error > TOLERANCE[shape.dtype]:
        raise SystemExit(f"relative error {error:.1e} is above {TOLERANCE[shape.dtype]:.0e}")


if __name__ == "__main__":
    main()
