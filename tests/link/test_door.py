"""Doors of ranks: both sides prove that they know the secret, and strangers hold nothing up."""

import asyncio
import contextlib
import dataclasses
import os
import queue
import socket
import subprocess
import sys
import threading

import pytest

from epserve.link import door, wire
from epserve.link.door import Door
from epserve.link.greeting import MOST_GREETED, Greeting, Stranger
from epserve.link.step_server import StepServer
from epserve.link.transport import SocketLink
from epserve.process import unix_peers

SOON_S = 5.0  # half of the time that one greeting may take
PLACES = pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["unix", "tcp"])


def knock(address: door.LinkAddress) -> socket.socket:
    """A connection that says nothing."""
    if address.host:
        return socket.create_connection((address.host, address.port), timeout=SOON_S)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(SOON_S)
    sock.connect("\0" + address.name)
    return sock


@pytest.fixture
def entered():
    return queue.Queue()


@PLACES
async def test_silent_strangers_do_not_hold_the_engine_up(host):
    server = StepServer(lambda header, parts, out: ({"step": header["step"]}, []), host=host)
    silent = [knock(server.address) for _ in range(3)]
    link = await asyncio.wait_for(SocketLink.open(server.address, lambda: None), SOON_S)
    await asyncio.wait_for(link.beat(), SOON_S)
    link.close()
    server.close()
    for each in silent:
        each.close()


@PLACES
def test_a_flood_of_silent_strangers_ends_the_oldest_of_them(host, entered):
    there = Door(entered.put, protocol="test", host=host)
    silent = [knock(there.address) for _ in range(MOST_GREETED + 20)]
    for oldest in silent[:20]:
        while oldest.recv(4096):
            pass  # its hello, then the end
    with there.address.connect(), entered.get(timeout=SOON_S):
        pass
    there.close()
    for each in silent:
        each.close()


KNOCKER = """
import os, socket, sys
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect("\\0" + sys.argv[1])
try:
    print(sock.recv(4096))
except ConnectionError:
    print(b"")
"""


def test_another_user_is_turned_away_before_anything_is_said(entered, monkeypatch):
    there = Door(entered.put, protocol="test")
    if os.geteuid() != 0:  # this process then takes itself for another user, since the knocker cannot become one
        monkeypatch.setattr(unix_peers.os, "geteuid", lambda: os.getuid() + 1)
    command = [sys.executable, "-c", KNOCKER, there.address.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "b''\n", done.stderr
    there.close()


class Wire:
    """Between two sides: what passes is kept."""

    def __init__(self, target: door.LinkAddress):
        self._target, self.said = target, bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = dataclasses.replace(target, host="127.0.0.1", port=self._listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        here, _ = self._listener.accept()
        there = knock(self._target)
        threading.Thread(target=self._pass, args=(there, here, None), daemon=True).start()
        self._pass(here, there, self.said)

    def _pass(self, source, target, kept) -> None:
        try:
            while data := source.recv(4096):
                if kept is not None:
                    kept += data
                target.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()


@PLACES
def test_the_secret_is_not_sent_and_what_was_sent_opens_nothing_later(host, entered):
    there = Door(entered.put, protocol="test", host=host)
    between = Wire(there.address)
    between.address.connect().close()
    entered.get(timeout=SOON_S).close()
    assert between.said and there.address.token.encode() not in between.said
    with knock(there.address) as replayed:
        replayed.sendall(between.said)
        wire.receive_header(replayed)  # its hello
        with pytest.raises(ConnectionError):
            wire.receive_header(replayed)  # its proof, which does not come
    assert entered.empty()
    between.close()
    there.close()


def test_a_side_that_knows_the_secret_of_another_door_or_protocol_is_turned_away(entered):
    there = Door(entered.put, protocol="test")
    for wrong in ({"token": "0" * 64}, {"protocol": "steps"}):
        with pytest.raises(ConnectionError):
            dataclasses.replace(there.address, **wrong).connect()
    assert entered.empty()
    there.close()


def test_an_impostor_that_listens_in_a_ranks_place_is_noticed():
    """It sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = door.LinkAddress(host="127.0.0.1", port=listener.getsockname()[1], token="secret", protocol="test")

        def echo() -> None:
            sock, _ = listener.accept()
            with sock:
                while data := sock.recv(4096):
                    sock.sendall(data)

        thread = threading.Thread(target=echo, daemon=True)
        thread.start()
        with pytest.raises(Stranger, match="does not know the secret"):
            address.connect()
        thread.join(SOON_S)


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({}, "speaks version None"),
        ({"kind": "hello", "version": 2, "nonce": "00" * 32}, "speaks version 2 of this protocol, not 1"),
        ({"kind": "hello", "version": 1}, "sent 0 random bytes, not 32"),
        ({"kind": "hello", "version": 1, "nonce": "00" * 31}, "sent 31 random bytes"),
        ({"kind": "hello", "version": 1, "nonce": "zz"}, "sent 0 random bytes"),
    ],
)
def test_a_hello_that_makes_no_sense_is_told(hello, why):
    with pytest.raises(Stranger, match=why):
        Greeting(b"x", protocol="test", version=1, connecting=True).hear(hello)


@PLACES
def test_a_stranger_that_drips_has_one_deadline_for_all_of_it(host, entered, monkeypatch):
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.3)
    there = Door(entered.put, protocol="test", host=host)
    with knock(there.address) as slow:
        wire.receive_header(slow)
        dripped = 0
        with contextlib.suppress(OSError):
            while dripped < 100:
                slow.sendall(b"E")
                dripped += 1
                threading.Event().wait(0.1)
        assert dripped < 100
    there.close()
