"""Builds and loads `loop.c`, the thread that serves lanes, with the C compiler at hand. It takes a fraction of a second, once a
process, when a rank starts that may serve such lanes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from epserve.process import cuda_memory

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("loop.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC")
LIBRARIES = ("-ldl", "-lpthread")
BUILD_S = 60.0
MODES, LAYERS, PARTS, SIZES = 2, 1 << 14, 8, 32  # loop.c
NAP_AT_LAST_S = 1e-3
"""The longest nap of the thread while no bell rings. A first call takes so much longer."""
U32, U64, INT, PTR = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
ERRORS = {
    -1: "the GPU's driver cannot be opened",
    -2: "the GPU's driver lacks a call",
    -3: "a step has not ended in time",
}


class NoCompiler(Exception):
    """The thread cannot be built here. The text has the reason."""


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, U64) for name in ("x", "ids", "weights", "count", "part", "status", "out")),
        *((name, U32) for name in ("tokens", "row_bytes", "top_k", "pad")),
        ("before", U64 * MODES),
        ("after", U64 * MODES),
    )


class _Place(ctypes.Structure):
    _fields_ = (
        *(
            (name, U64)
            for name in ("page", "page_device", "rows", "slot_bytes", "x", "y", "routing_bytes", "ids", "weights")
        ),
        ("slots", U32),
        ("most", U32),
    )


class _Limits(ctypes.Structure):
    _fields_ = (
        *((name, U64) for name in ("hot_ns", "nap_ns", "longest_nap_ns", "join_ns", "stuck_ns")),
        ("join_thousandths", U32),
        ("pad", U32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How the thread waits. Times are seconds.

    Attributes:
        hot_s: it looks without pause for so long after a call, then it naps.
        nap_s: the first naps.
        join_wait_s, join_wait_share: how long a step waits for calls that would share it, as `scheduler` has it.
        stuck_s: a step that takes longer has failed.
    """

    hot_s: float
    nap_s: float
    join_wait_s: float
    join_wait_share: float
    stuck_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a lane lies. `rows` and `page_device` are addresses on the GPU, `page` one of this process.

    x and y are offsets in a slot there, ids and weights from the start of the page, in the first slot. `most`: most tokens of
    one call.
    """

    page: int
    page_device: int
    rows: int
    slot_bytes: int
    x: int
    y: int
    routing_bytes: int
    ids: int
    weights: int
    slots: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlace:
    """The addresses of a static batch on the GPU. `before` and `after`: graphs by mode, 0 for none."""

    x: int
    ids: int
    weights: int
    count: int
    part: int
    status: int
    out: int
    tokens: int
    row_bytes: int
    top_k: int
    before: tuple[int, int]
    after: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a lane has done. `refused`: bells that were out of range. `failed`: calls whose answer has a status."""

    calls: int
    tokens: int
    joined: int
    refused: int
    failed: int
    busy_ns: int


def why_not() -> str:
    """Returns why the thread cannot be built here. Empty: it can."""
    return "" if _compiler() else f"no C compiler is here ({', '.join(COMPILERS)})"


def _compiler() -> str | None:
    named = os.environ.get("CC", "").split()
    return next((found for each in (*named[:1], *COMPILERS) if (found := shutil.which(each))), None)


def build() -> None:
    """Builds the thread's library before it is needed. What fails is told when it is needed."""
    _built()


def check() -> None:
    """Raises NoCompiler where there is no library."""
    _library()


def _library() -> ctypes.CDLL:
    if isinstance(found := _built(), NoCompiler):
        raise NoCompiler(str(found))
    return found


@functools.cache
def _built() -> ctypes.CDLL | NoCompiler:
    """Builds and loads the library. Returns why not, if so."""
    try:
        return _loaded()
    except NoCompiler as error:
        log.warning("lanes on GPUs: %s", error)
        return error


def _loaded() -> ctypes.CDLL:
    compiler = _compiler()
    if compiler is None:
        raise NoCompiler(why_not())
    with tempfile.TemporaryDirectory(prefix="epserve-lanes-") as folder:
        built = Path(folder) / "loop.so"
        words = [compiler, *FLAGS, "-o", str(built), str(SOURCE), *LIBRARIES]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompiler(f"{compiler} does not run: {error}") from None
        if done.returncode:
            raise NoCompiler(f"{compiler} cannot build {SOURCE.name}: {(done.stderr.strip() or '-').splitlines()[0]}")
        library = ctypes.CDLL(str(built))
    for name, result, arguments in (
        ("loop_new", PTR, [ctypes.c_char_p, PTR, PTR, PTR, U64, ctypes.POINTER(_Limits), U32, ctypes.POINTER(INT)]),
        ("loop_start", INT, [PTR]),
        ("loop_stop", None, [PTR]),
        ("loop_free", None, [PTR]),
        ("loop_hold", None, [PTR]),
        ("loop_release", None, [PTR]),
        ("loop_drained", INT, [PTR, U64]),
        ("loop_launched", U32, [PTR]),
        ("loop_error", INT, [PTR]),
        ("loop_cpu_ns", U64, [PTR]),
        ("loop_set_batch", None, [PTR, U32, ctypes.POINTER(_Batch)]),
        ("loop_clear", None, [PTR]),
        ("loop_set_graph", INT, [PTR, U32, U32, U32, U64]),
        ("loop_open", INT, [PTR, ctypes.POINTER(_Place), PTR, ctypes.POINTER(U32)]),
        ("loop_close", None, [PTR, U32]),
        ("loop_counts", None, [PTR, U32, ctypes.POINTER(U64)]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Loop:
    """The thread. Every method may be called from any thread, and no one of them holds Python's lock while it waits."""

    def __init__(self, *, context: int, stream: int, finished: tuple[int, int], limits: Limits, num_batches: int):
        """Raises NoCompiler, or DriverError.

        Args:
            context: the GPU's context, which the thread makes its own.
            stream: the stream of the rank's steps.
            finished: the address of 32 bits in this process, 0 there, and their address on the GPU.
            limits: how it waits.
            num_batches: most static batches.
        """
        library, error = _library(), INT()
        given = _Limits(
            hot_ns=int(limits.hot_s * 1e9), nap_ns=int(limits.nap_s * 1e9), longest_nap_ns=int(NAP_AT_LAST_S * 1e9),
            join_ns=int(limits.join_wait_s * 1e9), stuck_ns=int(limits.stuck_s * 1e9),
            join_thousandths=int(limits.join_wait_share * 1000),
        )  # fmt: skip
        self._lib = library
        self._loop = library.loop_new(
            cuda_memory.DRIVER.encode(), context, stream, finished[0], finished[1], ctypes.byref(given), num_batches,
            ctypes.byref(error),
        )  # fmt: skip
        if not self._loop:
            raise cuda_memory.DriverError(ERRORS.get(error.value, str(error.value)))

    def start(self) -> None:
        """Raises OSError where the system has no thread."""
        if not self._lib.loop_start(self._loop):
            raise OSError("no thread for lanes")

    def close(self) -> None:
        """Ends the thread. Nothing may be called afterwards."""
        self._lib.loop_stop(self._loop)
        self._lib.loop_free(self._loop)

    def hold(self) -> None:
        """The thread launches nothing until `release`. A thread may hold it twice."""
        self._lib.loop_hold(self._loop)

    def release(self) -> None:
        self._lib.loop_release(self._loop)

    def drained(self, timeout_s: float) -> bool:
        """Waits until the steps that were launched have ended. Returns False when they have not in time."""
        return bool(self._lib.loop_drained(self._loop, int(timeout_s * 1e9)))

    @property
    def launched(self) -> int:
        """The number of the last step that was launched. It goes round after 32 bits."""
        return self._lib.loop_launched(self._loop)

    @property
    def error(self) -> str:
        """Why the thread has ended. Empty: it has not."""
        code = self._lib.loop_error(self._loop)
        return "" if not code else ERRORS.get(code) or f"the GPU's driver says {cuda_memory.error_name(code)}"

    @property
    def cpu_s(self) -> float:
        """Processor time of the thread, a moment old."""
        return self._lib.loop_cpu_ns(self._loop) / 1e9

    # Between `hold` and `release`.

    def set_batch(self, number: int, batch: BatchPlace) -> None:
        values = {name: getattr(batch, name) for name in BatchPlace.__slots__ if name not in ("before", "after")}
        made = _Batch(**values, before=(U64 * MODES)(*batch.before), after=(U64 * MODES)(*batch.after))
        self._lib.loop_set_batch(self._loop, number, ctypes.byref(made))

    def clear(self) -> None:
        """Forgets all graphs. Calls wait until there are some again."""
        self._lib.loop_clear(self._loop)

    def set_graph(self, layer: int, mode: int, batch: int, graph: int) -> bool:
        """Adds a graph of a layer, in ascending order of sizes. Returns False when there is no room for one more."""
        return bool(self._lib.loop_set_graph(self._loop, layer, mode, batch, graph))

    def open(self, place: Place, layers: Sequence[int], answered: Sequence[int]) -> int:
        """Serves a lane from now on. Returns its number, or -1 when there are too many.

        answered: the number of each slot's last answer. A bell with another number is a call that waits.
        """
        made = _Place(**{name: getattr(place, name) for name in Place.__slots__})
        allowed = bytearray(LAYERS)
        for layer in layers:
            allowed[layer] = 1
        given = (ctypes.c_uint8 * LAYERS).from_buffer(allowed)
        return self._lib.loop_open(
            self._loop, ctypes.byref(made), ctypes.addressof(given), (U32 * len(answered))(*answered)
        )

    def close_lane(self, lane: int) -> None:
        """Looks at the lane's page no more. The steps of its calls may still run."""
        self._lib.loop_close(self._loop, lane)

    def counts(self, lane: int) -> Counts:
        raw = (U64 * 6)()
        self._lib.loop_counts(self._loop, lane, raw)
        return Counts(**dict(zip(Counts.__slots__, raw, strict=True)))
