"""What readies rows and ids for DeepEP, against torch, in Triton's interpreter. Run by test_deepep.py in its own process."""

import pytest
import torch

from tests.experts.triton_interpreter import exact_casts  # noqa: F401  first: it patches the interpreter

from epserve.all2all.transport.deepep_library import Sender  # isort: skip
from epserve.modular_kernel import ExpertLayout, ExpertShape, LayerSpec, QuantConfig, Routing  # isort: skip

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("counts", "top_k", "hidden", "scheme", "sizes"),
    [
        ((3, 5), 3, 256, "fp8_block", (0, 1, 40, 700)),  # uneven ranks; no token; several tiles; two rounds of sums
        ((2,) * 8, 2, 1152, "fp8_block", (5,)),  # eight ranks; a hidden size that no chunk divides
        ((8, 8), 8, 512, "none", (0, 70)),  # nothing to quantise
    ],
)
def test_one_launch_equals_torch(counts, top_k, hidden, scheme, sizes):
    """With ids of -1, experts named twice, weights of NaN where there is no expert; twice, since counters must be 0 again."""
    shape = ExpertShape(hidden=hidden, intermediate=128, num_experts=sum(counts), top_k=top_k)
    spec = LayerSpec(shape=shape, layout=ExpertLayout(counts=counts), quant=QuantConfig(scheme=scheme))
    sender = Sender(spec, torch.device("cpu"), quantised=scheme != "none", layout=True)
    for num_tokens in sizes:
        g = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(-1, sum(counts), (num_tokens, top_k), generator=g, dtype=torch.int64)
        weights = torch.rand((num_tokens, top_k), generator=g)
        weights[ids < 0] = float("nan")
        x = torch.randn((num_tokens, hidden), generator=g).bfloat16()
        routing = Routing(ids_Mt=ids, weights_Mt=weights)
        sender.by_kernel = False
        want, _ = sender.ready(x, routing)
        sender.by_kernel = True
        for _ in range(2):
            got, buffers = sender.ready(x, routing)
            for name in ("ids_Mt", "in_rank", "per_rank", "per_expert"):
                assert torch.equal(getattr(got, name), getattr(want, name)), (name, num_tokens)
            torch.testing.assert_close(got.weights_Mt, want.weights_Mt)
            if scheme == "none":
                assert got.x is x
            else:
                assert torch.equal(got.x[0].float(), want.x[0].float()) and torch.equal(got.x[1], want.x[1])
            sender.give_back(buffers)
