"""Keeps files of the working folder from being taken for modules. Standard library only.

Python puts that folder first on its path for `python -m`.
"""

import os
import sys
from pathlib import Path


def leave_out() -> None:
    """Takes the working folder off the path of imports, unless this package itself is found there."""
    here = os.path.realpath(os.getcwd())
    if Path(__file__).resolve().parents[2] != Path(here):
        sys.path[:] = [each for each in sys.path if os.path.realpath(each or os.curdir) != here]
