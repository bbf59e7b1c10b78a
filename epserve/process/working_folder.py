"""Keeps files of the working folder from being taken for modules. Standard library only.

Python puts that folder first on its path for `python -m` and `python -c`, and Ray puts it on the ranks' path.
"""

import os
import sys

SAFE_PATH = "PYTHONSAFEPATH"


def leave_out() -> None:
    """Takes the working folder off the path of imports, here and in all processes that this one starts.

    It stays if this package itself is found there.
    """
    here = os.path.realpath(os.getcwd())
    if os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)) != here:
        sys.path[:] = [each for each in sys.path if os.path.realpath(each or os.curdir) != here]
        os.environ[SAFE_PATH] = "1"


def is_left_out() -> bool:
    return bool(os.environ.get(SAFE_PATH))
