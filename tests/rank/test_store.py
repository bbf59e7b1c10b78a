"""The store of the process groups: what torch asks of it, and what strangers can do to it, which is nothing."""

import contextlib
import dataclasses
import multiprocessing
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from epserve.rank import groups, store
from epserve.rank.groups import GroupAddress
from epserve.rank.store import RankStore, StoreServer

LIMIT_S = 60.0
SHORT = timedelta(seconds=0.2)


@pytest.fixture
def server():
    server = StoreServer("127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def rank(server):
    rank = RankStore(server.address, timedelta(seconds=LIMIT_S))
    yield rank
    rank.close()


def test_it_does_what_torchs_own_store_does(rank):
    own = dist.HashStore()
    own.set_timeout(SHORT)
    for each in (own, rank):
        each.set("text", "a")
        each.set("text", b"\0\xff")
        assert each.get("text") == b"\0\xff"
        assert [each.add("count", 2), each.add("count", -5)] == [2, -3]
        assert each.get("count") == b"-3"
        assert each.check(["text", "count"]) and not each.check(["text", "other"])
        assert each.compare_set("text", "no", "b") == b"\0\xff"
        assert each.compare_set("count", "-3", "b") == b"b"
        assert each.delete_key("count") and not each.delete_key("count")
        with pytest.raises(dist.DistStoreError):
            each.wait(["text", "never"], SHORT)
    assert rank.multi_get(["text", "text"]) == [b"\0\xff"] * 2
    assert rank.num_keys() == 1


def test_a_rank_that_waits_holds_no_other_up(rank):
    got = []
    waiting = threading.Thread(target=lambda: got.append(rank.get("late")))
    waiting.start()
    while not rank._idle:  # its connection is in use
        assert not rank.check(["late"])
    rank.set("late", "now")
    waiting.join(LIMIT_S)
    assert got == [b"now"]


def test_a_store_that_is_gone_or_full_is_told(server, rank, monkeypatch):
    monkeypatch.setattr(store, "MOST_KEYS", 1)
    rank.set("a", "1")
    rank.set("a", "2")
    with pytest.raises(dist.DistStoreError, match="holds 1 keys"):
        rank.set("b", "1")
    server.close()
    rank.close()
    with pytest.raises(dist.DistNetworkError, match="does not answer"):
        rank.get("a")


def join(rank: int, address: GroupAddress, answers) -> None:
    groups.ray.util.get_node_ip_address = lambda: "127.0.0.1"
    for generation in range(address.generation, address.generation + 2):
        group = groups.join(
            dataclasses.replace(address, generation=generation), rank, 2, torch.device("cpu"), LIMIT_S
        )  # fmt: skip
        total = torch.ones(1) * (rank + 1)
        dist.all_reduce(total, group=group)
        answers.put(total.item())
        groups.leave(torch.device("cpu"))


def test_junk_of_strangers_changes_nothing_and_groups_form_in_it(server):
    """Torch's TCPStore lists its keys to strangers and takes theirs. Gloo allocated what junk in the next keys claimed."""
    host, port = server.address.host, server.address.port
    with pytest.raises((dist.DistNetworkError, dist.DistStoreError, RuntimeError)):
        dist.TCPStore(host, port, is_master=False, timeout=SHORT).set("gen7/0//cpu//0/1", b"\xff" * 64)
    for junk in (
        b"\xff" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        b'EPS2\0\0\0\x2c\0\0\0\0{"op":"set","keys":["gen7/x"],"value":"////"}',
    ):
        with socket.create_connection((host, port), timeout=LIMIT_S) as stranger:
            stranger.sendall(junk)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(4096):
                    pass  # until the store hangs up
    with pytest.raises(dist.DistNetworkError):
        RankStore(dataclasses.replace(server.address, token="0" * 64), SHORT).set("gen7/0//cpu//0/1", "junk")
    assert server._values == {}
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    address = GroupAddress(store=server.address, generation=7)
    ranks = [context.Process(target=join, args=(rank, address, answers)) for rank in range(2)]
    for each in ranks:
        each.start()
    assert [answers.get(timeout=LIMIT_S) for _ in range(4)] == [3.0] * 4
    for each in ranks:
        each.join(LIMIT_S)
        assert each.exitcode == 0
    server.forget("gen7/")
    assert server._values and all(key.startswith("gen8/") for key in server._values)


def test_a_rank_that_does_not_come_costs_the_timeout(server):
    groups_of_one = GroupAddress(store=server.address, generation=0)
    start = time.monotonic()
    with pytest.raises((dist.DistStoreError, RuntimeError)):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("gen0", groups._store_at(groups_of_one.store, SHORT)), rank=0, world_size=2,
            timeout=SHORT,
        )  # fmt: skip
    assert time.monotonic() - start < LIMIT_S
    if dist.is_initialized():
        dist.destroy_process_group()
