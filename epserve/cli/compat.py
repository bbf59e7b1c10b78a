"""Makes the table of `epserve compat` and of the docs: the experts that fit each prepare/finalize, and the reasons of the others.

Everything here is derived from the registries and the capability records.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from epserve import all2all, experts
from epserve.errors import ConfigError
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


def class_names(registry: Registry) -> dict[str, str]:
    """Returns the class of each backend, prepare/finalize or experts, and its name in the registry."""
    classes = {name: registry.get(name) for name in registry.names()}
    return {getattr(each, "prepare_finalize", each).__name__: name for name, each in classes.items()}


def backend_name(registry: Registry, text: str) -> str:
    """Returns the registry's name of a backend that is named so or by its class. Raises ConfigError with the closest name."""
    of_class = class_names(registry)
    if text in registry.names() or text in of_class:
        return of_class.get(text, text)
    close = difflib.get_close_matches(text, [*registry.names(), *of_class], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"{registry.kind} {text!r} is unknown{hint} (known: {', '.join(registry.names())}, and their classes)"
    )


def listing(spec: LayerSpec | None = None) -> list[str]:
    """Returns a line for each pair that fits: both names, both classes, and what this machine lacks."""
    of_name = [
        {name: each for each, name in class_names(registry).items()}
        for registry in (all2all.REGISTRY, experts.REGISTRY)
    ]
    return [
        f"{pair.all2all} + {pair.experts}  ({of_name[0][pair.all2all]} + {of_name[1][pair.experts]})"
        + (f": not here, {'; '.join(pair.missing)}" if pair.missing else "")
        for pair in pairs(spec)
        if pair.fits
    ]


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
