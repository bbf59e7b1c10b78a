"""Cores of ranks on CPUs: shares that never add up to more than the host has, nodes of a made-up system, and a rank's threads."""

import os
import subprocess
import sys

import pytest
import torch

from epserve.rank import groups
from epserve.rank.setup import cores, machine
from epserve.rank.setup.cores import Host, share_of
from tests.support.ranks import run_ranks


def system(folder, *nodes):
    for number, text in enumerate(nodes):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(text + "\n")
    return folder


@pytest.mark.parametrize("text", ["", "0", "0-3", "0,2-3,10-11"])
def test_lists_of_cores_are_read_and_written_as_the_kernel_does(text):
    assert cores.shown(tuple(cores.parse_list(text + "\n"))) == text


def test_nodes_are_in_order_and_hold_what_this_process_may_use(tmp_path):
    nodes = ["0-1,24-25", "2-3", "4", *["100"] * 7, "8-9"]  # node 10 comes after node 2
    allowed = frozenset({0, 24, 2, 3, 4, 8})
    host = cores.this_host(system(tmp_path, *nodes), allowed)
    assert host.nodes[:2] == ((0, 24), (2, 3)) and host.nodes[-1] == (8,)


@pytest.mark.parametrize("nodes", [(), ("0-1",)], ids=["no nodes", "one core untold"])
def test_a_system_that_tells_too_little_is_one_node(tmp_path, nodes):
    host = cores.this_host(system(tmp_path, *nodes), frozenset({0, 1, 2}))
    assert host.nodes == ((0, 1, 2),)


HOSTS = [Host(nodes=((0, 1),)), Host(nodes=((0, 1, 2, 3), (4, 5, 6, 7))), Host(nodes=((0, 1, 2), (3, 4, 5, 6, 7), (8,))),
         Host(nodes=(tuple(range(64)), tuple(range(64, 128))), quota=6.5), Host(nodes=((0, 1, 2, 3),), quota=0.5)]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: f"{[len(node) for node in host.nodes]}, {host.quota}")
@pytest.mark.parametrize("sharers", [1, 2, 3, 4, 7, 16, 200])
def test_all_ranks_together_have_no_more_threads_than_there_are_cores(host, sharers):
    shares = [share_of(host, index, sharers) for index in range(sharers)]
    assert all(share.threads >= 1 for share in shares)
    assert sum(share.threads for share in shares) <= max(host.usable, sharers)
    for node in host.nodes if len(host.nodes) > 1 else ():  # nor on any node
        here = [share.threads for share in shares if share.cores and set(share.cores) <= set(node)]
        assert sum(here) <= max(len(node), len(here))
    assert all(share.cores for share in shares) is (len(host.nodes) > 1)


def test_one_rank_a_node_has_that_node():
    host = HOSTS[1]
    assert [share_of(host, index, 2) for index in (0, 1)] == [
        cores.Share(threads=4, cores=(0, 1, 2, 3)), cores.Share(threads=4, cores=(4, 5, 6, 7))]  # fmt: skip
    assert share_of(host, 0, 1) == cores.Share(threads=8, cores=host.cores)


@pytest.mark.parametrize(("most", "threads"), [(None, 4), (1, 1), (4, 4), (9, 4)])
def test_what_a_user_sets_is_the_most(most, threads):
    assert share_of(Host(nodes=((0, 1, 2, 3),)), 0, 1, most).threads == threads


@pytest.mark.parametrize(
    ("asked", "variable", "most"),
    [(None, None, None), (3, "1", 3), (None, "2", 2), (None, "4,2", 4), (None, "x", None)],
)
def test_the_setting_comes_before_the_variable(monkeypatch, asked, variable, most):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cores.most_threads(asked) == most


NO_QUOTA = float("inf")


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", NO_QUOTA), ("150000 100000", 1.5), ("50000", 0.5), ("-1", NO_QUOTA)]
)
def test_a_container_may_have_less_than_its_cores(monkeypatch, text, quota):
    monkeypatch.setattr(machine, "_texts", lambda *names: iter([text]))
    assert machine.cpu_quota() == quota


def test_binding_reaches_threads_that_are_there_and_those_that_come():
    code = """
import os, threading
from epserve.rank.setup import cores
seen, go = [], threading.Event()
def look(): go.wait(20); seen.append(os.sched_getaffinity(0))
early = threading.Thread(target=look); early.start()
first = min(os.sched_getaffinity(0))
cores.bind((first,)); go.set()
late = threading.Thread(target=look); late.start()
early.join(); late.join()
assert seen == [{first}, {first}], seen
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))


def count_neighbours(ranks):
    return [
        groups.neighbours(ranks.group, ranks.world_size, ranks.rank, key) for key in (7, ranks.rank, ranks.rank // 2)
    ]


def test_ranks_of_one_host_count_each_other():
    assert run_ranks(count_neighbours, 3) == [
        [(0, 3), (0, 1), (0, 2)],
        [(1, 3), (0, 1), (1, 2)],
        [(2, 3), (0, 1), (0, 1)],
    ]
    assert groups.neighbours(None, 1, 0, 5) == (0, 1)


def test_the_same_cores_have_the_same_key():
    assert cores.this_host().key == cores.this_host().key
    assert Host(nodes=((0, 1),)).key != Host(nodes=((0, 2),)).key
    assert torch.tensor([Host(nodes=((0, 1),)).key]).dtype == torch.int64
