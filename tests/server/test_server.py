"""Around the calls: health, reflection, model and status, security, start and stop, the generated stubs."""

import asyncio
import logging
import socket

import grpc
import pytest
import torch
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from epserve.config import ServerConfig
from epserve.errors import ConfigError
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import generate
from epserve.server.server import INFERENCE_SERVICE, SERVICE, Server
from tests.support.fake_engine import FakeEngine, echo_after, hang, serving
from tests.support.grpc_calls import Frames, connect, message, status_of, tensor_of, until
from tests.support.observed import WatchedEngine


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


LOOPBACKS = ["localhost", "::1"] if has_ipv6() else ["localhost"]


async def health_of(channel, name="") -> str:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


class TestHealthAndReflection:
    async def test_health_follows_the_engine(self):
        engine = FakeEngine()
        engine.set_state("starting")
        async with serving(engine) as server, connect(server) as channel:
            assert await health_of(channel) == "NOT_SERVING"
            for state in ("serving", "recovering", "serving", "draining"):
                engine.set_state(state)
                for name in ("", SERVICE):
                    async with asyncio.timeout(30):  # the state is published by the loop, a moment later
                        while await health_of(channel, name) != ("SERVING" if state == "serving" else "NOT_SERVING"):
                            await asyncio.sleep(0.005)
            error = await status_of(
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x"))
            )
            assert error.code() is grpc.StatusCode.NOT_FOUND

    async def test_watchers_see_changes(self):
        engine = FakeEngine()
        async with serving(engine) as server, connect(server) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            engine.set_state("recovering")
            assert (await asyncio.wait_for(watch.read(), 30)).status == health_pb2.HealthCheckResponse.NOT_SERVING

    @pytest.mark.parametrize("enabled", [True, False])
    async def test_reflection_lists_the_services(self, enabled):
        async with serving(FakeEngine(), reflection=enabled) as server, connect(server) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            if enabled:
                names = {service.name for service in (await call.read()).list_services_response.service}
                assert names == {
                    SERVICE,
                    INFERENCE_SERVICE,
                    "epserve.v1.Admin",
                    "grpc.health.v1.Health",
                    "grpc.reflection.v1.ServerReflection",
                    "grpc.reflection.v1alpha.ServerReflection",
                }
            else:
                assert (await status_of(call.read())).code() is grpc.StatusCode.UNIMPLEMENTED

    @pytest.mark.parametrize("version", ["v1", "v1alpha"])
    async def test_reflection_answers_under_both_of_its_names(self, version):
        """Tools ask for v1 first, and for what the service itself looks like."""
        name = f"grpc.reflection.{version}.ServerReflection"
        async with serving(FakeEngine()) as server, connect(server) as channel:
            method = channel.stream_stream(
                f"/{name}/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            asked = [SERVICE, name, f"grpc.reflection.{version}.ServerReflectionRequest"]
            call = method(iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=each) for each in asked]))
            files = [(await call.read()).file_descriptor_response.file_descriptor_proto for _ in asked]
        service, own, message = [FileDescriptorProto.FromString(found[0]) for found in files]
        assert "ForwardStream" in {method.name for method in service.service[0].method}
        assert own == message
        assert own.package == f"grpc.reflection.{version}"
        assert own.service[0].method[0].input_type == f".grpc.reflection.{version}.ServerReflectionRequest"

    async def test_model_and_status(self):
        engine = WatchedEngine(layers=(1, 2))
        async with serving(engine, max_tokens_per_request=77) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            model = await stub.GetModel(pb.GetModelRequest())
            status = await stub.GetStatus(pb.GetStatusRequest())
        assert (model.hidden, model.top_k, model.dtype, list(model.layers)) == (32, 3, pb.FP32, [1, 2])
        assert model.max_tokens_per_request == 77
        assert (status.state, status.generation, status.ranks[0].weights_bytes) == ("serving", 2, 1 << 20)
        assert (status.spares, status.rebalances, status.rebalances_skipped, status.front_ends) == (1, 4, 2, 0)
        assert [list(rank.experts) for rank in status.ranks] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        moved = [{each.layer: list(each.experts) for each in rank.layer_experts} for rank in status.ranks]
        assert moved == [{2: [7, 1, 2, 3]}, {}]


async def refusal_of(call) -> grpc.aio.AioRpcError:
    """A stream that is refused while grpc.aio still sends its first message ends, now and then, with an error of the sender."""
    for _ in range(5):
        error = await status_of(call())
        if error.details() != "Internal error from Core":
            break
    return error


class TestSecurity:
    TOKEN = "correct-horse"

    @pytest.fixture
    def tokens_file(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text(f"# who\n\nother-token\n{self.TOKEN}\n")
        return path

    @pytest.mark.parametrize(
        ("sent", "allowed"),
        [
            ("Bearer correct-horse", True),
            ("bearer correct-horse", True),
            ("Bearer other-token", True),
            ("Bearer wrong", False),
            ("Bearer ", False),
            ("Bearer # who", False),
            ("correct-horse", False),
            ("Basic correct-horse", False),
            (None, False),
        ],
    )
    async def test_every_method_but_health_needs_a_token(self, tokens_file, sent, allowed, caplog):
        caplog.set_level(logging.DEBUG)
        metadata = (("authorization", sent),) if sent is not None else None
        async with serving(FakeEngine(), tokens_file=tokens_file) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            listing = reflection_pb2.ServerReflectionRequest(list_services="")
            begin = pb.RequestFrame(call=1, begin=message(torch.ones(1, 32)))
            calls = [
                lambda: stub.Forward(message(torch.ones(1, 32)), metadata=metadata),
                lambda: stub.GetStatus(pb.GetStatusRequest(), metadata=metadata),
                lambda: stub.ForwardStream(iter([begin]), metadata=metadata).read(),
                lambda: reflection.ServerReflectionInfo(iter([listing]), metadata=metadata).read(),
            ]
            for call in calls:
                if allowed:
                    await call()
                else:
                    error = await refusal_of(call)
                    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                    assert "server.tokens_file" in error.details()
            assert await health_of(channel) == "SERVING"
        assert self.TOKEN not in caplog.text

    @pytest.mark.parametrize(("text", "message"), [("# none\n", "holds no token"), ("a b\n", "with spaces")])
    async def test_unusable_token_files_are_refused_at_start(self, tmp_path, text, message):
        path = tmp_path / "tokens"
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            await Server(FakeEngine(), ServerConfig(port=0, tokens_file=path)).start()
        with pytest.raises(ConfigError, match=r"cannot read .*missing"):
            await Server(FakeEngine(), ServerConfig(port=0, tokens_file=tmp_path / "missing")).start()

    async def test_tls(self, certificates):
        tls = {"tls_cert": certificates / "server.pem", "tls_key": certificates / "server.key"}
        ca = (certificates / "ca.pem").read_bytes()
        async with serving(FakeEngine(), **tls) as server:
            credentials = grpc.ssl_channel_credentials(ca)
            async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials) as channel:
                await pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32)), timeout=30)
            async with connect(server) as channel:
                error = await status_of(pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32)), timeout=30))
                assert error.code() is grpc.StatusCode.UNAVAILABLE

    async def test_mutual_tls(self, certificates):
        tls = {
            "tls_cert": certificates / "server.pem",
            "tls_key": certificates / "server.key",
            "tls_client_ca": certificates / "ca.pem",
        }
        ca, key, cert = ((certificates / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem"))
        async with serving(FakeEngine(), **tls) as server:
            for credentials, allowed in (
                (grpc.ssl_channel_credentials(ca, key, cert), True),
                (grpc.ssl_channel_credentials(ca), False),
            ):
                async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials) as channel:
                    call = pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32)), timeout=30)
                    if allowed:
                        await call
                    else:
                        assert (await status_of(call)).code() is grpc.StatusCode.UNAVAILABLE

    async def test_certificates_that_do_not_fit_are_refused_at_start(self, certificates):
        config = ServerConfig(port=0, tls_cert=certificates / "server.pem", tls_key=certificates / "client.key")
        with pytest.raises(ConfigError, match="not a PEM pair that fits"):
            await Server(FakeEngine(), config).start()


class TestStartAndStop:
    async def test_a_busy_port_is_one_clear_error(self, capfd):
        async with serving(FakeEngine()) as server:
            with pytest.raises(
                ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{server.port}: Address already in use"
            ):
                await Server(FakeEngine(), ServerConfig(port=server.port)).start()
        assert capfd.readouterr().err == ""

    async def test_an_address_of_another_machine_is_refused(self):
        with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
            await Server(FakeEngine(), ServerConfig(host="203.0.113.7", port=0, allow_insecure=True)).start()

    @pytest.mark.parametrize("host", LOOPBACKS)
    async def test_other_names_of_loopback(self, host):
        server = Server(FakeEngine(), ServerConfig(host=host, port=0))
        await server.start()
        async with connect(server) as channel:
            await pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32)), timeout=30)
        await server.stop()

    async def test_stopping_finishes_what_was_accepted_and_refuses_the_rest(self):
        gate = asyncio.Event()
        engine = FakeEngine(echo_after(gate))
        server = Server(engine, ServerConfig(port=0))
        await server.start()
        async with connect(server) as channel:
            stub, frames = pb_grpc.ExpertsStub(channel), Frames(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            accepted = asyncio.ensure_future(stub.Forward(message(torch.ones(1, 32))))
            await frames.send(1, torch.ones(1, 32))
            await until(lambda: engine.running == 2)
            stopping = asyncio.ensure_future(server.stop(grace=60))
            await until(server._calls.draining.is_set)
            assert await health_of(channel) == "NOT_SERVING"
            late = await status_of(stub.Forward(message(torch.ones(1, 32))))
            assert late.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(late.trailing_metadata())["epserve-retryable"] == "true"
            assert not stopping.done()
            gate.set()
            assert torch.equal(tensor_of(await accepted), torch.ones(1, 32))
            assert torch.equal((await frames.replies(1))[1], torch.ones(1, 32))
            assert await frames.call.read() is grpc.aio.EOF
            await asyncio.wait_for(stopping, 15)  # less than its grace: nothing holds it up any more
            watch.cancel()
        await server.stop()

    async def test_stopping_does_not_wait_longer_than_it_may(self):
        engine = FakeEngine(hang)
        server = Server(engine, ServerConfig(port=0))
        await server.start()
        async with connect(server) as channel:
            call = asyncio.ensure_future(status_of(pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32)))))
            await until(lambda: engine.running == 1)
            await asyncio.wait_for(server.stop(grace=0.2), 30)
            assert (await call).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert engine.cancelled == 1

    async def test_fifty_starts_and_stops(self):
        for _ in range(50):
            async with serving(FakeEngine()) as server:
                assert server.port
            assert len(asyncio.all_tasks()) < 10


class TestGenerate:
    def test_the_committed_stubs_are_fresh(self):
        assert generate.main(["--check"]) == 0

    def test_stale_stubs_fail_the_check(self, tmp_path, monkeypatch, capsys):
        for proto in generate.PROTOS:
            (tmp_path / proto).write_text((generate.HERE / proto).read_text())
        monkeypatch.setattr(generate, "HERE", tmp_path)
        assert generate.main(["--check"]) == 1
        assert "epserve_pb2.py" in capsys.readouterr().err
        assert generate.main([]) == 0
        assert generate.main(["--check"]) == 0
