"""Models with remote experts under torch.compile, torch.export and transformers' compiled generation: as without, bit for bit."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig

import epserve.transformers
from epserve.client.engines.transformers import operators
from epserve.errors import ConfigError
from tests.models.coverage_table import InProcess, write_checkpoint

IDS = torch.tensor([[3, 8, 1, 77, 20, 9], [5, 4, 30, 31, 32, 33]])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module", params=["local", "remote"])
def service(path, request):
    with epserve.transformers.connect(InProcess(path, max_tokens=32), gate=request.param) as service:
        yield service


@pytest.fixture
def remote(path, service):
    torch._dynamo.reset()
    return epserve.transformers.from_pretrained(path, service).eval()


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids).logits


inductor = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=inductor)])
def test_compiled_without_a_break_and_equal_to_eager(remote, service, backend):
    wanted = logits(remote)
    called = service.session.transport.calls
    got = logits(torch.compile(remote, backend=backend, fullgraph=True))
    assert service.session.transport.calls == called + 2, "one call for each MoE layer, none of them traced"
    if backend == "inductor":  # it fuses what is around the calls and rounds that differently
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(got, wanted)


def test_other_numbers_of_tokens_do_not_compile_again_and_again(remote):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(remote, backend=backend, fullgraph=True, dynamic=True)
    for tokens in range(3, 7):  # not 2, the number of sequences: equal sizes make a graph of their own
        assert torch.equal(logits(compiled, IDS[:, :tokens]), logits(remote, IDS[:, :tokens]))
    assert len(graphs) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_a_call_the_same_bits_and_takes_them(service, remote):
    """Around a call alone, with inputs in other strides, nothing is rounded differently."""
    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(1)).t()
    if service.gate == "remote":
        call = lambda x: operators.block(service.name, 0, x)  # noqa: E731
    else:
        ids, weights = torch.tensor([[0, 1]] * 5), torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
        call = lambda x: operators.experts(service.name, 0, 8, x, ids, weights)  # noqa: E731
    with torch.no_grad():
        assert torch.equal(torch.compile(call, fullgraph=True)(x), call(x))


def test_exported_graphs_run_in_a_later_connection(path, service, remote):
    wanted = logits(remote)
    with torch.no_grad():
        exported = torch.export.export(remote, (), {"input_ids": IDS, "use_cache": False}, strict=False)
    names = [node.target for node in exported.graph.nodes if "epserve" in str(node.target)]
    assert len(names) == 2
    assert torch.equal(exported.module()(input_ids=IDS, use_cache=False).logits, wanted)


def test_an_exported_graph_without_its_service(path):
    with epserve.transformers.connect(InProcess(path, max_tokens=32)) as service, torch.no_grad():
        model = epserve.transformers.from_pretrained(path, service).eval()
        wanted = logits(model)
        exported = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, strict=False)
        program = exported.module()
    with torch.no_grad():
        with pytest.raises(ConfigError, match=r"the connection of this model is closed .*gate local, checkpoint"):
            program(input_ids=IDS, use_cache=False)
        with epserve.transformers.connect(InProcess(path, max_tokens=32)):
            assert torch.equal(program(input_ids=IDS, use_cache=False).logits, wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_generation_with_a_static_cache_is_compiled(path, remote, backend):
    """As transformers does by itself on a GPU."""
    config = CompileConfig(backend=backend, fullgraph=True, mode=None)
    config._compile_all_devices = True
    settings = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    got = remote.generate(input_ids=IDS, cache_implementation="static", compile_config=config, **settings)
    local = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(got, local.generate(input_ids=IDS, **settings))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_pass_through_compiled_calls(service, backend):
    x, g = torch.randn(3, 32), torch.randn(3, 32)

    def gradient(call):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(call(2 * leaf), leaf, g)[0]

    if service.gate == "remote":
        call = lambda x: operators.block(service.name, 0, x)  # noqa: E731
    else:
        ids, weights = torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
        call = lambda x: operators.experts(service.name, 0, 8, x, ids, weights * x[:, :2].sigmoid())  # noqa: E731
    assert torch.equal(gradient(torch.compile(call, backend=backend, fullgraph=True)), gradient(call))


def test_operators_fulfil_their_contract(service, remote):
    x = torch.randn(3, 32, requires_grad=True)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    if service.gate == "remote":
        torch.library.opcheck(operators.block, (service.name, 0, x), test_utils=checks)
        return
    ids, weights = torch.tensor([[0, 1]] * 3), torch.rand(3, 2, requires_grad=True)
    torch.library.opcheck(operators.experts, (service.name, 0, 8, x, ids, weights), test_utils=checks)
    arguments = service.name, 0, 8, x.detach(), torch.randn(3, 32), ids, weights.detach()
    torch.library.opcheck(operators.experts_backward, arguments, test_utils=checks[:2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_generation_with_a_static_cache_on_a_gpu(path):
    """transformers compiles it there by itself, with CUDA graphs; the rank is on the CPU."""
    torch._dynamo.reset()
    settings = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    ids = IDS.cuda()
    with epserve.transformers.connect(InProcess(path, max_tokens=32)) as service:
        remote = epserve.transformers.from_pretrained(path, service, device_map="cuda").eval()
        wanted = remote.generate(input_ids=ids, **settings)
        called = service.session.transport.calls
        torch._dynamo.utils.counters.clear()
        got = remote.generate(input_ids=ids, cache_implementation="static", **settings)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
        assert service.session.transport.calls - called == called, (
            "each step called each layer, none was replayed from a graph"
        )
        graphs = torch.compile(remote, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):  # warm-up, recording, replays
            before = service.session.transport.calls
            torch.testing.assert_close(logits(graphs, ids), logits(remote, ids), rtol=1e-4, atol=1e-4)
            assert service.session.transport.calls - before == 4
    assert torch.equal(got, wanted)
