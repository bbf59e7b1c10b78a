"""Who may register shared memory by its name: the server opens it, so the caller's own right to it must be known."""

import asyncio
import contextlib
import os
import secrets
import socket
from pathlib import Path

import grpc
import pytest

from epserve.config import ServerConfig
from epserve.errors import PermissionDenied
from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import inference_pb2_grpc as kserve_grpc
from epserve.server.incoming import sockets
from epserve.server.regions import Regions
from tests.support.fake_engine import FakeEngine, serving
from tests.support.grpc_calls import connect, status_of

STRANGER = 65534


@pytest.fixture
def shm():
    path = Path(f"/dev/shm/test-rights-{secrets.token_hex(8)}")
    path.write_bytes(bytes(100))
    yield path
    path.unlink(missing_ok=True)


def request(path: Path) -> kserve.SystemSharedMemoryRegisterRequest:
    return kserve.SystemSharedMemoryRegisterRequest(name="r", key=path.name, byte_size=100)


@contextlib.asynccontextmanager
async def relay_of(user: int, port: int):
    """The address of a relay to `port`, whose side of the connection is another user's: the kernel keeps who made a socket."""
    tasks = []

    async def pump(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def join(reader, writer):
        os.seteuid(user)
        try:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        finally:
            os.seteuid(0)
        sock.connect(("127.0.0.1", port))
        far_reader, far_writer = await asyncio.open_connection(sock=sock)
        tasks.extend([asyncio.ensure_future(pump(reader, far_writer)), asyncio.ensure_future(pump(far_reader, writer))])

    relay = await asyncio.start_server(join, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
    finally:
        relay.close()
        for task in tasks:
            task.cancel()


class TestRights:
    @pytest.mark.parametrize(
        ("mode", "uid", "allowed"),
        [
            (0o600, "owner", True),
            (0o600, 0, True),  # root may open anything
            (0o600, STRANGER, False),  # the server could, the caller could not
            (0o644, STRANGER, False),  # reading is not enough: a region is written
            (0o666, STRANGER, True),
            (0o666, None, False),  # a caller who is not known
        ],
    )
    def test_the_caller_needs_them_not_only_the_server(self, shm, mode, uid, allowed):
        shm.chmod(mode)
        registry = Regions(ServerConfig())
        wanted = {"name": "r", "key": shm.name, "offset": 0, "size": 64}
        with contextlib.nullcontext() if allowed else pytest.raises(PermissionDenied, match="key") as raised:
            registry.register_leased("me", uid=shm.stat().st_uid if uid == "owner" else uid, **wanted)
        assert len(registry) == allowed
        if raised is not None and uid is not None:
            assert str(STRANGER) in str(raised.value)
            assert f"{mode:04o}" in str(raised.value)
        registry.unregister_all()

    @pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
    @pytest.mark.parametrize("dual", [False, True])
    def test_the_kernel_names_the_user_of_a_connection(self, family, dual):
        """dual: the listening socket takes both kinds, as gRPC's does."""
        listening = socket.AF_INET6 if dual else family
        with socket.create_server(("", 0), family=listening, dualstack_ipv6=dual) as server:
            port = server.getsockname()[1]
            host = "127.0.0.1" if family is socket.AF_INET else "::1"
            with socket.create_connection((host, port)) as client:
                accepted, _ = server.accept()
                kind, shown = ("ipv4", host) if family is socket.AF_INET else ("ipv6", f"%5B{host}%5D")
                peer = f"{kind}:{shown}:{client.getsockname()[1]}"
                assert sockets.uid_of_peer(peer, port) == os.geteuid()
                assert sockets.uid_of_peer(peer, port + 1) is None
                client.sendall(bytes(1000))
                accepted.recv(1000, socket.MSG_WAITALL)
                (own,) = sockets.connections(source_port=port)
                assert own.received == 1000
                accepted.close()

    @pytest.mark.parametrize("peer", ["unix:", "unix:/a", "ipv4:10.9.8.7:50000", "ipv4:127.0.0.1:1", "x", "ipv4:a:b"])
    def test_others_are_not_guessed(self, peer):
        assert sockets.uid_of_peer(peer, 50051) is None

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
    async def test_another_users_memory_cannot_be_registered_by_its_name(self, shm):
        shm.chmod(0o600)
        async with serving(FakeEngine()) as server, relay_of(STRANGER, server.port) as address:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = kserve_grpc.GRPCInferenceServiceStub(channel)
                error = await status_of(stub.SystemSharedMemoryRegister(request(shm)))
                assert error.code() is grpc.StatusCode.PERMISSION_DENIED
                assert f"user {STRANGER}" in error.details()
                assert len(server._calls.regions) == 0
                os.chown(shm, STRANGER, -1)
                await stub.SystemSharedMemoryRegister(request(shm))
            assert len(server._calls.regions) == 1

    async def test_a_caller_whom_the_kernel_does_not_know_is_refused(self, shm, monkeypatch):
        monkeypatch.setattr(sockets, "connections", lambda **_: [])
        async with serving(FakeEngine()) as server, connect(server) as channel:
            stub = kserve_grpc.GRPCInferenceServiceStub(channel)
            error = await status_of(stub.SystemSharedMemoryRegister(request(shm)))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "cannot be known" in error.details()

    async def test_the_unix_socket_is_its_users_own(self, shm, tmp_path):
        path = tmp_path / "socket"
        async with serving(FakeEngine(), unix_socket=path) as server:
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                await kserve_grpc.GRPCInferenceServiceStub(channel).SystemSharedMemoryRegister(request(shm))
            assert len(server._calls.regions) == 1
