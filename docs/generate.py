"""Makes the pages of the docs that come from the code: `python docs/generate.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

import contracts

from epserve.cli.compat import markdown as compatibility
from epserve.cli.config_reference import entries
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
        "`epserve serve MODEL` needs no file. MODEL is a folder of Hugging Face's layout, or `ORGANISATION/NAME` of a model",
        "that the hub's client has downloaded before. The defaults below hold, with a rank for each GPU of the machine or one",
        "on the CPU. The command prints them as YAML, and `--save-config FILE` keeps them. `epserve config --explain KEY` says",
        "what a key takes and means, and `epserve config FILE` prints a configuration with all its defaults.",
        "",
        "```yaml",
        "model: {path: checkpoints/mixtral}",
        "engine: {ranks: 4}",
        "```",
    ]
    known = list(entries())
    for section, field in Config.model_fields.items():
        about = (getattr(field.annotation, "__doc__", None) or "").strip()
        lines += ["", f"## {section}", "", *([about, ""] if about else [])]
        lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        for entry in known:
            if entry.key.startswith(f"{section}."):
                default = entry.default if entry.default == "required" else f"`{entry.default}`"
                cells = [f"`{entry.key}`", entry.kind, default, entry.meaning.replace("|", "\\|")]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def compatible() -> str:
    """The table of pairs, and the contracts that they stand on."""
    return f"{compatibility().rstrip()}\n\n{contracts.markdown()}\n"


PAGES = {"configuration.md": configuration, "compatibility.md": compatible}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = [name for name, make in PAGES.items() if (HERE / name).read_text() != make()] if check else []
    for name in stale:
        print(f"docs/{name} is not what the code says: run python docs/generate.py")
    if not check:
        for name, make in PAGES.items():
            (HERE / name).write_text(make())
    faults = contracts.faults()
    for fault in faults:
        print(fault)
    return 1 if stale or faults else 0


if __name__ == "__main__":
    sys.exit(main())
