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
RAY = "ray"  # NOTE: Ray opens its folder to all users (0777), so it is one in ours
SLOW_START = "timed out during startup"
START_ATTEMPTS = 3
REMOVE_S = 5.0
TOKEN_SETTINGS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def temporary_folder() -> tuple[str, str]:
    """The setting that names the folder for temporary files, and the folder. Ray looks at both settings in this order."""
    setting = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    return setting, os.environ.get(setting, "/tmp")


class OwnRay:
    """Starts a cluster on loopback in a private folder. `close()` after `ray.shutdown()` removes the folder.

    The folder holds Ray's session and, where the operator has set nothing about tokens, a token of this cluster alone.
    A process that was killed cannot remove its folder. The next start of this user does, since the lock is free then.
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
        """Ray gives its own start 30 s, a constant in its code, which a busy machine exceeds: then it is tried again.

        What an attempt leaves running goes first: Ray forgets it, and it would live as long as this process.
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
        """Blocks while Ray's last processes still write, for up to REMOVE_S."""
        if self._made_token:
            del os.environ["RAY_AUTH_TOKEN_PATH"]
            _forget_token()
        end = time.monotonic() + REMOVE_S
        while self.folder.exists() and time.monotonic() < end:
            shutil.rmtree(self.folder, ignore_errors=True)
            time.sleep(0.02)
        os.close(self._lock)

    def _make_token(self) -> None:
        """NOTE: RAY_AUTH_MODE stays as the operator has it. Unset, Ray 2.60 asks for a token on a cluster that it starts here.
        Setting it after `import ray` would be half seen and break the start. Ray itself would write a token that every user can
        read into the home folder.
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
    """Ray takes 127.0.0.1 for this node's address, as it does by default on macOS, and binds all that it opens to it.

    NOTE: `_node_ip_address="127.0.0.1"` has no effect: Ray replaces it by the address of the first interface. Ray's processes
    read the variable, this one has imported the constant.
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
    """Ray reads a token once."""
    raylet: Any = ray._raylet
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder's lock as long as this process lives."""
    made = folder / f"{LOCK}.new"
    lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    made.rename(folder / LOCK)  # NOTE: now, since `_sweep` takes a free lock for that of a process that has ended
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
