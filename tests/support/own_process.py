"""Check files in a process of their own: Triton's interpreter, and the stand-in for a GPU's driver, are chosen before Triton
is imported, and hold for the whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "python_files=check_*.py"]


def run_checks(*arguments: str, timeout: float = 900, **env: str) -> str:
    """Run pytest with `arguments`, a file below tests/ first. Fails unless all pass and some do; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *PYTEST, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True, text=True, timeout=timeout)  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
