"""Generates the stubs of `epserve.proto`, `admin.proto` and `inference.proto`: `python -m epserve.protocol.generate [--check]`.

--check writes nothing and fails when the committed stubs differ from what would be generated.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PROTOS = ("epserve.proto", "admin.proto", "inference.proto")
STUBS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
GRPC_FLOOR = "1.80.0"
"""The oldest grpcio with every function that the stubs call. The generator would demand its own, too new for many GPU images."""


def generate() -> dict[str, str]:
    """Returns file name -> contents. It needs grpcio-tools, and raises RuntimeError when the proto does not compile."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-I{HERE}", *outputs, *(str(HERE / proto) for proto in PROTOS)]) != 0:
            raise RuntimeError(f"{', '.join(PROTOS)}: one does not compile; protoc said why above")
        names = [proto.removesuffix(".proto") + ending for proto in PROTOS for ending in STUBS]
        made = {name: (Path(folder) / name).read_text(encoding="utf-8") for name in names}
    return {name: _adapt(text) if name.endswith("_grpc.py") else text for name, text in made.items()}


def _adapt(text: str) -> str:
    """Makes the stubs import the messages from their package, and require GRPC_FLOOR rather than the generator's own version."""
    text, imports = re.subn(r"^import (\w+_pb2) as", r"from epserve.protocol import \1 as", text, flags=re.M)
    text, floors = re.subn(
        r"^GRPC_GENERATED_VERSION = .*$", f"GRPC_GENERATED_VERSION = '{GRPC_FLOOR}'", text, flags=re.M
    )
    assert imports == floors == 1, "the generator's output has changed its form"
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the committed stubs are stale")
    check = parser.parse_args(argv).check
    stale = []
    for name, text in generate().items():
        path = HERE / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text, encoding="utf-8")
    if stale and check:
        print(f"stale: {', '.join(stale)}; run `python -m epserve.protocol.generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
