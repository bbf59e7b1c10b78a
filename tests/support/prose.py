"""Counts marks of English that is hard to read in comments, docstrings and Markdown, for each 1,000 words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MARKS = {
    "a clause as a noun": (
        r"(?i)\b(whoever|whatever|what (is|it|they|was|lies|came|stays)|who (is|has|was|calls|holds))\b",
        1.0,
    ),
    "a person for a thing": (r"(?i)\b(whoever|nobody|somebody|such (a )?ones?|the former|the latter)\b", 0.2),
    "a sentence without its subject first": (r"(?:^|[.:;] )(Of|As|From|Where|That|Whose) ", 2.0),
    "a semicolon": (r";", 4.0),
}
"""Mark -> its pattern, and the most of it in 1,000 words."""


@dataclass(frozen=True, slots=True)
class Found:
    mark: str
    rate: float
    most: float
    lines: tuple[str, ...]


def pieces(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line number and text of each comment and docstring, or of each line of prose in Markdown."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"```.*?```", lambda code: "\n" * code.group().count("\n"), text, flags=re.DOTALL)
        lines = enumerate(text.splitlines(), 1)
        yield from ((number, line) for number, line in lines if line and not line.startswith(("|", "    ", "#", "!")))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, " ".join(node.value.value.split())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def above_limit(paths: Iterable[Path]) -> list[Found]:
    """Returns the marks that stand more often than their limit allows, each with its lines."""
    found = [(f"{path}:{line} {text}", text) for path in paths for line, text in pieces(path)]
    words = max(1, sum(len(text.split()) for _, text in found))
    results = []
    for mark, (pattern, most) in MARKS.items():
        count = sum(len(re.findall(pattern, text)) for _, text in found)
        if 1000 * count / words > most:
            lines = tuple(line for line, text in found if re.search(pattern, text))
            results.append(Found(mark, 1000 * count / words, most, lines))
    return results
