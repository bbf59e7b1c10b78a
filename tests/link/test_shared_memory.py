"""The shared memory between the engine and the ranks of its host: who owns what, and what is left when somebody dies."""

import asyncio
import dataclasses
import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from epserve.errors import ConfigError
from epserve.link import door, wire
from epserve.link.failure import RankLost
from epserve.link.shm import Arena, Window
from epserve.link.step_server import StepServer
from epserve.link.transport import SocketLink
from epserve.process.blocks import ALIGNMENT

MIB = 1 << 20
LIMIT_S = 60


def num_mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("epserve-steps")


def num_open(pid: int | str = "self") -> int:
    links = Path(f"/proc/{pid}/fd").iterdir()
    return sum("epserve-steps" in os.readlink(link) for link in links if link.is_symlink())


async def until(condition) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        await asyncio.sleep(0.01)


@pytest.fixture
def arena():
    before = num_mapped()
    arena = Arena(4 * MIB)
    yield arena
    arena.close()
    del arena
    end = time.monotonic() + LIMIT_S
    while (left := (num_mapped(), num_open())) != (
        before,
        0,
    ):  # a rank's thread unmaps when it sees that its link has ended
        assert time.monotonic() < end, f"mapped, open: {left}, before {before}, 0"
        time.sleep(0.01)


def double(header, tensors, out):
    if header.get("beat"):
        return {"step": header["step"]}, []
    result = tensors[0] * 2
    if out is None:
        return {"step": header["step"]}, [result]
    out.copy_(result)
    return {"step": header["step"], "phases": {"shared": 1.0}}, []


def test_blocks_are_one_piece_again_when_the_last_tensor_has_gone(arena):
    tensors = [arena.empty((count,), torch.float32) for count in (1, 100, 1000, 16)]
    views = [tensor[:1] for tensor in tensors]
    offsets = [arena.offset_of(tensor) for tensor in tensors]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    del tensors
    assert arena.room()[0] < arena.size, "views keep the block"
    for order in (2, 0, 1, 0):
        del views[order]
    assert arena.room() == (arena.size, arena.size)
    assert arena.empty((MIB + 1,), torch.float32) is None
    assert arena.empty((0, 7), torch.float32) is None
    whole = arena.empty((MIB,), torch.float32)
    assert arena.buffer(1) is None
    assert arena.offset_of(whole.view(1024, 1024).T) is None, "not in one piece"
    assert arena.offset_of(torch.empty(4)) is None


def test_a_window_sees_the_same_bytes_and_refuses_what_lies_outside(arena):
    window = Window(os.dup(arena.fd), arena.size)
    x = arena.empty((3, 5), torch.bfloat16).fill_(2.5)
    assert torch.equal(window.tensor(torch.bfloat16, (3, 5), arena.offset_of(x)), x)
    for shape, offset in (((3, 5), arena.size - 29), ((1,), -1), ((arena.size,), 0)):
        with pytest.raises(ValueError, match=r"bytes .* of shared memory of 4194304"):
            window.tensor(torch.bfloat16, shape, offset)
    window.close()


def test_memory_that_could_be_cut_short_is_not_mapped(tmp_path):
    fd = os.memfd_create("epserve-steps", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    with pytest.raises(ValueError, match="not sealed"):
        Window(os.dup(fd), MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(ValueError, match="not of 2097152 bytes"):
        Window(os.dup(fd), 2 * MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1)
    os.close(fd)
    assert num_open() == 0


def test_an_arena_that_the_system_does_not_give():
    with pytest.raises(ConfigError, match=r"cluster\.shared_memory_bytes: no \d+ bytes of shared memory"):
        Arena(1 << 62)


# Sizes: below INLINE_BYTES (the socket), above it, what is in the arena already, and what finds no room there.
@pytest.mark.parametrize("where", ["small", "copied", "in place", "no room", "empty"])
async def test_the_same_result_wherever_the_bytes_are(arena, where):
    server = StepServer(double)
    link = await SocketLink.open(server.address, lambda: None, arena)
    shape = {"small": (4, 8), "no room": (1000, 2000), "empty": (0, 8)}.get(where, (100, 200))
    x = arena.empty(shape, torch.float32) if where == "in place" else torch.empty(shape)
    out = arena.empty(shape, torch.float32) if where in ("in place", "copied") else torch.empty(shape)
    x.normal_()
    for step in range(3):
        out.fill_(-1)
        told = await asyncio.wait_for(link.submit({"step": step}, [x], out), LIMIT_S)
        assert torch.equal(out, x * 2)
        assert bool(told.get("phases")) == (where in ("in place", "copied")), "only these say that they used the memory"
    held = sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in (x, out) if arena.offset_of(t) is not None and t.numel())
    assert arena.room()[0] == arena.size - held, "what was copied is free again"
    link.close()
    server.close()


async def test_several_steps_in_flight_come_back_in_order(arena):
    held = threading.Event()

    def answer(header, tensors, out):
        held.wait(LIMIT_S)
        return double(header, tensors, out)

    server = StepServer(answer)
    link = await SocketLink.open(server.address, lambda: None, arena)
    inputs = [torch.full((50, 200), float(number)) for number in range(6)]
    outs = [arena.empty((50, 200), torch.float32) for _ in inputs]
    calls = [link.submit({"step": n}, [x], out) for n, (x, out) in enumerate(zip(inputs, outs, strict=True))]
    assert link.num_pending == 6
    held.set()
    await asyncio.wait_for(asyncio.gather(*calls), LIMIT_S)
    assert all(torch.equal(out, x * 2) for x, out in zip(inputs, outs, strict=True))
    link.close()
    server.close()


async def test_memory_is_not_used_again_while_a_rank_that_was_given_up_may_write_to_it(arena):
    held, inside = threading.Event(), threading.Event()

    def answer(header, tensors, out):
        inside.set()
        held.wait(LIMIT_S)
        return double(header, tensors, out)

    server = StepServer(answer)
    link = await SocketLink.open(server.address, lambda: None, arena)
    out = arena.empty((100, 100), torch.float32)
    call = link.submit({"step": 1}, [torch.ones(100, 100)], out)
    await until(inside.is_set)
    link.close()
    with pytest.raises(RankLost, match="closed here"):
        await call
    del out, call
    gc.collect()
    assert arena.room()[0] == arena.size - 2 * 40_000, "input and output are kept: the step may still run"
    held.set()
    await until(lambda: arena.room() == (arena.size, arena.size))
    server.close()


async def test_a_rank_maps_no_memory_of_a_stranger_or_of_another_size(arena):
    server = StepServer(double)

    def refused(token: str, size: int) -> None:
        with dataclasses.replace(server.address, token=token).connect() as caller:
            wire.send_with_descriptors(caller, {"arena": size}, [arena.fd])
            wire.receive_header(caller)

    with pytest.raises(ConnectionError):  # hung up on, before or after all has been sent
        refused("no", arena.size)
    with pytest.raises(ConnectionError):  # the right token with memory of another size
        refused(server.address.token, 17)
    await until(lambda: num_open() == 2)  # the arena's own, and the one that Python's mmap keeps
    link = await SocketLink.open(server.address, lambda: None, arena)
    await asyncio.wait_for(link.beat(), LIMIT_S)
    link.close()
    server.close()


async def test_a_rank_that_never_answers_the_door_is_given_up(monkeypatch, arena):
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        name = f"epserve-test-silent-{os.getpid()}"
        silent.bind("\0" + name)
        silent.listen()
        address = door.LinkAddress(name=name, token="x", protocol="steps")
        with pytest.raises(TimeoutError):
            await SocketLink.open(address, lambda: None, arena)


PEER = """
import asyncio, sys, time, torch
from epserve.link.shm import Arena
from epserve.link.step_server import StepServer
from epserve.link.door import LinkAddress
from epserve.link.transport import SocketLink

def slow(header, tensors, out):
    if header["step"] == 1:
        print("in the step", flush=True)
        time.sleep(300)
    out.copy_(tensors[0])
    return {"step": header["step"]}, []

async def engine(name, token):
    arena = Arena(4 << 20)
    link = await SocketLink.open(LinkAddress(name=name, token=token, protocol="steps"), lambda: None, arena)
    out = arena.empty((100, 100), torch.float32)
    await link.submit({"step": 0}, [torch.ones(100, 100)], out)
    print("answered", flush=True)
    await link.submit({"step": 1}, [torch.ones(100, 100)], out)

if sys.argv[1] == "rank":
    server = StepServer(slow)
    print(server.address.name, server.address.token, flush=True)
    time.sleep(300)
else:
    asyncio.run(engine(*sys.argv[2:]))
"""


@pytest.fixture
def peer():
    started = []

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-c", PEER, *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(LIMIT_S)
        process.stdout.close()


async def line_of(process: subprocess.Popen) -> str:
    return (await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), LIMIT_S)).strip()


async def test_a_rank_is_killed_in_a_step(arena, peer):
    rank, lost = peer("rank"), []
    name, token = (await line_of(rank)).split()
    link = await SocketLink.open(
        door.LinkAddress(name=name, token=token, protocol="steps"), lambda: lost.append(1), arena
    )
    out = arena.empty((100, 100), torch.float32)
    await asyncio.wait_for(link.submit({"step": 0}, [torch.ones(100, 100)], out), LIMIT_S)
    assert num_open(rank.pid) == 1, "that of the mapping"
    call = link.submit({"step": 1}, [torch.ones(100, 100)], out)
    assert await line_of(rank) == "in the step"
    rank.send_signal(signal.SIGKILL)
    with pytest.raises(RankLost, match="gone"):
        await asyncio.wait_for(call, LIMIT_S)
    assert lost == [1]
    del out, call
    await until(lambda: gc.collect() >= 0 and arena.room() == (arena.size, arena.size))
    link.close()


async def test_a_front_end_is_killed_in_a_step(peer):
    """The rank lets go of the memory and takes the next engine."""
    held, inside = threading.Event(), threading.Event()

    def answer(header, tensors, out):
        if header["step"] == 1:
            inside.set()
            held.wait(LIMIT_S)
        out.copy_(tensors[0])
        return {"step": header["step"]}, []

    before, server = num_mapped(), StepServer(answer)
    front_end = peer("engine", server.address.name, server.address.token)
    assert await line_of(front_end) == "answered"
    await until(inside.is_set)
    assert num_mapped() == before + 1
    front_end.send_signal(signal.SIGKILL)
    front_end.wait(LIMIT_S)
    held.set()
    await until(lambda: num_mapped() == before)
    arena = Arena(MIB)
    link = await SocketLink.open(server.address, lambda: None, arena)
    out = arena.empty((100, 100), torch.float32)
    await asyncio.wait_for(link.submit({"step": 0}, [torch.ones(100, 100)], out), LIMIT_S)
    assert out.sum() == 10_000
    link.close()
    server.close()
    arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory for a GPU")
def test_a_gpu_copies_to_and_from_the_mapping_itself():
    arena = Arena(64 * MIB)
    window = Window(os.dup(arena.fd), arena.size, pin=True)
    assert window.pinned
    x, y = arena.empty((1024, 4096), torch.bfloat16), arena.empty((1024, 4096), torch.bfloat16)
    x.normal_()
    source = window.tensor(torch.bfloat16, (1024, 4096), arena.offset_of(x))
    target = window.tensor(torch.bfloat16, (1024, 4096), arena.offset_of(y))
    assert source.is_pinned() and target.is_pinned()
    torch.ones(
        1, dtype=torch.bfloat16, device="cuda"
    ) * 2  # a kernel that is loaded for the first time waits for the device
    torch.cuda._sleep(1_000_000_000)  # cycles, half a second: the stream is busy while the copies are queued
    start = time.monotonic()
    on_device = source.to("cuda", non_blocking=True)
    target.copy_(on_device * 2, non_blocking=True)
    assert time.monotonic() - start < 0.2, "the copies waited for the stream"
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2)
    del source, target, on_device
    window.close()
    arena.close()
