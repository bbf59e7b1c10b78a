"""The Admin service and its two commands, on an engine in this process."""

import asyncio

import grpc
import pytest
from typer.testing import CliRunner

from epserve.cli.commands import app
from epserve.config import ServerConfig
from epserve.errors import ConfigError, NotReady
from epserve.pool.changes import LayerMoves, Rebalance, Resize
from epserve.protocol import admin_pb2 as pb
from epserve.protocol import admin_pb2_grpc as pb_grpc
from epserve.server.admin import AdminServicer
from epserve.server.server import Server
from tests.support.clients import serving_in_thread
from tests.support.fake_engine import FakeEngine


class Movable(FakeEngine):
    async def rebalance(self, explain=False):
        moves = (
            LayerMoves(layer=1, moved=4, nbytes=4 << 20, before=1.75, after=1.0625),
            LayerMoves(layer=2, moved=5, nbytes=5 << 20, before=1.5, after=1.0),
            LayerMoves(layer=3, moved=0, nbytes=0, before=1.01, after=1.01, reason="less than 2% is not worth a move"),
        )
        skipped = () if explain else (7,)
        return Rebalance(layers=(1, 2), skipped=skipped, moved=9, before=1.75, after=1.0625, seconds=0.5, moves=moves)

    async def scale(self, ranks):
        if ranks == 5:
            await asyncio.sleep(3)
        if ranks == 3:
            raise NotReady("another change of ranks or experts is under way; ask again when it is done")
        if ranks > 8:
            raise ConfigError(f"the Ray cluster is too small: {ranks} ranks need {ranks} GPU, the cluster has 8")
        return Resize(before=4, after=ranks, seconds=2.0, paused_s=0.25)


class Even(FakeEngine):
    async def rebalance(self, explain=False):
        return Rebalance(layers=(), skipped=(), moved=0, before=1.43, after=1.43, seconds=0.1)


async def serving(config, test, engine=Movable):
    server = Server(engine(), config)
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
    text = "9 slots moved in 2 layers in 0.5 s; the busiest rank of these layers had 1.75 of the mean and has 1.06"
    assert text in done.output
    assert "no memory for layers 7" in done.output
    done = await serving(config, command("scale", "6"))
    assert done.output == "4 -> 6 ranks in 2.0 s; requests waited 0.25 s\n"


async def test_rebalance_explains_what_would_move_and_says_when_nothing_does():
    done = await serving(ServerConfig(port=0), command("rebalance", "--explain"))
    assert done.exit_code == 0, done.output
    assert "layer 1: 4 slots, 4.0 MiB: 1.75 -> 1.06\n" in done.output
    assert "layer 3: nothing moves: less than 2% is not worth a move\n" in done.output
    assert "9 slots would move in 2 layers, 9.0 MiB; the busiest rank of these layers has 1.75" in done.output
    even = await serving(ServerConfig(port=0), command("rebalance"), Even)
    assert even.output == "no expert moved: the busiest rank has 1.43 of the mean\n"


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
