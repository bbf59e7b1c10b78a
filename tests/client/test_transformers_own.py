"""transformers' own model tests with remote experts: `ModelTesterMixin` of its source distribution, for four families.

The distribution has the mixin, not the classes and the generation tests of each model. So the four classes are in
`tests/client/transformers_own/check_families.py`; generation is compared by tests/client/test_transformers_ways.py.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers

from .transformers_own.excluded import EXCLUDED

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LEAST = 100  # passed tests that called remote experts, all families together
STUBS = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}
"""Modules of the mixin's that the distribution lacks, and the class that each defines."""


@pytest.fixture(scope="module")
def mixin(tmp_path_factory):
    """A folder with the package `transformers_tests`: the tests of the installed version, from the package index."""
    folder = tmp_path_factory.mktemp("distribution")
    wanted = f"transformers=={transformers.__version__}"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--no-binary", "transformers", "-d", str(folder), wanted]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    package = folder / "transformers_tests"
    with tarfile.open(next(folder.glob("transformers-*.tar.gz"))) as archive:
        prefix = f"transformers-{transformers.__version__}/tests/"
        for member in archive.getmembers():
            if member.isfile() and member.name.startswith(prefix) and member.name.endswith(".py"):
                target = package / member.name.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.extractfile(member).read())
    for name, cls in STUBS.items():
        module = package / name
        module.parent.mkdir(parents=True, exist_ok=True)
        if not module.exists():
            module.write_text(f"class {cls}:\n    pass\n")
    for each in (package, *(path for path in package.rglob("*") if path.is_dir())):
        (each / "__init__.py").touch()
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_transformers_own_tests_pass_with_remote_experts(mixin, tmp_path):
    results = tmp_path / "results.json"
    environment = os.environ | {
        "PYTHONPATH": f"{mixin}{os.pathsep}{ROOT}",
        "EPSERVE_OWN_RESULTS": str(results),
        "HF_HUB_OFFLINE": "1",
    }
    plugin = ["-p", "tests.client.transformers_own.remote_experts", "-o", "addopts=", "-o", "timeout=300"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        *plugin,
        str(HERE / "transformers_own" / "check_families.py"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1150, check=False, env=environment, cwd=ROOT)
    assert results.exists(), run.stdout + run.stderr
    found = json.loads(results.read_text())
    failed = {name: told for name, (outcome, _, told) in found.items() if outcome == "failed"}
    assert not failed, "\n".join(f"{name}: {told}" for name, told in failed.items())
    remote = [name for name, (outcome, calls, _) in found.items() if outcome == "passed" and calls]
    print(f"{len(remote)} of {len(found)} tests called remote experts and passed")
    assert len(remote) >= LEAST
    assert {name.split("::")[0] for name in remote} == {"MixtralTest", "Qwen3MoeTest", "DeepseekV3Test", "GptOssTest"}
    ran = {name.split("::")[1] for name in found}
    assert not ran & EXCLUDED.keys()
