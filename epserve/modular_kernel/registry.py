"""Keeps a registry of backends: one name, one lazy factory. Its names are CLI choices, test parameters and table rows."""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from epserve.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[T]):
    name: str
    summary: str
    load: Callable[[], type[T]]
    """A function that imports the backend's file and returns its class. The file imports without its optional packages."""
    note: str = ""
    """A remark for the table of backends, such as that the backend is a reference or was tested without its library."""
    needs: str = ""
    """A package without which the file cannot even be imported. If it is missing, the name is not offered."""
    early: frozenset[str] = frozenset()
    """Devices on which "auto" tries this backend early: before all backends that are not early there."""
    early_far: frozenset[str] = frozenset()
    """Further devices, for ranks in several NVLink domains or on several hosts without GPUs."""
    timed: frozenset[str] = frozenset()
    """Devices on which ranks time this backend against others: pairs for "measured", experts for "auto"."""


class Registry(Generic[T]):
    """Holds the backends of one kind. `package`: the package whose modules the rows name."""

    def __init__(self, kind: str, package: str = ""):
        self.kind, self.package = kind, package
        self._entries: dict[str, Entry[T]] = {}

    def register(
        self,
        name: str,
        summary: str,
        load: str | Callable[[], type[T]],
        *,
        needs: str = "",
        note: str = "",
        early: Collection[str] = (),
        early_far: Collection[str] = (),
        timed: Collection[str] = (),
    ) -> None:
        """Adds a backend. Rows stand in order of preference.

        Args:
            summary: a few words for tables.
            load: "module:Class" in the registry's package, imported when the backend is asked for, or a function.
            needs, note: see `Entry`.
            early, early_far, timed: device types, see `Entry`.
        """
        assert name not in self._entries, f"{self.kind} {name} registered twice"
        loader = functools.partial(_imported, self.package, load) if isinstance(load, str) else load
        self._entries[name] = Entry(
            name=name, summary=summary, load=loader, needs=needs, note=note,
            early=frozenset(early), early_far=frozenset(early_far), timed=frozenset(timed),
        )  # fmt: skip

    def names(self) -> tuple[str, ...]:
        return tuple(name for name, entry in self._entries.items() if _installed(entry.needs))

    def in_order(self, device: str, *, far: bool = False) -> tuple[str, ...]:
        """Returns the order in which "auto" tries the backends on this device."""
        early = self.early(device, far=far)
        return early + tuple(name for name in self.names() if name not in early)

    def early(self, device: str, *, far: bool = False) -> tuple[str, ...]:
        """Returns the backends that "auto" tries first, in order of preference."""
        rows = map(self._entries.__getitem__, self.names())
        return tuple(row.name for row in rows if device in row.early or (far and device in row.early_far))

    def timed(self, device: str) -> tuple[str, ...]:
        """Returns the backends that ranks time against each other on this device, in order of preference."""
        return tuple(name for name in self.in_order(device) if device in self._entries[name].timed)

    def entry(self, name: str) -> Entry[T]:
        if name not in self._entries:
            close = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{self.kind} {name!r} is unknown{hint} (known: {', '.join(self._entries)})")
        entry = self._entries[name]
        if not _installed(entry.needs):
            raise ConfigError(f"{self.kind} {name!r} needs a package: pip install {entry.needs}")
        return entry

    def get(self, name: str) -> type[T]:
        return self.entry(name).load()


def _imported(package: str, place: str) -> type:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def _installed(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None
