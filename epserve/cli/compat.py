"""Makes the table of `epserve compat` and of the docs: the experts that fit each prepare/finalize, and the reasons of the others.

Everything here is derived from the registries and the capability records.
"""

from __future__ import annotations

from dataclasses import dataclass

from epserve import all2all, experts
from epserve.modular_kernel import LayerSpec, Registry, why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Holds a pair of backends. `reasons`: why the two never fit. `missing`: why one of them cannot run on this machine."""

    all2all: str
    experts: str
    reasons: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def usable(self) -> bool:
        return self.fits and not self.missing


def pairs(spec: LayerSpec | None = None) -> list[Pair]:
    """Returns every pair, in registration order. With a spec the reasons are those for that layer."""
    table = []
    for pf_name in all2all.REGISTRY.names():
        manager = all2all.REGISTRY.get(pf_name)
        for experts_name in experts.REGISTRY.names():
            backend = experts.REGISTRY.get(experts_name)
            reasons = why_not(manager.prepare_finalize.capability, backend.capability, spec)
            found = ((pf_name, manager.unavailable()), (experts_name, backend.unavailable()))
            missing = tuple(f"{name}: {text}" for name, text in found if text)
            table.append(Pair(all2all=pf_name, experts=experts_name, reasons=reasons, missing=missing))
    return table


def markdown() -> str:
    """Returns the table of the docs, with the reason for each no. It is the same on every machine."""
    table = pairs()
    columns = experts.REGISTRY.names()
    notes: dict[str, int] = {}

    def head(registry: Registry, name: str) -> str:
        note = registry.entry(name).note
        return f"`{name}`" + (f" ({notes.setdefault(note, len(notes) + 1)})" if note else "")

    lines = [
        "# Which all-to-all backend goes with which experts",
        "",
        "Made from the capability records by `epserve compat --markdown`. What your machine can run: `epserve compat`.",
        "",
        "| prepare/finalize \\ experts | " + " | ".join(head(experts.REGISTRY, name) for name in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for pf_name in all2all.REGISTRY.names():
        cells = []
        for pair in (pair for pair in table if pair.all2all == pf_name):
            numbers = [notes.setdefault(reason, len(notes) + 1) for reason in pair.reasons]
            cells.append("yes" if pair.fits else "no " + " ".join(f"({number})" for number in numbers))
        lines.append(f"| {head(all2all.REGISTRY, pf_name)} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {reason}" for reason, number in notes.items()), "", "## The backends", ""]
    for registry in (all2all.REGISTRY, experts.REGISTRY):
        lines += [f"- `{name}`: {registry.entry(name).summary}" for name in registry.names()]
        lines.append("")
    return "\n".join(lines)
