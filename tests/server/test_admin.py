"""The Admin service and its two commands, on an engine in this process."""

import asyncio

import grpc
import pytest
from typer.testing import CliRunner

from epserve.cli.commands import app
from epserve.config import ServerConfig
from epserve.errors import ConfigError, NotReady
from epserve.pool.changes import Rebalance, Resize
from epserve.protocol import admin_pb2 as pb
from epserve.protocol import admin_pb2_grpc as pb_grpc
from epserve.server.admin import AdminServicer
from epserve.server.server import Server
from tests.support.clients import serving_in_thread
from tests.support.fake_engine import FakeEngine


class Movable(FakeEngine):
    async def rebalance(self):
        return Rebalance(layers=(1, 2), skipped=(7,), moved=9, before=1.75, after=1.0625, seconds=0.5)

    async def scale(self, ranks):
        if ranks == 5:
            await asyncio.sleep(3)
        if ranks == 3:
            raise NotReady("another change of ranks or experts is under way; ask again when it is done")
        if ranks > 8:
            raise ConfigError(f"the Ray cluster is too small: {ranks} ranks need {ranks} GPU, the cluster has 8")
        return Resize(before=4, after=ranks, seconds=2.0, paused_s=0.25)


async def serving(config, test):
    server = Server(Movable(), config)
    await server.start()
    try:
        return await test(f"127.0.0.1:{server.port}")
    finally:
        await server.stop()


def command(*args):
    async def run(address):
        return await asyncio.to_thread(CliRunner().invoke, app, [args[0], address, *args[1:]])

    return run


async def test_rebalance_and_scale_say_what_they_did():
    config = ServerConfig(port=0)
    done = await serving(config, command("rebalance"))
    assert done.exit_code == 0
    assert "9 slots moved in 2 layers in 0.5 s; the busiest rank had 1.75 of the mean, now 1.06" in done.output
    assert "no memory for layers 7" in done.output
    done = await serving(config, command("scale", "6"))
    assert done.output == "4 -> 6 ranks in 2.0 s; requests waited 0.25 s\n"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [("3", "UNAVAILABLE: another change"), ("9", "FAILED_PRECONDITION: the Ray cluster is too small")],
)
async def test_what_cannot_be_is_said_plainly(ranks, message):
    done = await serving(ServerConfig(port=0), command("scale", ranks))
    assert done.exit_code != 0
    assert message in str(done.exception)


async def test_a_change_that_takes_longer_than_the_command_waits():
    done = await serving(ServerConfig(port=0), command("scale", "5", "--timeout", "0.5"))
    assert done.exit_code != 0
    for said in ("DEADLINE_EXCEEDED", "no answer within 0.5 s", "the change may go on", "epserve top 127.0.0.1:"):
        assert said in str(done.exception)


async def test_with_tokens_only_admins_may(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("plain-0123456789abcdef name=app\nroot-0123456789abcdef name=operator admin\n")
    config = ServerConfig(port=0, tokens_file=tokens)

    async def call(address, token):
        async with grpc.aio.insecure_channel(address) as channel:
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            return await pb_grpc.AdminStub(channel).Scale(pb.ScaleRequest(ranks=2), metadata=metadata, timeout=20)

    for token, code in (("", "UNAUTHENTICATED"), ("plain-0123456789abcdef", "PERMISSION_DENIED")):
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await serving(config, lambda address, token=token: call(address, token))
        assert info.value.code().name == code
    assert (await serving(config, lambda address: call(address, "root-0123456789abcdef"))).after == 2


class From:
    def __init__(self, peer):
        self._peer = peer

    def peer(self):
        return self._peer


def test_without_tokens_only_this_machine_may():
    open_one = AdminServicer(Movable(), guarded=False)
    for peer in ("ipv4:127.0.0.1:5", "ipv6:[::1]:5", "ipv6:%5B::1%5D:5", "unix:/run/s"):
        open_one._check(From(peer))
    with pytest.raises(Exception, match=r"ipv4:10\.0\.0\.9:5 is on another machine"):
        open_one._check(From("ipv4:10.0.0.9:5"))
    AdminServicer(Movable(), guarded=True)._check(From("ipv4:10.0.0.9:5"))


def test_commands_show_a_certificate_too(certificates):
    names = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
    files = {"--tls-ca": "ca.pem", "--tls-cert": "client.pem", "--tls-key": "client.key"}
    ours = [word for option, name in files.items() for word in (option, str(certificates / name))]
    with serving_in_thread(Movable(), **{key: certificates / name for key, name in names.items()}) as server:
        address = f"localhost:{server.port}"
        for words in (["call", address], ["top", address, "--once"], ["rebalance", address], ["scale", address, "2"]):
            done = CliRunner().invoke(app, [*words, *ours])
            assert done.exit_code == 0, (words, done.output, done.exception)
            other = CliRunner().invoke(app, [*words, *ours, "--tls-name", "elsewhere"])
            assert other.exit_code and "--tls-name" in str(other.exception), (words, other.output)
