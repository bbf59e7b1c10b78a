"""The Open Inference Protocol: NVIDIA's own client, and what that client would never send."""

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epserve.config import ServerConfig
from epserve.errors import CallerError, InvalidRequest
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import inference_pb2_grpc as kserve_grpc
from epserve.server.codec import Door
from epserve.server.kserve.messages import to_forward_request
from tests.support.fake_engine import FakeEngine, LocalExperts, hang, serving, tiny_info
from tests.support.grpc_calls import connect, status_of, until

Input = kserve.ModelInferRequest.InferInputTensor
Contents = kserve.InferTensorContents


async def double(batch):
    return 2 * batch.hidden


def infer(*inputs: Input, raw=(), outputs=(), model: str = "layer-1", **more) -> kserve.ModelInferRequest:
    return kserve.ModelInferRequest(model_name=model, inputs=inputs, raw_input_contents=raw, outputs=outputs, **more)


def hidden_input(x: torch.Tensor, **more) -> Input:
    return Input(name="hidden_states", datatype="FP32", shape=x.shape, **more)


def raw_bytes(x: torch.Tensor) -> bytes:
    return x.numpy().tobytes()


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """One session of the real client, in a process of its own; its parts are judged one by one."""

    async def run() -> dict:
        socket = tmp_path_factory.mktemp("kserve") / "socket"
        async with serving(FakeEngine(double), unix_socket=socket) as server:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.server.kserve.triton_client_session", server.address, str(socket),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, err = await asyncio.wait_for(process.communicate(), 240)
            assert process.returncode == 0, err.decode()
            assert not len(server._calls.regions)
            return json.loads(out)

    return asyncio.run(run())


class TestTritonClient:
    def test_layers_are_models(self, session):
        found = session["metadata"]
        assert found["live"]
        assert found["ready"]
        assert found["model_ready"] == [True, False, False]
        assert found["server"]["name"] == "epserve"
        assert found["server"]["extensions"] == ["system_shared_memory"]
        assert [model["name"] for model in found["index"]["models"]] == ["layer-1", "layer-2", "layer-3", "layer-7"]
        hidden, ids, weights = found["layer"]["inputs"]
        assert hidden == {"name": "hidden_states", "datatype": "FP32", "shape": ["-1", "32"]}
        assert (ids["datatype"], weights["datatype"], weights["shape"]) == ("INT32", "FP32", ["-1", "3"])
        assert found["layer"]["outputs"] == [hidden]

    def test_the_configuration_of_a_layer_takes_tokens_as_its_batch(self, session):
        config = session["metadata"]["config"]
        assert (config["name"], config["platform"], config["max_batch_size"]) == ("layer-3", "epserve", 16384)
        hidden, ids, weights = config["input"]
        assert hidden == {"name": "hidden_states", "data_type": "TYPE_FP32", "dims": ["32"]}
        assert (ids["data_type"], ids["dims"], ids["optional"]) == ("TYPE_INT32", ["3"], True)
        assert weights["data_type"] == "TYPE_FP32"
        assert config["output"] == [hidden]
        assert session["metadata"]["unknown_config"][0] == "StatusCode.NOT_FOUND"

    def test_statistics_count_requests_and_tokens_of_each_layer(self, session):
        (before,), (after,) = session["statistics"]["before"], session["statistics"]["after"]
        assert before == {"name": "layer-7", "version": "1", "inference_stats": before["inference_stats"]}
        times = after["inference_stats"]
        assert int(after["inference_count"]) == 15
        assert int(after["last_inference"]) / 1e3 == pytest.approx(time.time(), abs=600)
        for part in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            assert int(times[part]["count"]) == 3
        assert int(times["success"]["ns"]) >= int(times["compute_input"]["ns"]) > 0
        assert session["statistics"]["all"] == ["layer-1", "layer-2", "layer-3", "layer-7"]

    @pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16"])
    def test_hidden_states_of_every_float(self, session, datatype):
        assert session["inference"][datatype] == [True, "mine"]

    @pytest.mark.parametrize("datatype", ["INT64", "INT32", "INT8", "large"])
    def test_routed_calls_and_large_ones(self, session, datatype):
        assert session["inference"][datatype]

    @pytest.mark.parametrize(
        ("case", "status", "text"),
        [
            ("too_many", "OUT_OF_RANGE", "server.max_tokens_per_request"),
            ("unknown", "NOT_FOUND", "layer-9"),
            ("bad_width", "INVALID_ARGUMENT", "hidden size 31"),
            ("bad_ids", "INVALID_ARGUMENT", "id 8 is outside 0..7"),
            ("late", "none", ""),  # 0 is no limit
            ("compressed", "UNIMPLEMENTED", "gzip"),
        ],
    )
    def test_refusals_have_their_status(self, session, case, status, text):
        got, message = session["inference"][case]
        assert got.removeprefix("StatusCode.") == status
        assert text in message

    def test_a_stream_answers_in_order_and_goes_on_after_an_error(self, session):
        assert session["stream"] == [0.0, 2.0, 4.0, 6.0, "error", 10.0, 12.0, 14.0, 16.0, 18.0]

    @pytest.mark.parametrize("case", ["status", "result", "no_bytes", "mixed"])
    def test_shared_memory(self, session, case):
        assert session["memory"][case] is True

    @pytest.mark.parametrize(
        ("case", "text"),
        [
            ("twice", "registered already"),
            ("too_large", "40960 bytes"),
            ("traversal", "key: must name"),
            ("out_of_bounds", "it has 4096"),
            ("unregistered", "no region"),
            ("unregister_twice", "no region"),
        ],
    )
    def test_shared_memory_is_checked(self, session, case, text):
        status, message = session["memory"][case]
        assert status == "StatusCode.INVALID_ARGUMENT"
        assert text in message

    def test_everything_is_unregistered_and_the_socket_served(self, session):
        assert session["memory"]["empty"] == {}
        assert session["socket"]


class TestModelInfer:
    async def test_typed_contents_and_answers_of_the_experts(self):
        experts, x = LocalExperts(), torch.randn(2, 32)
        ids, weights = torch.tensor([[0, 7], [3, -1]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
        inputs = (
            hidden_input(x, contents=Contents(fp32_contents=x.flatten().tolist())),
            Input(name="topk_ids", datatype="INT16", shape=(2, 2), contents=Contents(int_contents=ids.flatten().tolist())),
            Input(
                name="topk_weights", datatype="FP32", shape=(2, 2),
                contents=Contents(fp32_contents=weights.flatten().tolist()),
            ),
        )  # fmt: skip
        async with serving(FakeEngine(experts)) as server, connect(server) as channel:
            reply = await kserve_grpc.GRPCInferenceServiceStub(channel).ModelInfer(infer(*inputs))
        got = torch.frombuffer(bytearray(reply.raw_output_contents[0]), dtype=torch.float32).view(2, 32)
        assert torch.equal(got, experts.forward(x, ids, weights))
        assert (reply.model_name, reply.model_version) == ("layer-1", "1")

    X = torch.zeros(2, 32)
    RAW = raw_bytes(X)

    @pytest.mark.parametrize(
        ("request_", "text"),
        [
            (infer(), "hidden_states: missing"),
            (infer(hidden_input(X)), "hidden_states: 0 bytes came"),
            (infer(hidden_input(X), raw=[RAW, RAW]), "1 more than inputs"),
            (infer(hidden_input(X), hidden_input(X), raw=[RAW, RAW]), "there twice"),
            (infer(Input(name="logits", datatype="FP32", shape=(1, 1)), raw=[b"1234"]), "'logits' is unknown"),
            (infer(Input(name="hidden_states", datatype="BYTES", shape=(2, 32)), raw=[RAW]), "datatype 'BYTES'"),
            (infer(Input(name="hidden_states", datatype="FP64", shape=(2, 32)), raw=[RAW * 2]), "float64 is not allowed"),
            (infer(Input(name="hidden_states", datatype="BF16", shape=(2, 32), contents=Contents())), "needs raw"),
            (infer(hidden_input(X, contents=Contents(fp32_contents=[1.0])), raw=[RAW]), "raw_input_contents came too"),
            (infer(hidden_input(X, contents=Contents(fp64_contents=[1.0]))), "but fp64_contents came"),
            (infer(hidden_input(X, contents=Contents(fp32_contents=[1.0]))), "4 bytes came"),
            (infer(hidden_input(X), raw=[RAW], outputs=[{"name": "logits"}]), "one output"),
            (
                infer(hidden_input(X), raw=[RAW], outputs=[{"name": "hidden_states"}, {"name": "hidden_states"}]),
                "one output",
            ),
            (
                infer(hidden_input(X), raw=[RAW], outputs=[
                    {"name": "hidden_states", "parameters": {"classification": {"int64_param": 3}}}]),
                "classification is not supported",
            ),
            (infer(hidden_input(X, parameters={"shared_memory_region": {"string_param": "r"}})), "shared_memory_byte_size"),
            (infer(hidden_input(X, parameters={"shared_memory_offset": {"int64_param": 3}})), "without shared_memory_region"),
            (
                infer(hidden_input(X, parameters={
                    "shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {"int64_param": -1}})),
                "shared_memory_byte_size is -1",
            ),
            (
                infer(hidden_input(X, parameters={
                    "shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {"int64_param": 256}})),
                "no region 'r'",
            ),
            (infer(hidden_input(X), raw=[RAW], parameters={"timeout": {"string_param": "1"}}), "timeout must be there"),
            (infer(hidden_input(X), raw=[RAW], parameters={"sequence_id": {"int64_param": 1}}), "sequence_id is not"),
            (infer(hidden_input(X), raw=[RAW], id="a b"), "request_id"),
        ],
    )  # fmt: skip
    async def test_malformed_requests_are_invalid_arguments_that_say_why(self, request_, text):
        async with serving(FakeEngine()) as server, connect(server) as channel:
            error = await status_of(kserve_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request_))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
        assert text in error.details()

    @pytest.mark.parametrize("model", ["layer-4", "layer-", "layer--1", "layer-01", "layer-1\n", "Layer-1", "1", ""])
    async def test_unknown_models_are_not_found_and_the_served_ones_named(self, model):
        async with serving(FakeEngine()) as server, connect(server) as channel:
            stub = kserve_grpc.GRPCInferenceServiceStub(channel)
            request = infer(hidden_input(self.X), raw=[self.RAW], model=model)
            errors = [await status_of(stub.ModelInfer(request))]
            errors.append(await status_of(stub.ModelMetadata(kserve.ModelMetadataRequest(name=model))))
        for error in errors:
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert "layer-1, layer-2, layer-3, layer-7" in error.details()
            assert dict(error.trailing_metadata())["epserve-field"] == "model_name"

    async def test_small_integers_are_checked_against_their_type(self):
        ids = Input(name="topk_ids", datatype="INT8", shape=(2, 1), contents=Contents(int_contents=[300, 0]))
        with pytest.raises(InvalidRequest, match="holds 0 to 300, outside of INT8"):
            to_forward_request(infer(hidden_input(self.X), ids), 1)

    @pytest.mark.parametrize(("level", "priority"), [(0, 8), (1, 64), (2, 8), (3, 1), (4, None)])
    async def test_its_own_priority_counts(self, level, priority):
        request = infer(hidden_input(self.X), raw=[self.RAW])
        request.parameters["priority"].uint64_param = level
        engine = FakeEngine()
        async with serving(engine, max_priority="high") as server, connect(server) as channel:
            call = kserve_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
            if priority is None:
                assert "priority 4, must be 1 (high)" in (await status_of(call)).details()
            else:
                await call
                assert engine.seen[0].priority == priority

    async def test_its_own_timeout_counts(self):
        async with serving(FakeEngine(hang)) as server, connect(server) as channel:
            request = infer(hidden_input(self.X), raw=[self.RAW], parameters={"timeout": {"int64_param": 50_000}})
            error = await status_of(kserve_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    @pytest.mark.parametrize("requests", [3, 20], ids=["all read", "more than are read"])
    async def test_a_stream_that_is_cancelled_leaves_nothing(self, requests):
        engine = FakeEngine(hang)
        async with serving(engine, max_in_flight_per_stream=4) as server, connect(server) as channel:
            call = kserve_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            for _ in range(requests):
                await call.write(infer(hidden_input(self.X), raw=[self.RAW]))
            await until(lambda: engine.running >= min(requests, 4))
            call.cancel()
            await until(lambda: not any("ModelStreamInfer" in repr(task) for task in asyncio.all_tasks()))
            await until(lambda: engine.running == 0 and server._calls.in_flight == 0)
            assert server._calls.buffered_bytes == 0

    async def test_leases_end(self, monkeypatch):
        later, real = [0.0], time.monotonic
        monkeypatch.setattr("epserve.server.regions.time", SimpleNamespace(monotonic=lambda: real() + later[0]))
        async with serving(FakeEngine(), region_lease_s=300) as server, connect(server) as channel:
            path = Path(f"/dev/shm/test-kserve-lease-{os.getpid()}")
            path.write_bytes(bytes(100))
            try:
                stub = kserve_grpc.GRPCInferenceServiceStub(channel)
                await stub.SystemSharedMemoryRegister(
                    kserve.SystemSharedMemoryRegisterRequest(name="r", key=path.name, byte_size=100)
                )
                assert len(server._calls.regions) == 1
                later[0] = 301
                await until(lambda: not len(server._calls.regions))
            finally:
                path.unlink()

    async def test_it_can_be_switched_off(self):
        async with serving(FakeEngine(), inference_protocol=False) as server, connect(server) as channel:
            error = await status_of(
                kserve_grpc.GRPCInferenceServiceStub(channel).ServerLive(kserve.ServerLiveRequest())
            )
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


parameter = st.builds(
    kserve.InferParameter,
    int64_param=st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 200),
) | st.builds(kserve.InferParameter, string_param=st.sampled_from(["", "r", "x"])) | st.just(kserve.InferParameter())  # fmt: skip
parameters = st.dictionaries(
    st.sampled_from(
        ["shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "timeout", "classification", "x"]
    ),
    parameter,
    max_size=4,
)
inputs = st.builds(
    Input,
    name=st.sampled_from(["hidden_states", "topk_ids", "topk_weights", "", "other"]),
    datatype=st.sampled_from(["FP32", "BF16", "FP16", "INT32", "INT8", "UINT32", "INT64", "BOOL", ""]),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 40), max_size=3)
    | st.tuples(st.integers(0, 3), st.sampled_from([1, 3, 32])),
    parameters=parameters,
    contents=st.none()
    | st.builds(
        Contents,
        fp32_contents=st.lists(st.floats(width=32), max_size=8),
        int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8),
    ),
)
requests = st.builds(
    kserve.ModelInferRequest,
    inputs=st.lists(inputs, max_size=4),
    raw_input_contents=st.lists(st.binary(max_size=400) | st.integers(0, 3).map(lambda n: bytes(128 * n)), max_size=4),
    outputs=st.lists(
        st.builds(
            kserve.ModelInferRequest.InferRequestedOutputTensor,
            name=st.sampled_from(["hidden_states", ""]),
            parameters=parameters,
        ),
        max_size=2,
    ),
)


@given(request=requests)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_message_is_translated_and_checked_or_refused_with_a_typed_error(request):
    door = Door(tiny_info(), (1, 2), ServerConfig())
    try:
        translated, contents = to_forward_request(request, 1)
        checked = door.check(translated, "id")
    except CallerError:  # any other error is a defect
        return
    assert set(checked.sizes) >= set(contents) - set(checked.slices)
    assert pb.HIDDEN_STATES in checked.headers


class TestBytesThatAreNoMessage:
    @pytest.mark.parametrize(
        ("kind", "method"),
        [
            ("unary_unary", "/epserve.v1.Experts/Forward"),
            ("unary_stream", "/epserve.v1.Experts/HoldRegion"),
            ("stream_stream", "/epserve.v1.Experts/ForwardStream"),
            ("unary_unary", "/inference.GRPCInferenceService/ModelInfer"),
            ("stream_stream", "/inference.GRPCInferenceService/ModelStreamInfer"),
            ("unary_unary", "/grpc.health.v1.Health/Check"),
            ("stream_stream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
        ],
    )
    async def test_they_get_a_typed_status(self, kind, method):
        async with serving(FakeEngine()) as server, connect(server) as channel:
            make = getattr(channel, kind)(method)
            if kind == "stream_stream":
                call = make()
                await call.write(b"\xff\xff\xff")
            else:
                call = make(b"\xff\xff\xff")
            error = await status_of(call if kind == "unary_unary" else call.read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "message: 3 bytes that are not one" in error.details()
        assert dict(error.trailing_metadata())["epserve-error"] == "InvalidRequest"

    async def test_any_bytes_get_an_answer_or_a_typed_status_and_the_server_goes_on(self):
        """Mutations of a valid message, over real connections, many at once."""
        rng = random.Random(1)
        x = torch.randn(2, 32)
        forward = pb.ForwardRequest(layer=1, hidden_states=pb.Tensor(dtype=pb.FP32, shape=x.shape, data=raw_bytes(x)))
        sources = {
            "/epserve.v1.Experts/Forward": forward.SerializeToString(),
            "/inference.GRPCInferenceService/ModelInfer": infer(
                hidden_input(x), raw=[raw_bytes(x)]
            ).SerializeToString(),
        }
        allowed = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE", "DEADLINE_EXCEEDED"}
        codes = set()
        async with serving(FakeEngine()) as server, connect(server) as channel:

            async def one(method: str, payload: bytes) -> None:
                try:
                    await channel.unary_unary(method)(payload, timeout=120)
                    codes.add("OK")
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code().name)

            for _ in range(20):
                calls = []
                for method, source in sources.items():
                    for _ in range(25):
                        payload = bytearray(source)
                        for _ in range(rng.randint(1, 4)):
                            payload[rng.randrange(min(len(payload), 60))] = rng.randrange(256)
                        calls.append(
                            one(method, bytes(payload[: rng.choice([len(payload), rng.randrange(len(payload))])]))
                        )
                await asyncio.gather(*calls)
            assert codes <= allowed
            assert {"OK", "INVALID_ARGUMENT"} <= codes
            for method, source in sources.items():
                assert await channel.unary_unary(method)(source)
            await until(lambda: (server._calls.in_flight, server._calls.buffered_bytes) == (0, 0))
