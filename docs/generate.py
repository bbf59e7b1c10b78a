"""Makes the pages of the docs that come from the code: `python docs/generate.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel

from epserve.compat import markdown as compatibility
from epserve.config import Config

HERE = Path(__file__).parent


def configuration() -> str:
    """Every key of the configuration file, with type, default and meaning."""
    lines = [
        "# Configuration",
        "",
        "`epserve serve CONFIG` reads one YAML file. Only `model.path` is required; unknown keys are errors. Any key can be",
        "overridden: `epserve serve c.yaml --set engine.ranks=8 --set server.port=0`. Relative paths start at the directory that",
        "the command runs in, not at the file.",
        "",
        "```yaml",
        "model: {path: checkpoints/mixtral}",
        "engine: {ranks: 4}",
        "```",
    ]
    for section, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        lines += ["", f"## {section}", "", *_about(model), "| key | type | default | meaning |", "|---|---|---|---|"]
        for key, entry in model.model_fields.items():
            default = "required" if entry.is_required() else f"`{entry.default}`"
            meaning = " ".join((entry.description or "").split()).replace("|", "\\|")
            kind = _type_name(entry.annotation).replace("|", "\\|")
            lines.append(f"| `{section}.{key}` | {kind} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _about(model: type[BaseModel]) -> list[str]:
    text = (model.__doc__ or "").strip()
    return [text, ""] if text else []


def _type_name(annotation) -> str:
    text = getattr(annotation, "__name__", str(annotation)) if "[" not in str(annotation) else str(annotation)
    return text.replace("typing.", "").replace("pathlib.", "").replace("NoneType", "none")


PAGES = {"configuration.md": configuration, "compatibility.md": lambda: compatibility().rstrip() + "\n"}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = [name for name, make in PAGES.items() if (HERE / name).read_text() != make()] if check else []
    for name in stale:
        print(f"docs/{name} is not what the code says: run python docs/generate.py")
    if not check:
        for name, make in PAGES.items():
            (HERE / name).write_text(make())
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
