"""Explains the configuration's keys in a user's words, for the docs' page, `epserve config` and error messages."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from epserve.config import Config
from epserve.errors import ConfigError

WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Describes one key.

    Attributes:
        key: dotted, such as `engine.ranks`.
        kind: the values that it takes, in words.
        default: as YAML, or "required".
        meaning: one or more sentences.
    """

    key: str
    kind: str
    default: str
    meaning: str


def entries() -> Iterator[Entry]:
    """Yields every key of the configuration file, section by section."""
    for section, field in Config.model_fields.items():
        model = typing.cast(type[BaseModel], field.annotation)
        for name, info in model.model_fields.items():
            default = "required" if info.is_required() else as_yaml(info.default)
            meaning = " ".join((info.description or "").split())
            kind = in_words(info.annotation, info.metadata)
            yield Entry(key=f"{section}.{name}", kind=kind, default=default, meaning=meaning)


def explain(key: str) -> str:
    """Returns the values and the meaning of a key, or of each key of a section. Raises ConfigError for an unknown key."""
    known = list(entries())
    found = [entry for entry in known if key in (entry.key, entry.key.partition(".")[0])]
    if not found:
        sections = dict.fromkeys(entry.key.partition(".")[0] for entry in known)
        tails = [entry.key for entry in known if entry.key.partition(".")[2] == key]
        close = tails or difflib.get_close_matches(key, [entry.key for entry in known], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{key!r} is no key of the configuration{hint} (sections: {', '.join(sections)})")
    return "\n\n".join(
        f"{entry.key}: {entry.kind}, default {entry.default}" + (f"\n  {entry.meaning}" if entry.meaning else "")
        for entry in found
    )


def as_yaml(value: Any) -> str:
    """Returns a value on one line of YAML."""
    plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def dump(config: Config) -> str:
    """Returns the whole configuration as YAML, defaults included: a file that means the same to `epserve serve`."""
    parts = []
    for section, values in config.model_dump(mode="json").items():
        body = (
            yaml.safe_dump(values, sort_keys=False, default_flow_style=True, width=100).rstrip().replace("\n ", "\n  ")
        )
        parts.append(f"{section}:\n  {body}\n")
    return "".join(parts)


def in_words(annotation: Any, metadata: typing.Iterable[Any] = ()) -> str:
    """Returns the values that a type takes, in a user's words.

    >>> in_words(tuple[int, ...])
    'list of whole numbers'
    """
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return in_words(inner[0], inner[1:])
    if origin in (typing.Union, types.UnionType):
        alone = [in_words(each) for each in inner if each is not type(None)]
        return _bounded(alone[-1], metadata, before=" or ".join([*alone[:-1], ""])) + (
            " or null" if type(None) in inner else ""
        )
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin is tuple:
        several = in_words(inner[0])
        head, space, rest = several.partition(" of ")
        plural = several if several.startswith("one of") else _plural(head) + space + rest
        return f"list of {plural}"
    return _bounded(WORDS.get(annotation) or str(getattr(annotation, "__name__", annotation)), metadata)


def _plural(word: str) -> str:
    first, comma, rest = word.partition(",")
    return first + ("" if first == "text" else "s") + comma + rest


def _bounded(word: str, metadata: typing.Iterable[Any], before: str = "") -> str:
    """Adds the bounds that pydantic's metadata name."""
    marks = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
    flat = [each for item in metadata for each in (item, *getattr(item, "metadata", ()))]
    bounds = [f"{text} {getattr(item, name)}" for name, text in marks for item in flat if hasattr(item, name)]
    return before + (f"{word}, {' and '.join(bounds)}" if bounds else word)
