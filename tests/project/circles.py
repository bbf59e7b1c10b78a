"""The contract of import-linter that no module is in a circle of imports: `contract_types` in pyproject.toml names it."""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class NoCircles(Contract):
    """Whatever modules import each other, at the top, in functions or under TYPE_CHECKING, has an order."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        left = circles(graph)
        return ContractCheck(kept=not left, metadata={"left": left})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in sorted(check.metadata["left"].items()):
            output.print(f"{importer} imports {', '.join(sorted(imported))}")


def circles(graph: ImportGraph) -> dict[str, set[str]]:
    """Modules that are in circles, or between two, with what they import of the others. Empty: there is no circle."""
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while True:
        imported = {each for targets in left.values() for each in targets}
        kept = {module: targets & left.keys() for module, targets in left.items() if targets and module in imported}
        if kept == left:
            return left
        left = kept
