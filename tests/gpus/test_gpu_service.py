"""The whole service on this host's GPUs: Ray, NCCL or NVLink, Triton experts, gRPC. `pytest -m gpu tests/gpus`."""

from __future__ import annotations

import asyncio

import pytest
import torch

from epserve.client import AsyncClient
from epserve.config import parse_config
from epserve.models import open_checkpoint
from epserve.models.demo import reference_block, write_demo_checkpoint
from epserve.service.run import running
from tests.support.ranks import cluster_section, num_places

CLEAR = (
    0.02  # relative gap between the last chosen expert's score and the next: below it bfloat16 rounding may pick either
)
SIZES = {"hidden": 512, "intermediate": 256, "num_experts": 16, "top_k": 4, "num_layers": 2, "seed": 3}
TOLERANCE = 1e-2  # relative L2 error in bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none here"),
]


async def answers(config, path) -> tuple[list[float], object]:
    """Relative error of batches of several sizes, sent at once by several clients, and the engine's status.

    Tokens whose choice of experts is a near tie are left out: the gate's bfloat16 products round differently on each device.
    """
    async with running(config) as (engine, server):
        address, layer = f"127.0.0.1:{server.port}", engine.info.layers[-1]
        reference, gate = (
            reference_block(path, layer),
            open_checkpoint(path).load_layer(layer, (), torch.device("cpu")).gate,
        )

        async def one(num_tokens: int) -> float:
            x = torch.randn(
                (num_tokens, engine.info.hidden), generator=torch.Generator().manual_seed(num_tokens)
            ).bfloat16()
            async with AsyncClient(address) as client:
                y = await client.forward(layer, x, timeout=120)
            clear = clear_choice(x, gate.weight_EK, engine.info)
            assert clear.double().mean() > 0.5
            want = reference(x).double()[clear]
            return float((y.double()[clear] - want).norm() / want.norm())

        errors = await asyncio.gather(*(one(num_tokens) for num_tokens in (2, 3, 17, 128, 1500)))
        return list(errors), engine.status()


def clear_choice(x, weight_EK, info) -> torch.Tensor:
    """`(M,)` bool: no score is close to another one around the last place."""
    logits = x.double() @ weight_EK.double().T
    scores = logits.sigmoid() if info.gate.scoring == "sigmoid" else logits.softmax(-1)
    ordered = scores.sort(dim=-1, descending=True).values
    last, following = ordered[:, info.top_k - 1], ordered[:, info.top_k]
    return (last - following) / last > CLEAR


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("all2all", ["auto", "all_to_all"])
def test_every_gpu_is_a_rank_and_the_numbers_are_right(tmp_path, family, all2all):
    ranks = num_places()
    if ranks == 1 and all2all != "auto":
        pytest.skip("one GPU: there is nothing to send, auto chose local")
    path = tmp_path / family
    write_demo_checkpoint(family, path, dtype=torch.bfloat16, **SIZES)
    config = parse_config(
        {
            "model": {"path": str(path)},
            "engine": {"ranks": ranks, "device": "cuda", "all2all": all2all},
            "cluster": cluster_section(),
            "server": {"port": 0},
        }
    )
    errors, status = asyncio.run(answers(config, path))
    assert max(errors) <= TOLERANCE, errors
    assert len({rank.gpu_uuid for rank in status.ranks}) == torch.cuda.device_count()
    assert "experts triton" in status.backends
