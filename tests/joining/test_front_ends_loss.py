"""Strangers at the port where front ends join, and what the loss of a front end, or of the orderer, does."""

import asyncio
import json
import logging
import os
import socket
import time

import pytest
import torch

from epserve.client import AsyncClient
from epserve.errors import ConfigError, NotReady
from epserve.joining import frames as join_frames
from epserve.joining import link as join_link
from epserve.joining.port import JoinPort
from epserve.joining.remote import RemoteEngine
from epserve.link import wire
from epserve.link.greeting import MOST_GREETED
from tests.support.fake_engine import FakeEngine, serving
from tests.support.front_ends import ONCE, SECRET, batch, joining, ordering
from tests.support.grpc_calls import until


class TestStrangers:
    async def test_who_does_not_know_the_secret_cannot_join(self, caplog):
        caplog.set_level(logging.WARNING)
        async with ordering(FakeEngine()) as port:
            with pytest.raises(ConfigError, match=r"cannot be joined within 0\.5 s"):
                await RemoteEngine.join(port.address, b"another sixteen!", timeout_s=0.5)
            assert port.front_ends == 0
            async with joining(port) as engine:  # and who does, still can
                await engine.forward(batch(torch.ones(1, 32)))
        assert "does not know the secret" in caplog.text
        assert SECRET.decode() not in caplog.text

    @pytest.mark.parametrize(
        "said",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            wire.PREFIX.pack(wire.MAGIC, 1 << 30, 0),
            wire.PREFIX.pack(wire.MAGIC, 2, 0) + b"[]",
            wire.PREFIX.pack(wire.MAGIC, 9, 0) + b"\xff" * 9,
            wire.PREFIX.pack(wire.MAGIC, 44, 0) + b'{"kind":"hello","version":0,"tensors":[]}   ',
            b"",
        ],
    )
    async def test_who_speaks_something_else_is_turned_away(self, said):
        async with ordering(FakeEngine()) as port:
            host, number = join_link.parse_address(port.address)
            reader, writer = await asyncio.open_connection(host, number)
            writer.write(said)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 5)  # its hello, then the end
            writer.close()
            async with joining(port) as engine:
                await engine.forward(batch(torch.ones(1, 32)))

    @pytest.mark.parametrize(
        "header",
        [
            {"kind": "what"},
            {"kind": "forward", "call": 1},
            {"kind": "forward", "call": 1, "layer": 1, "timeout_s": 1, "request_id": "", "client": "", "priority": 5},
            {"kind": "forward", "call": 1, "tensors": [["float32", [-1, 2]]]},
            {"kind": "forward", "call": 1, "tensors": [["complex64", [1]]]},
            {"kind": "cancel"},
        ],
        ids=str,
    )
    async def test_a_guest_whose_frames_make_no_sense_loses_its_connection_only(self, header):
        async with ordering(FakeEngine()) as port, joining(port) as good:
            link = join_link.Link(await asyncio.to_thread(join_link.connect, port.address))
            await link.greet(SECRET, joining=True)
            text = json.dumps({"tensors": [["float32", [1, 32]]], **header}).encode()
            await asyncio.get_running_loop().sock_sendall(
                link._sock, wire.PREFIX.pack(wire.MAGIC, len(text), 0) + text + bytes(128)
            )
            with pytest.raises((join_frames.JoinError, OSError)):
                await asyncio.wait_for(self.listen(link), 5)
            link.close()
            await until(lambda: port.front_ends == 1)
            assert port._held == 0
            await good.forward(batch(torch.ones(1, 32)))

    async def test_a_flood_of_silent_strangers_keeps_no_front_end_out(self):
        async with ordering(FakeEngine()) as port:
            strangers = [await asyncio.to_thread(join_link.connect, port.address) for _ in range(MOST_GREETED + 5)]
            await until(lambda: len(port._greeted) == MOST_GREETED)
            async with joining(port) as good:
                await good.forward(batch(torch.ones(1, 32)))
            for each in strangers:
                each.close()

    async def listen(self, link):
        while True:
            await link.header()

    @pytest.mark.parametrize("address", ["nowhere", ":5", "h:", "h:port", "h:70000"])
    async def test_what_is_no_address_is_refused_at_once(self, address):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            await RemoteEngine.join(address, SECRET, timeout_s=30)


class TestLoss:
    async def test_a_front_end_that_vanishes_takes_its_own_calls_along_and_no_others(self):
        engine = FakeEngine(lambda batch: asyncio.sleep(0.3, batch.hidden))
        async with ordering(engine) as port, joining(port) as good:
            bad = await RemoteEngine.join(port.address, SECRET, timeout_s=5)
            kept = asyncio.ensure_future(good.forward(batch(torch.ones(1, 32))))
            lost = asyncio.ensure_future(bad.forward(batch(torch.ones(2, 32))))
            await until(lambda: engine.running == 2)
            bad._link._sock.shutdown(socket.SHUT_RDWR)
            with pytest.raises(NotReady, match="which orders the steps, cannot be reached"):
                await lost
            await until(lambda: engine.cancelled == 1)
            assert torch.equal(await kept, torch.ones(1, 32))
            await until(lambda: bad.state() == "serving")  # it joins again
            assert torch.equal(await bad.forward(batch(torch.ones(3, 32))), torch.ones(3, 32))
            await bad.close()
            await until(lambda: port.front_ends == 1)

    async def test_the_orderers_loss_is_unavailable_until_it_is_back(self):
        engine = FakeEngine(lambda batch: asyncio.sleep(0.2, batch.hidden))
        port = JoinPort(engine, "127.0.0.1:0", SECRET, max_bytes=1 << 30)
        port.start()
        address = port.address
        remote = await RemoteEngine.join(address, SECRET, timeout_s=5)
        async with serving(remote) as server, AsyncClient(server.address, ONCE) as client:
            assert torch.equal(await client.forward(1, torch.ones(1, 32)), torch.ones(1, 32))
            await port.close()
            await until(lambda: remote.state() == "disconnected")
            started = time.monotonic()
            with pytest.raises(NotReady, match=rf"{address}, which orders the steps, cannot be reached"):
                await client.forward(1, torch.ones(1, 32))
            assert time.monotonic() - started < 20, "it waits for no deadline"
            assert (await client.status()).state == "disconnected"
            async with ordering(engine, address), AsyncClient(server.address) as patient:
                assert torch.equal(await patient.forward(1, torch.ones(1, 32)), torch.ones(1, 32))
        await remote.close()

    async def test_an_orderer_with_another_model_ends_the_front_end(self):
        port = JoinPort(FakeEngine(), "127.0.0.1:0", SECRET, max_bytes=1 << 30)
        port.start()
        remote = await RemoteEngine.join(port.address, SECRET, timeout_s=5)
        await port.close()
        async with ordering(FakeEngine(fingerprint="another"), port.address):
            with pytest.raises(ConfigError, match="serves something else now"):
                await asyncio.wait_for(remote.ended, 10)
        await remote.close()

    async def test_silence_is_noticed(self, monkeypatch):
        """A host that vanished closes nothing: as after `join`, when nobody on the other side reads or writes any more."""
        monkeypatch.setattr(join_link, "SILENCE_S", 0.3)
        monkeypatch.setattr(join_link, "BEAT_S", 0.1)
        async with ordering(FakeEngine(), f"unix:@epserve-silent-{os.getpid()}") as port:
            remote = await RemoteEngine.join(port.address, SECRET, timeout_s=5)
            await asyncio.sleep(0.6)
            assert remote.state() == "serving", "beats keep an idle connection"
            (guest,) = port._guests
            monkeypatch.setattr(guest.link, "send", lambda *_, **__: None)
            states = []
            remote.on_state_change(states.append)
            await until(lambda: states[:1] == ["disconnected"])
            assert "nothing was heard" in remote._lost
            await until(lambda: remote.state() == "serving")
            await remote.close()

    async def test_accepted_calls_are_answered_before_the_port_closes(self):
        engine = FakeEngine(lambda batch: asyncio.sleep(0.3, batch.hidden))
        port = JoinPort(engine, "127.0.0.1:0", SECRET, max_bytes=1 << 30)
        port.start()
        remote = await RemoteEngine.join(port.address, SECRET, timeout_s=5)
        call = asyncio.ensure_future(remote.forward(batch(torch.ones(1, 32))))
        await until(lambda: engine.running == 1)
        await port.close()
        assert torch.equal(await call, torch.ones(1, 32))
        await remote.close()
