"""A Ray cluster of this process's own: it listens on loopback, only this user reads its files, and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from epserve.cluster import node
from epserve.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX = "epserve-"
LOCK = "lock"
RAY = "ray"  # NOTE: Ray opens its folder to all users (0777), so it lies in a private one
SLOW_START = "timed out during startup"
START_ATTEMPTS = 3
REMOVE_S = 5.0
TOKEN_SETTINGS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def temporary_folder() -> tuple[str, str]:
    """Returns the setting that names the folder for temporary files, and the folder. Ray reads both settings in this order."""
    setting = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    return setting, os.environ.get(setting, "/tmp")


class OwnRay:
    """Starts a cluster on loopback in a private folder. `close()` after `ray.shutdown()` removes the folder.

    The folder holds Ray's session, and a token of this cluster alone unless the operator's settings name tokens. A process that
    was killed cannot remove its folder. The next start of this user does, since the lock is free then.
    """

    def __init__(self) -> None:
        setting, parent = temporary_folder()
        try:
            _sweep(parent)
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
            self._lock = _locked(self.folder)
        except OSError as error:
            raise ConfigError(
                f"{setting} {parent}: Ray's files find no place there ({error.strerror}); set RAY_TMPDIR to a folder that"
                " this user may write to"
            ) from None
        self._made_token = False

    def start(self, **options: Any) -> None:
        """Starts Ray, again if it was too slow. Ray's code gives its start 30 s, which a busy machine exceeds.

        Processes of a failed attempt are ended first. Ray forgets them, and they would live as long as this process.
        """
        self._make_token()
        for attempt in range(1, START_ATTEMPTS + 1):
            before = node.descendants({os.getpid()})
            try:
                with on_loopback():
                    ray.init(address="local", _temp_dir=str(self.folder / RAY), **options)
                return
            except Exception as error:  # Ray raises a plain Exception here
                if SLOW_START not in str(error) or attempt == START_ATTEMPTS:
                    raise
            log.warning("Ray took longer to start than it gives itself; starting it again")
            ray.shutdown()
            node.end(node.descendants({os.getpid()}) - before, 1.0)

    def close(self) -> None:
        """Removes the folder. Blocks while Ray's last processes still write, for up to REMOVE_S seconds.

        A signal in the middle of an end ends it again, in another thread.
        """
        if self._made_token:
            os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
            _forget_token()
        end = time.monotonic() + REMOVE_S
        while self.folder.exists() and time.monotonic() < end:
            shutil.rmtree(self.folder, ignore_errors=True)
            time.sleep(0.02)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _make_token(self) -> None:
        """Makes a token that this user alone can read. Ray itself would write one that every user can read into the home folder.

        NOTE: RAY_AUTH_MODE stays as the operator has it. When it is unset, Ray 2.60 asks for a token on a cluster that it starts
        here. Only a part of Ray would see it if it were set after `import ray`, and the start would fail.
        """
        if any(map(os.environ.get, TOKEN_SETTINGS)) or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
            return
        path = self.folder / "auth_token"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
        self._made_token = True
        _forget_token()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Makes Ray take 127.0.0.1 for this node's address, as it does by default on macOS, and bind all its sockets to it.

    NOTE: `_node_ip_address="127.0.0.1"` has no effect, since Ray replaces it by the address of the first interface. Ray's
    processes read the variable, and this process has imported the constant.
    """
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, was = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _forget_token() -> None:
    """Makes Ray read the token again. It reads a token only once."""
    raylet: Any = ray._raylet
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _locked(folder: Path) -> int:
    """Returns a descriptor that holds the folder's lock as long as this process lives."""
    made = folder / f"{LOCK}.new"
    lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    made.rename(folder / LOCK)  # NOTE: not before, since `_sweep` takes a free lock for that of an ended process
    return lock


def _sweep(parent: str) -> None:
    """Removes folders of this user's processes that were killed."""
    for folder in Path(parent).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or it is going away
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
