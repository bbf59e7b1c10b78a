"""Ends calls that gRPC would keep for as long as their client likes, and keeps clients that go away out of the log.

A reply that its client does not read lies in gRPC until the client reads it, cancels the call or closes the connection. A status
waits behind it. grpc.aio has no method that resets a stream, but it resets the stream of a call without references. Two tasks
refer to a call: one runs the method, the other waits for the client's cancellation.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import grpc

try:
    from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs lack it

    _GONE: Any = cygrpc.ExecuteBatchError
except (ImportError, AttributeError):  # names inside grpcio: without them its tracebacks stay in the log
    _GONE = ()

log = logging.getLogger("epserve.server")

_OWNER = "_schedule_rpc_coro"
"""The coroutine in grpc.aio's server whose task waits for a cancellation and refers to the method's task."""
_due: set[asyncio.Task[Any]] = set()
_unknown = False
"""grpcio keeps its tasks in another way. The log has said so."""


def drop(task: asyncio.Task[Any]) -> None:
    """Resets the stream of the call whose method runs in `task`: its client sees CANCELLED, and its memory is free.

    Calls that are dropped at one time share the search for their tasks. With a grpcio that keeps its tasks in another way, the
    method ends, and what gRPC holds of the call stays until its client ends it. One line of the log says so.
    """
    if not _due:
        task.get_loop().call_soon(_sweep)
    _due.add(task)


def _sweep() -> None:
    global _unknown
    wanted = {task for task in _due if not task.done()}
    _due.clear()
    found = 0
    for owner in asyncio.all_tasks() if wanted else ():
        coroutine = owner.get_coro()
        if getattr(coroutine, "__name__", "") == _OWNER and not wanted.isdisjoint(_tasks_of(coroutine)):
            owner.cancel()
            found += 1
    for task in wanted:
        task.cancel()
    if found < len(wanted) and not _unknown:
        _unknown = True
        text = (
            "grpcio %s keeps its tasks in a way that is not known here: a call whose client does not read lasts until that"
            " client ends it, and so does its memory; install the grpcio that epserve's lock files name"
        )
        log.error(text, grpc.__version__)


def _tasks_of(coroutine: Any) -> set[asyncio.Task[Any]]:
    """Returns the tasks that a coroutine's variables hold. Compiled coroutines keep variables in an object of their own."""
    near = gc.get_referents(coroutine)
    return {each for each in (*near, *gc.get_referents(*near)) if isinstance(each, asyncio.Task)}


def quiet(record: logging.LogRecord) -> bool:
    """Filters gRPC's log: a client that goes away before it has its reply is one line, not an error with a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, _GONE):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "status=CANCELLED a client went away before its reply was sent", ()
        record.exc_info = record.exc_text = None
    return True


GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")
