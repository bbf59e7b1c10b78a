"""A program: the case table of the modular kernel over the NVLink all-to-all, on CPU ranks in Triton's interpreter.

TRITON_INTERPRET=1 python tests/all2all/nvlink_cases.py --world 2 --meet /tmp/meet plain holes
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2]))

from epserve import all2all
from epserve.all2all.nvlink import NvlinkAll2AllManager
from epserve.all2all.nvlink_batched import NvlinkBatchedAll2AllManager, NvlinkBatchedPrepareAndFinalize
from epserve.modular_kernel import Entry, RankContext
from tests.all2all.nvlink_stress import InterpretedNvlink
from tests.kernel.test_modular_kernel_combinations import run_case
from tests.support.cases import CASES, TOLERANCE


class InterpretedManager(NvlinkAll2AllManager):
    prepare_finalize = InterpretedNvlink


class InterpretedBatched(NvlinkBatchedPrepareAndFinalize):
    capability = dataclasses.replace(NvlinkBatchedPrepareAndFinalize.capability, devices=frozenset({"cpu"}))
    providers, tilings = InterpretedNvlink.providers, InterpretedNvlink.tilings


class InterpretedBatchedManager(NvlinkBatchedAll2AllManager):
    prepare_finalize = InterpretedBatched


BACKENDS = {"nvlink": (InterpretedManager, "loop"), "nvlink_batched": (InterpretedBatchedManager, "batched_loop")}


def main(rank: int, args) -> None:
    from tests.experts.triton_interpreter import exact_casts  # noqa: F401, bf16 as the hardware converts it

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=rank, world_size=args.world)
    manager, experts = BACKENDS[args.backend]
    all2all.REGISTRY._entries[args.backend] = Entry(name=args.backend, summary="", load=lambda: manager)
    ranks = RankContext(rank=rank, world_size=args.world, group=dist.group.WORLD)
    try:
        for name in args.cases:
            for known in (True, False):
                sums = torch.tensor(run_case(ranks, args.backend, experts, name, known), dtype=torch.float64)
                dist.all_reduce(sums)
                error, norm = sums.tolist()
                limit = TOLERANCE[CASES[name].dtype]
                assert error <= limit**2 * norm, (
                    f"{name}, sizes {'' if known else 'un'}known: {(error / norm) ** 0.5:.1e}"
                )
            if rank == 0:
                print(f"{name}: right", flush=True)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks must not be waited for


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="nvlink")
    parser.add_argument("--meet", required=True, help="a path that does not exist, where the ranks find each other")
    parser.add_argument("cases", nargs="+", choices=tuple(CASES))
    arguments = parser.parse_args()
    mp.spawn(main, (arguments,), arguments.world)
