"""Where ranks are decides which all-to-all connects them: made-up hosts, NVLink domains and RDMA devices, and what fails."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from epserve import all2all
from epserve.config import parse_config
from epserve.errors import BackendFailed, Incompatible
from epserve.link.failure import Failure, from_exception
from epserve.models import open_checkpoint
from epserve.models.demo import reference_block, write_demo_checkpoint
from epserve.modular_kernel import PrepareFinalizeOptions, RankContext
from epserve.modular_kernel.methods import Backends, UnquantizedFusedMoEMethod
from epserve.modular_kernel.registry import Registry
from epserve.pool import ranks as pool_ranks
from epserve.pool.members import Member
from epserve.pool.ranks import Ranks
from epserve.process.boot import host_key
from epserve.rank.groups import GroupAddress
from epserve.rank.reports import Outcome, RankFacts, Standing
from epserve.rank.setup import whereabouts
from epserve.rank.setup.backends import choose_backends, names_asked
from epserve.rank.setup.plan import plan_ranks
from epserve.rank.setup.topology import Location, Topology, imagined, in_host_order, key
from epserve.rank.step import Arrangement, StepPlan
from epserve.rank.worker import Worker
from tests.support.cases import CASES
from tests.support.ranks import run_ranks

DEEPEP = ("deepep_ht", "deepep_ll", "deepep_v2")
NO_DEEPEP = tuple((key("all2all", name), "the package deep_ep is not installed") for name in DEEPEP)
DEPLOY = Path(__file__).parent.parent.parent / "deploy"


def told(topology: Topology, **changes) -> Topology:
    """The topology as ranks with GPUs tell it: they were asked about every backend."""
    config = parse_config({"model": {"path": "m"}, "engine": {"ranks": len(topology.ranks)}})
    measured = config.engine.model_copy(update={"all2all": "measured"})
    asked = frozenset(
        key(kind, name)
        for engine in (config.engine, measured)
        for kind, names in names_asked(engine, "cuda").items()
        for name in names
    )
    return replace(topology, asked=asked, ranks=tuple(replace(each, **changes) for each in topology.ranks))


def racks(per_host: int, hosts: int, hosts_in_a_rack: int, **facts) -> Topology:
    """Hosts that share an NVLink domain with their rack, such as those of an NVL72."""
    places = [
        Location(host=f"h{host}", domain=f"rack {host // hosts_in_a_rack}", address=f"10.0.0.{host}", **facts)
        for host in range(hosts)
        for _ in range(per_host)
    ]
    return Topology(ranks=tuple(places))


def chosen(topology: Topology, **engine) -> tuple[str, tuple[str, ...]]:
    spec = CASES["bf16"].spec(len(topology.ranks), "cuda")
    counts = spec.layout.counts
    assert len(counts) == len(topology.ranks)
    found = choose_backends(spec, topology=topology, here=False, **engine)
    return found.all2all, found.passed_over


TABLE = [
    # why the row is there, topology, choice without DeepEP, choice with it
    ("one host: stores into peers' memory", imagined([2]), "nvlink", "nvlink"),
    ("2 x 2", imagined([2, 2]), "all_to_all_by_host", "all_to_all_by_host"),
    ("2 x 2 with RDMA", imagined([2, 2], rdma=True), "all_to_all_by_host", "deepep_v2"),
    ("2 x 8 with RDMA", imagined([8, 8], rdma=True), "all_to_all_by_host", "deepep_v2"),
    ("8 x 8: within 64 ranks, yet not one domain", imagined([8] * 8, rdma=True), "all_to_all_by_host", "deepep_v2"),
    ("uneven hosts", imagined([3, 1]), "all_to_all_by_host", "all_to_all_by_host"),
    ("one GPU a host", imagined([1, 1, 1, 1], rdma=True), "all_to_all", "deepep_v2"),
    ("four hosts of one NVLink domain", racks(4, 4, 4), "nvlink", "nvlink"),
    ("two racks", racks(4, 4, 2, rdma=("mlx5_0",)), "all_to_all_by_host", "deepep_v2"),
    ("two racks without RDMA", racks(4, 4, 2), "all_to_all_by_host", "all_to_all_by_host"),
]  # fmt: skip


@pytest.mark.parametrize(("topology", "without", "with_it"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_choice_follows_the_places_of_the_ranks(topology, without, with_it):
    name, passed = chosen(told(topology, missing=NO_DEEPEP))
    assert name == without
    if name != "nvlink":
        assert any(line.startswith("nvlink: it connects ranks of one NVLink domain") for line in passed)
        assert any("deep_ep is not installed" in line for line in passed)
    name, passed = chosen(told(topology))
    assert name == with_it
    if with_it == "all_to_all_by_host":
        assert any(line.startswith("deepep_v2: it needs RDMA between hosts") for line in passed)


def test_a_domain_over_mixed_hosts_is_named_with_its_ranks():
    mixed = Topology(ranks=(*racks(2, 2, 2).ranks, *racks(2, 4, 2).ranks[6:]))  # two hosts of one rack, one of another
    assert mixed.describe() == "3 hosts (10.0.0.0: ranks 0-1; 10.0.0.1: ranks 2-3; 10.0.0.3: ranks 4-5)"
    assert mixed.num_domains == 2 and mixed.hosts == (0, 0, 1, 1, 2, 2) and mixed.host_sizes == (2, 2, 2)
    assert "2 NVLink domains on 3 hosts" in mixed.beyond("nvlink")
    assert mixed.beyond("anywhere") is None and "10.0.0.0: ranks 0-1" in mixed.beyond("host")


def test_hosts_without_gpus_send_rows_once_a_host():
    spec = CASES["bf16"].spec(4, "cpu")
    for hosts, name in (([2, 2], "all_to_all_by_host"), ([1, 1, 1, 1], "all_to_all"), ([4], "all_to_all")):
        assert choose_backends(spec, topology=imagined(hosts), experts_name="loop").all2all == name
    slot = choose_backends(spec, topology=imagined([2, 2]), experts_name="loop", combine_order="slot")
    assert slot.all2all == "all_to_all", "sums in slot order need every slot's row"


def test_what_is_missing_on_one_host_is_left_out_on_all_and_named():
    topology = told(imagined([2, 2], rdma=True))
    lacking = replace(topology.ranks[2], missing=((key("all2all", "deepep_v2"), "NCCL 2.28.9"),))
    topology = replace(topology, ranks=(*topology.ranks[:2], lacking, topology.ranks[3]))
    name, passed = chosen(topology)
    assert name == "all_to_all_by_host" and "deepep_v2: rank 2 on host 1: NCCL 2.28.9" in passed


def test_an_all_to_all_that_is_named_and_does_not_reach_is_refused_with_the_hosts():
    with pytest.raises(
        Incompatible, match=r"nvlink: it connects ranks of one NVLink domain, these are in 2 NVLink domains"
    ):
        chosen(told(imagined([2, 2])), all2all_name="nvlink")
    assert chosen(told(imagined([2, 2])), all2all_name="allgather_reducescatter")[0] == "allgather_reducescatter"


def test_measured_times_what_can_start_and_says_why_not_the_others(tmp_path):
    path = small_model(tmp_path / "m", num_experts=16, dtype=torch.bfloat16)
    engine = {"ranks": 4, "device": "cuda", "all2all": "measured"}
    config, info = parse_config({"model": {"path": str(path)}, "engine": engine}), open_checkpoint(path).info
    plan = plan_ranks(config, info, device="cuda", here=False, topology=told(imagined([2, 2]), missing=NO_DEEPEP))
    assert [path.chosen.all2all for path in plan.paths] == [
        "all_to_all",
        "allgather_reducescatter",
        "all_to_all_by_host",
    ]
    assert any("nvlink: it connects ranks of one NVLink domain" in line for line in plan.chosen.passed_over)
    failed = replace(told(imagined([4])), failed=(("nvlink", "no peer access"),))
    plan = plan_ranks(config, info, device="cuda", here=False, topology=failed)
    assert "nvlink" not in [path.chosen.all2all for path in plan.paths]
    assert "nvlink: no peer access" in plan.chosen.passed_over


def test_the_shipped_service_file_has_a_plan_on_three_hosts(tmp_path):
    """deploy/service.yaml as it is, but for the checkpoint: 24 ranks of three hosts without DeepEP."""
    data = yaml.safe_load((DEPLOY / "service.yaml").read_text())
    data["model"]["path"] = str(small_model(tmp_path / "m", num_experts=24, dtype=torch.bfloat16))
    config = parse_config(data)
    info = open_checkpoint(config.model.path).info
    for hosts, name in (([8, 8, 8], "all_to_all_by_host"), ([10, 14], "all_to_all_by_host"), ([1] * 24, "all_to_all")):
        places = told(imagined(hosts), missing=NO_DEEPEP)
        plan = plan_ranks(config, info, device="cuda", here=False, topology=places)
        assert plan.chosen.all2all == name


def test_rdma_devices_count_when_a_port_is_active_and_they_may_be_opened(tmp_path):
    known, openable = tmp_path / "class", tmp_path / "dev"
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = known / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    openable.mkdir()
    assert whereabouts.rdma_devices(known, openable) == ()
    (openable / "uverbs0").write_text("")
    assert whereabouts.rdma_devices(known, openable) == ("mlx5_0",)
    assert whereabouts.rdma_devices(tmp_path / "nothing", openable) == ()


def test_a_fabric_inside_one_host_names_no_domain():
    """HGX hosts register their GPUs with a cluster of zeros, NVL72 racks with a real one."""
    rack = bytes(range(16))
    assert whereabouts.domain_of(rack, 7, state=3, status=0) == f"{rack.hex()}.7"
    assert whereabouts.domain_of(rack, 7, state=3, status=0) != whereabouts.domain_of(rack, 8, state=3, status=0)
    assert whereabouts.domain_of(bytes(16), 0, state=3, status=0) == ""
    assert whereabouts.domain_of(rack, 7, state=2, status=0) == whereabouts.domain_of(rack, 7, state=3, status=9) == ""


def test_this_process_tells_its_host_and_what_it_lacks():
    engine = parse_config({"model": {"path": "m"}, "engine": {"device": "cpu", "all2all": "deepep_v2"}}).engine
    place = whereabouts.locate(engine, "cpu", address="10.0.0.1")
    assert place.host == place.domain == host_key() and place.address == "10.0.0.1"
    assert dict(place.missing)["all2all/deepep_v2"]


class OtherHost(all2all.REGISTRY.get("local")):
    """Symmetric memory where a peer is on another host, as the driver's shared allocations report it."""

    def make(self, spec, options):
        raise OSError("ranks [2, 3] are on other hosts")


def test_what_a_library_raises_while_it_is_built_names_its_backend():
    registry = Registry("all-to-all backend")
    registry.register("far", "fails", lambda: OtherHost)
    from epserve import experts

    backends = Backends(all2all=registry, experts=experts.REGISTRY, prefer_experts=("loop",))
    method = UnquantizedFusedMoEMethod(CASES["plain"].spec(1), backends)
    with pytest.raises(BackendFailed) as caught:
        method.init_prepare_finalize(RankContext(), PrepareFinalizeOptions())
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.backend == "far" and "all-to-all far cannot be built" in str(again)
    assert "ranks [2, 3] are on other hosts" in again.reason
    failure = from_exception(caught.value, rank=1, phase="join")
    assert failure.error is caught.value and not failure.consequence
    gone = from_exception(BackendFailed("far", "RuntimeError: connection reset by peer"), rank=1, phase="join")
    assert gone.error is None and gone.consequence, "the rank that is gone is at fault, not the backend"


# The ranks go on without a backend that cannot be built.


class FakeActor:
    """A rank's process that cannot build `broken`, and joins with any other backend that its plan has."""

    def __init__(self, info, broken: tuple[str, ...]):
        self.info, self.broken, self.plan = info, broken, None

    async def call(self, method: str, *args) -> Outcome:
        if method == "leave":
            arrangement = args[-1]
            self.plan = plan_ranks(
                arrangement.config, self.info, device="cuda", here=False, topology=arrangement.topology
            )
        if method == "join":
            for path in self.plan.paths:
                if path.chosen.all2all in self.broken:
                    error = BackendFailed(path.chosen.all2all, "OSError: ranks [1] are on other hosts")
                    return Outcome(
                        failure=Failure(
                            rank=0, phase="join", step=-1, message=str(error), consequence=False, error=error
                        )
                    )
            return Outcome(value={"group": 0.0, "warm-up": 0.0})
        if method == "explain":
            return Outcome(value=Standing(notes=(), choices=(), backends=self.plan.chosen.names, weights_bytes=0))
        return Outcome()


class FakeMember(Member):
    async def call(self, method, *args, timeout, background=False):
        return await self.actor.call(method.__name__, *args)


def facts(rank: int, host: str) -> RankFacts:
    place = Location(host=host, domain=host, address=host, missing=NO_DEEPEP)
    return RankFacts(rank=rank, pid=rank, node_id=host, node_ip=host, device="cuda:0", location=place)


def united(tmp_path, monkeypatch, hosts: str, broken: tuple[str, ...], **engine) -> Ranks:
    path = small_model(tmp_path / "m", num_experts=8, dtype=torch.bfloat16)
    config = parse_config({"model": {"path": str(path)}, "engine": {"ranks": len(hosts), "device": "cuda", **engine}})
    info = open_checkpoint(path).info
    plan = plan_ranks(config, info, device="cuda", here=False)
    pool = Ranks(config, plan, device="cuda", stamp=None, info=info, on_state=lambda state: None)
    pool.members = [
        FakeMember(rank=rank, actor=FakeActor(info, broken), facts=facts(rank, host)) for rank, host in enumerate(hosts)
    ]

    async def address() -> GroupAddress:
        return GroupAddress(store=None, generation=pool.generation)

    async def reopen() -> None: ...

    monkeypatch.setattr(pool, "_group_address", address)
    monkeypatch.setattr(pool.regions, "reopen", reopen)
    return pool


@pytest.mark.parametrize(
    ("engine", "left"), [({}, ("all_to_all",)), ({"all2all": "measured"}, ("all_to_all", "allgather_reducescatter"))]
)
async def test_a_backend_that_cannot_be_built_is_left_out_and_told(tmp_path, monkeypatch, caplog, engine, left):
    """One host by its own account, such as a container: the driver's shared memory fails all the same."""
    pool = united(tmp_path, monkeypatch, "aa", ("nvlink",), **engine)
    await pool.unite()
    assert pool.generation == 2, "one attempt with it, one without"
    assert tuple(path.chosen.all2all for path in pool.plan.paths) == left
    assert any("nvlink: OSError: ranks [1] are on other hosts" in line for line in pool.plan.chosen.passed_over)
    assert "all-to-all nvlink cannot be built on these ranks" in caplog.text
    await pool.unite()
    assert pool.generation == 3, "the next group does not try it again"


async def test_two_hosts_do_not_even_try_what_does_not_reach(tmp_path, monkeypatch):
    pool = united(tmp_path, monkeypatch, "abab", ("nvlink",))
    pool.side_by_side()
    assert [each.facts.location.host for each in pool.members] == ["a", "a", "b", "b"]
    assert [each.rank for each in pool.members] == [0, 1, 2, 3]
    assert in_host_order(["b", "a", "b", "c", "a"]) == [0, 2, 1, 4, 3]
    await pool.unite()
    assert pool.generation == 1 and pool.arrangement.topology.hosts == (0, 0, 1, 1)


async def test_a_named_backend_that_cannot_be_built_ends_the_start(tmp_path, monkeypatch):
    pool = united(tmp_path, monkeypatch, "aa", ("nvlink",), all2all="nvlink")
    with pytest.raises(BackendFailed, match="all-to-all nvlink cannot be built"):
        await pool.unite()


async def test_when_all_of_them_fail_every_reason_is_told(tmp_path, monkeypatch):
    everything = tuple(all2all.REGISTRY.names())
    pool = united(tmp_path, monkeypatch, "ab", everything)
    monkeypatch.setattr(pool_ranks, "log", SimpleNamespace(warning=lambda *args: None))
    with pytest.raises(Incompatible, match="all_to_all: OSError") as caught:
        await pool.unite()
    assert any("nvlink: it connects" in reason for reason in caught.value.reasons)


def small_model(path: Path, **changes) -> Path:
    sizes = {"hidden": 256, "intermediate": 128, "num_experts": 8, "top_k": 2, "num_layers": 1, "seed": 1}
    write_demo_checkpoint("mixtral", path, **{"dtype": torch.float32, **sizes, **changes})
    return path


def goes_on_elsewhere(ranks: RankContext, path) -> list[tuple[str, ...]]:
    """Two ranks of one host, then the same ranks after one backend could not be built."""
    engine = {"ranks": 2, "device": "cpu", "experts": "loop"}
    config = parse_config({"model": {"path": str(path)}, "engine": engine})
    here = Topology(ranks=(Location(host="a", domain="a"),) * 2)
    worker = Worker(config, ranks, topology=here)
    worker.load()
    names, layer = [], worker.plan.layers[0]
    for version, topology in enumerate((here, replace(here, failed=(("all_to_all", "broken"),)))):
        kernels = worker.kernels
        worker.leave()
        worker.arrange(ranks.rank, Arrangement(config=config, placements=dict(worker.placements), topology=topology))
        assert (worker.kernels is kernels) == (version == 0), "kernels stay where the plan stays"
        worker.regroup(ranks)
        worker.warm_up()
        x = torch.randn((5, 256), generator=torch.Generator().manual_seed(2))
        y = worker.step(StepPlan(step=0, layer=layer, mode="block", tokens_per_rank=(5, 5)), x, None, None)
        torch.testing.assert_close(y, reference_block(path, layer)(x), rtol=1e-4, atol=1e-5)
        names.append(worker.plan.chosen.names)
    return names


def test_a_rank_keeps_its_weights_when_another_backend_takes_over(tmp_path):
    path = small_model(tmp_path / "m")
    for names in run_ranks(goes_on_elsewhere, 2, path):
        assert names == [("all_to_all", "loop"), ("allgather_reducescatter", "loop")]
