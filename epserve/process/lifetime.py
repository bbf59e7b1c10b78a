"""How a process of the service lives: signals that end it after a drain, and the file that says that it is ready."""

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
"""Nothing has been accepted during a start, so that nothing is worth a longer wait: Ray's own start cannot be broken off for up
to half a minute."""
KILL_S = 5.0
AGAIN_S = 5.0
"""Between two attempts to write the ready file."""
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)

Listen = Callable[[Callable[[], None]], None]
"""Once everything runs: takes what SIGHUP is to do."""


def _nothing() -> None: ...


async def until_signalled(
    work: Callable[[Listen], Coroutine], *, own_process: bool = False, farewell: Callable[[], None] = _nothing
) -> int:
    """Run `work` until it ends, or until SIGTERM or SIGINT cancel it; a second one ends the process and all it started.

    Returns the process's exit code: 0, or 128 + the signal's number where that came before `work` called `listen`.
    own_process: this process is for `work` alone. A start that does not end within START_STOP_S is then ended with the process.
    farewell: what is to be done where the process is ended so, without the clean-up of whoever runs in it.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    ready, code = False, 0

    # NOTE: not by the loop's own handlers: the loop may be what is stuck.
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
        # After a signal the handler of a second one stays: Python still waits for threads that cannot be cancelled.
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
    """This process as by the signal, and all that it started.

    Ray's processes and the ranks are ours where we started them; left alone, some would live for another minute.
    NOTE: no clean-up by Python's or Ray's own hooks, which wait ten seconds for a start that is under way.
    """
    _say_no_more()
    # Linux only: what loses its parent becomes our child, and is found.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    deadline = time.monotonic() + KILL_S
    # Again and again: some were just being started.
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
    """Errors of a start whose processes are being killed mean nothing, and other threads would print them as tracebacks."""
    logging.disable()
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def claim(ready_file: Path) -> None:
    """Removes what a killed service left; raises ConfigError now rather than when every rank has loaded."""
    try:
        ready_file.unlink(missing_ok=True)
        scratch = ready_file.with_suffix(".tmp")
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise ConfigError(f"ready file {ready_file} cannot be written: {error.strerror}") from None


@contextmanager
def write_ready(ready_file: Path | None, facts: Mapping[str, Any]) -> Iterator[None]:
    """The service manager is told, and the file is there, whole, while the block runs.

    Where it cannot be written, as on a full disk, the block runs all the same and the file is tried again.
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
    """Why the file could not be written; empty: it is there."""
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
    """Run `work`; when `stop` comes first (the ranks may still be loading), cancel it and let it clean up."""
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
