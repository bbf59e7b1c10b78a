"""The life of a service process: signals end it after a drain, and a file says that it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from epserve.cluster import node
from epserve.errors import ConfigError

from . import service_manager

log = logging.getLogger(__name__)

START_STOP_S = 2.0
"""Longest wait for a start that a signal ends. A starting service has accepted nothing, so a longer wait has no use. Ray's own
start cannot be cancelled for up to half a minute."""
KILL_S = 5.0
AGAIN_S = 5.0
"""Seconds between two attempts to write the ready file."""
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)

Listen = Callable[[Callable[[], None]], None]
"""Called once everything runs. It takes the function that SIGHUP calls."""


def _nothing() -> None: ...


async def until_signalled(
    work: Callable[[Listen], Coroutine], *, own_process: bool = False, farewell: Callable[[], None] = _nothing
) -> int:
    """Runs `work` until it ends, or until SIGTERM or SIGINT cancels it. A second signal ends the process and its descendants.

    Args:
        work: the coroutine function to run.
        own_process: this process is for `work` alone. If a cancelled start does not end within START_STOP_S, the process ends.
        farewell: runs before the process is ended that way, since other clean-up then does not run.

    Returns:
        The process's exit code: 0, or 128 + the signal's number when the signal came before `work` called `listen`.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    ready, code = False, 0

    # NOTE: the loop's own handlers would not do, since the loop itself may be stuck.
    def on_signal(number: int, frame: Any) -> None:
        nonlocal code
        arm(partial(_at_once, farewell))
        code = 0 if ready else 128 + number
        if own_process and not ready:
            _Watchdog(number, farewell).start()
        loop.call_soon_threadsafe(cancel, signal.Signals(number).name)

    def cancel(name: str) -> None:
        rest = "draining; send it again to stop at once" if ready else "stopping before every rank was ready"
        log.info("%s: %s", name, rest)
        stop.set()

    def listen(reload: Callable[[], None]) -> None:
        nonlocal ready
        ready = True
        if not stop.is_set():
            arm(on_signal)  # again: Ray's start may have put handlers of its own in between
        loop.add_signal_handler(signal.SIGHUP, reload)

    arm(on_signal)
    try:
        await _until(stop, work(listen))
    except Exception:
        if ready or not stop.is_set():
            raise
        log.debug("the start that was given up ended with an error", exc_info=True)
    finally:
        # After a signal the handler stays for a second one: Python still waits for threads that cannot be cancelled.
        if not stop.is_set():
            for each, handler in before.items():
                signal.signal(each, handler)
    return code


def arm(handler: Callable[[int, Any], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


class _Watchdog(threading.Timer):
    """Ends the process when it has not ended by itself."""

    def __init__(self, number: int, farewell: Callable[[], None]):
        super().__init__(START_STOP_S, end_all, (number, farewell))
        self.daemon = True


def _at_once(farewell: Callable[[], None], number: int, frame: Any) -> None:
    log.warning("%s again: stopping at once", signal.Signals(number).name)
    end_all(number, farewell)


def end_all(number: int, farewell: Callable[[], None] = _nothing) -> None:
    """Ends this process as the signal would, and all its descendants.

    The descendants are Ray's processes and the ranks that this process started. Some would otherwise live another minute.
    NOTE: Python's and Ray's own exit hooks do not run. They wait ten seconds for a start that is under way.
    """
    _say_no_more()
    # Linux only: a process that loses its parent becomes a child of this one, and is found.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    deadline = time.monotonic() + KILL_S
    # The loop repeats, since some processes were just being started.
    while (left := node.descendants({os.getpid()})) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # at SIGTERM some would print a farewell
        time.sleep(0.02)
    try:
        farewell()
    finally:
        os._exit(128 + number)


def _say_no_more() -> None:
    """Silences logs and tracebacks. Errors of a start whose processes are being killed mean nothing."""
    logging.disable()
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def claim(ready_file: Path) -> None:
    """Removes the file of a killed service. Raises ConfigError now rather than when every rank has loaded."""
    try:
        ready_file.unlink(missing_ok=True)
        scratch = ready_file.with_suffix(".tmp")
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise ConfigError(f"ready file {ready_file} cannot be written: {error.strerror}") from None


@contextmanager
def write_ready(ready_file: Path | None, facts: Mapping[str, Any]) -> Iterator[None]:
    """Tells the service manager, and keeps the complete file in place while the block runs.

    If the file cannot be written (a full disk), the block runs all the same and a thread tries again.
    """
    service_manager.notify(service_manager.READY, f"STATUS=serving on port {facts.get('port')}")
    with _file_there(ready_file, facts) if ready_file is not None else contextlib.nullcontext():
        try:
            yield
        finally:
            service_manager.notify(service_manager.STOPPING, "STATUS=finishing accepted calls")


@contextmanager
def _file_there(ready_file: Path, facts: Mapping[str, Any]) -> Iterator[None]:
    over = threading.Event()
    trying = None
    if error := _written(ready_file, facts):
        log.error(
            "ready file %s cannot be written: %s; the service goes on and tries again every %g s",
            ready_file,
            error,
            AGAIN_S,
        )
        trying = threading.Thread(target=_write_later, args=(ready_file, facts, over), daemon=True)
        trying.start()
    try:
        yield
    finally:
        over.set()
        if trying is not None:
            trying.join()
        with contextlib.suppress(OSError):
            ready_file.unlink(missing_ok=True)


def _written(ready_file: Path, facts: Mapping[str, Any]) -> str:
    """Writes the file. Returns the reason of a failure, or an empty string."""
    scratch = ready_file.with_suffix(".tmp")
    try:
        scratch.write_text(json.dumps(facts), encoding="utf-8")
        scratch.replace(ready_file)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        return error.strerror or str(error)
    return ""


def _write_later(ready_file: Path, facts: Mapping[str, Any], over: threading.Event) -> None:
    while not over.wait(AGAIN_S):
        if not _written(ready_file, facts):
            log.info("ready file %s is written", ready_file)
            return


async def _until(stop: asyncio.Event, work: Coroutine) -> None:
    """Runs `work`. When `stop` is set first (the ranks may still be loading), cancels `work` and lets it clean up."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        await task
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        stopping.cancel()
