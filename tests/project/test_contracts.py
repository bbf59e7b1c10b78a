"""The kernel's contracts: every method has a caller in the service, and the method classes are the only way to a kernel."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch

from epserve.modular_kernel import FusedMoEMethodBase, FusedMoEModularKernel, RankContext
from epserve.rank.worker import Worker
from tests.rank.test_worker import make_config
from tests.support.checkpoints import write

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("docs_contracts", ROOT / "docs" / "contracts.py")
assert SPEC is not None
assert SPEC.loader is not None
contracts = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)  # dataclasses look their module up there
SPEC.loader.exec_module(contracts)


def test_every_method_of_the_contracts_has_a_caller():
    assert contracts.faults() == []
    named = {(row.contract, row.method) for row in contracts.rows()}
    assert {("FusedMoEExpertsModular", "apply"), ("FusedMoEMethodBase", "select_gemm_impl")} <= named


CONTRACT = """
class Part(ABC):
    @abstractmethod
    def used(self): ...

    @abstractmethod
    def unused(self): ...

    @abstractmethod
    def missing(self): ...

    def spare(self):
        return 1

class Made(Part):
    def used(self):
        return self.helper()

    def unused(self):
        return 2
"""


@pytest.mark.parametrize(
    ("caller", "found"),
    [
        ("part.used()", ["unused", "missing", "spare"]),
        ("part.used(), part.unused(), part.spare(), part.missing()", ["missing"]),
        ("part.used(), other.unused(), part.spare()", ["unused", "missing"]),  # of something else
    ],
)
def test_a_method_without_a_caller_is_a_fault(tmp_path, caller, found):
    for folder in (*contracts.SERVICE, "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "epserve/modular_kernel/part.py").write_text(CONTRACT)
    (tmp_path / "epserve/rank/worker.py").write_text(f"def step(part, other):\n    {caller}\n")
    faults = [row.fault for row in contracts.rows(tmp_path, {"Part": {"part"}}) if row.fault]
    assert [fault.partition("Part.")[2].split()[0] for fault in faults] == found


METHODS = "epserve/modular_kernel/methods.py"
MAKERS = {
    "FusedMoEModularKernel": {METHODS},
    "get_handle": {METHODS, "all2all/tensor_parallel.py"},
    "prepare_weights": {
        METHODS,
        "epserve/modular_kernel/measured/selection.py",
        "epserve/modular_kernel/measured/summed.py",
        "epserve/rank/layer_kernels.py",
        "epserve/rank/worker.py",
        "experts/cpu/fused.py",
        "experts/cpu/packed.py",
        "experts/flashinfer_cutlass.py",
    },
}
"""What makes parts of a kernel -> the files that may call it. Those of `rank` hand weights to the method classes."""


@pytest.mark.parametrize("name", MAKERS)
def test_no_room_of_the_service_builds_a_kernel_around_the_method_classes(name):
    callers = set()
    for folder in ("epserve", "all2all", "experts"):
        for path in (ROOT / folder).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            if place.startswith("epserve/cli/layer/"):  # layers of random weights, for `epserve profile`
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == name:
                    callers.add(place)
    assert callers <= MAKERS[name], f"{name} is called beside the method classes"


def test_a_worker_gets_its_kernel_and_its_weights_from_the_method_class(tmp_path, monkeypatch):
    """Fails when the worker makes a kernel itself, or computes with weights that no method class has seen."""
    made, seen = [], []
    init, process = FusedMoEModularKernel.__init__, FusedMoEMethodBase.process_weights_after_loading

    def watched(self, *args, **kwargs):
        made.append({frame.function for frame in inspect.stack()})
        init(self, *args, **kwargs)

    def processed(self, weights):
        done = process(self, weights)
        seen.append(done.w13_eNK.data_ptr())
        return done

    monkeypatch.setattr(FusedMoEModularKernel, "__init__", watched)
    monkeypatch.setattr(FusedMoEMethodBase, "process_weights_after_loading", processed)
    path = write("mixtral", tmp_path / "mixtral", dtype=torch.float32)
    worker = Worker(make_config(path, ranks=1), RankContext())
    worker.load()
    worker.warm_up()
    assert made
    assert all("init_prepare_finalize" in names for names in made)
    held = [weights.experts.w13_eNK.data_ptr() for weights in worker.weights.layers.values()]
    assert held
    assert set(held) <= set(seen)
    worker.close()
