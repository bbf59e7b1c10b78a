"""Makes the table of the kernel's contracts from the source: who implements a method, who calls it in the service, who tests it.

A call counts if its receiver has a name that the contract's objects have (RECEIVERS), in the rooms that a service runs, or if
it is `self` in the contract and in its classes. A test counts if it makes such a call. Other methods are tested through callers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
THROUGH = "tests/kernel/test_modular_kernel_combinations.py"
"""Runs every pair of backends through the kernel: the test of a method that no test calls by itself."""
SERVICE = ("epserve/modular_kernel", "epserve/rank", "epserve/pool", "epserve/models", "all2all", "experts")
"""The rooms that ranks of a service run. The command line's `profile` is none of them, nor are benchmarks."""
RECEIVERS = {
    "All2AllManager": {"manager", "inner"},
    "FusedMoEPrepareAndFinalizeModular": {"pf", "prepare_finalize", "inner", "made"},
    "FusedMoEExpertsModular": {"experts", "fused_experts", "backend", "candidate", "chosen", "first", "each"},
    "TopKWeightAndReduce": {"reduce"},
    "FusedMoEMethodBase": {"method"},
}
"""Contract -> the names of variables and attributes that hold its objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Class:
    """Holds one class of the source. `methods`: name -> whether it is abstract."""

    name: str
    path: str
    bases: tuple[str, ...]
    methods: dict[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Holds one method of one contract."""

    contract: str
    method: str
    abstract: bool
    implementers: tuple[str, ...]
    callers: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def fault(self) -> str | None:
        """Returns the reason why the method should not be there, or None."""
        if (self.implementers or not self.abstract) and not self.callers:
            return f"{self.contract}.{self.method} is implemented and no code of the service calls it"
        if self.abstract and not self.implementers:
            return f"{self.contract}.{self.method} is abstract and no class implements it"
        return None


@dataclass(slots=True)
class Source:
    """Holds the classes of a source tree, and every call of a method: name -> (receiver, class around it, place)."""

    classes: dict[str, Class] = field(default_factory=dict)
    calls: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path, folders: tuple[str, ...]) -> Source:
        source = cls()
        for folder in folders:
            for path in sorted((root / folder).rglob("*.py")):
                source._add(ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(root)), "", "")
        return source

    def _add(self, node: ast.AST, path: str, class_name: str, place: str) -> None:
        if isinstance(node, ast.ClassDef):
            self.classes[node.name] = _class(node, path)
            class_name, place = node.name, node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            place = f"{place}.{node.name}" if place else node.name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            call = (_receiver(node.func.value), class_name, f"{path}: {place}")
            self.calls.setdefault(node.func.attr, []).append(call)
        for child in ast.iter_child_nodes(node):
            self._add(child, path, class_name, place)

    def derived(self, contract: str) -> set[str]:
        """Returns the contract and every class below it."""
        found = {contract}
        while more := {name for name, each in self.classes.items() if found & set(each.bases)} - found:
            found |= more
        return found


def _class(node: ast.ClassDef, path: str) -> Class:
    methods = {
        each.name: any(_receiver(mark) == "abstractmethod" for mark in each.decorator_list)
        for each in node.body
        if isinstance(each, ast.FunctionDef)
    }
    return Class(name=node.name, path=path, bases=tuple(map(_receiver, node.bases)), methods=methods)


def _receiver(node: ast.AST) -> str:
    """Returns the last name of an expression: `kernel.prepare_finalize` is "prepare_finalize"."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return _receiver(node.value) if isinstance(node, ast.Subscript) else ""


def rows(root: Path = ROOT, receivers: dict[str, set[str]] | None = None) -> Iterator[Row]:
    """Yields every public method of every contract, in the order of the source."""
    source, tests = Source.of(root, SERVICE), Source.of(root, ("tests",))
    for contract, names in (receivers or RECEIVERS).items():
        below = source.derived(contract)
        for method, abstract in source.classes[contract].methods.items():
            if method.startswith("_"):
                continue
            implementers = [name for name in sorted(below - {contract}) if method in source.classes[name].methods]
            callers = [
                place
                for receiver, inside, place in source.calls.get(method, [])
                if receiver in names or (receiver in ("self", "cls") and inside in below)
            ]
            seen = [place.partition(":")[0] for receiver, _, place in tests.calls.get(method, []) if receiver in names]
            yield Row(
                contract=contract, method=method, abstract=abstract, implementers=tuple(implementers),
                callers=tuple(dict.fromkeys(callers)), tests=tuple(sorted(set(seen), key=_by_kind)),
            )  # fmt: skip


def _by_kind(path: str) -> tuple[bool, str]:
    """Sorts what pytest collects before programs that tests run."""
    return not Path(path).name.startswith("test_"), path


def faults(root: Path = ROOT) -> list[str]:
    """Returns a sentence for each method that is implemented and never called, or abstract and never implemented."""
    return [fault for row in rows(root) if (fault := row.fault)]


def markdown(root: Path = ROOT) -> str:
    """Returns a table for each contract."""
    lines = [
        "## The contracts",
        "",
        "Made from the source by `python docs/generate.py`, which fails on a method that a class implements and no code of the",
        "service calls. *Default* stands for the contract's own method. A method without a test of its own is tested through",
        f"its callers, by `{THROUGH}`.",
    ]
    contract = ""
    for row in rows(root):
        if row.contract != contract:
            contract = row.contract
            lines += ["", f"### {contract}", "", "| method | who implements it | who calls it in the service | test |"]
            lines.append("|---|---|---|---|")
        own = [] if row.abstract else ["*default*"]
        made = ", ".join(own + [f"`{name}`" for name in row.implementers])
        called = ", ".join(f"`{place.partition(': ')[2]}`" for place in row.callers[:3])
        tested = ", ".join(f"`{path.removeprefix('tests/')}`" for path in row.tests[:1]) or "through its callers"
        abstract = " (abstract)" if row.abstract else ""
        lines.append(f"| `{row.method}`{abstract} | {made} | {called} | {tested} |")
    return "\n".join(lines)
