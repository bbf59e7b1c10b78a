"""Keeps `epserve serve` running on the head node: restarts it when it dies, and stops it on a signal.

`node.start_service` runs it as `python -m epserve.cluster.supervise FOLDER`. FOLDER holds the configuration, the log, the
ready file and `state.json`, which records the last event.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from .node import CONFIG, READY, STATE

CONFIGURATION_IS_WRONG = 2  # the exit code of `epserve` for the operator's own mistakes. Another attempt would not help
FIRST_DELAY_S, LAST_DELAY_S = 1.0, 30.0
HEALTHY_AFTER_S = 60.0  # a service that ran this long starts again with the first delay


def command(folder: Path) -> list[str]:
    serve = [sys.executable, "-m", "epserve", "serve", str(folder / CONFIG)]
    return [*serve, "--set", "cluster.address=auto", "--ready-file", str(folder / READY)]


def supervise(folder: Path, words: list[str]) -> int:
    """Runs `words` until it ends well, ends with a wrong configuration, or a signal comes. Returns its last exit code."""
    stop = threading.Event()
    running: list[subprocess.Popen[bytes]] = []

    def on_signal(number: int, _frame) -> None:
        stop.set()
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    restarts, delay, code = 0, FIRST_DELAY_S, 0
    while True:
        began = time.monotonic()
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        running[:] = [process]
        _note(folder, state="running", pid=process.pid, restarts=restarts)
        if stop.is_set():  # the signal came during the start
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        (folder / READY).unlink(missing_ok=True)
        if stop.is_set() or code in (0, CONFIGURATION_IS_WRONG):
            _note(folder, state="stopped" if stop.is_set() or code == 0 else "refused", code=code, restarts=restarts)
            return code
        delay = FIRST_DELAY_S if time.monotonic() - began > HEALTHY_AFTER_S else min(2 * delay, LAST_DELAY_S)
        restarts += 1
        print(f"supervise: the service ended with code {code}; restart {restarts} in {delay:.0f} s", flush=True)
        _note(folder, state="restarting", code=code, restarts=restarts)
        if stop.wait(delay):
            _note(folder, state="stopped", code=code, restarts=restarts)
            return code


def _note(folder: Path, **facts) -> None:
    scratch = folder / f"{STATE}.tmp"
    scratch.write_text(json.dumps({**facts, "since": time.time()}), encoding="utf-8")
    scratch.replace(folder / STATE)


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]), command(Path(sys.argv[1]))))
