"""Counts what Triton compiles, so that a compile on the request path is seen: in `GetStatus`, in the metrics and in tests."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager

import triton

LOG = logging.getLogger("epserve.experts")


class CompileCounter:
    """Counts kernel variants that were not in memory when asked for: warm-up before `ready()`, late after it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.warm: dict[str, int] = {}
        self.late: dict[str, int] = {}
        self._seen: set = set()
        self.is_ready = False
        self.num_tried = 0
        """Variants that were compiled only to be timed."""
        self._trying = False
        self._before = None

    def install(self) -> None:
        """Chains the counter behind the installed hook. Idempotent."""
        if triton.knobs.runtime.jit_cache_hook != self._hook:
            self._before = triton.knobs.runtime.jit_cache_hook
            triton.knobs.runtime.jit_cache_hook = self._hook

    def remove(self) -> None:
        if triton.knobs.runtime.jit_cache_hook == self._hook:
            triton.knobs.runtime.jit_cache_hook = self._before

    def ready(self) -> None:
        """Ends warm-up. Later compiles are counted as late and logged."""
        self.is_ready = True

    @contextmanager
    def warming(self):
        """Compiles inside this block are warm-up even after `ready()`: a layer that is loaded later."""
        was, self.is_ready = self.is_ready, False
        try:
            yield
        finally:
            self.is_ready = was

    @contextmanager
    def trying(self):
        """Compiles inside this block are candidates' that are timed against each other: neither warm nor late."""
        self.install()
        was, self._trying = self._trying, True
        try:
            yield
        finally:
            self._trying = was

    @property
    def num_warm(self) -> int:
        return sum(self.warm.values())

    @property
    def num_late(self) -> int:
        return sum(self.late.values())

    def _hook(self, *, fn, key, **other):
        if self._trying:
            self.num_tried += 1
            return self._before(fn=fn, key=key, **other) if self._before is not None else None
        with self._lock:
            counts = self.late if self.is_ready else self.warm
            if (
                self.is_ready or (fn.name, key) not in self._seen
            ):  # a parallel warm-up asks again before the first is done
                counts[fn.name] = counts.get(fn.name, 0) + 1
            self._seen.add((fn.name, key))
        if self.is_ready:
            LOG.warning("kernel %s is compiled on the request path: a variant that warm-up missed", fn.name)
        return self._before(fn=fn, key=key, **other) if self._before is not None else None


COUNTER = CompileCounter()
"""The process's counter: hooks are global in Triton. `install()` by the experts that need it, at warm-up."""
