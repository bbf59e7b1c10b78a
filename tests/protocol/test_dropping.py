"""What `epserve.protocol.dropping` takes from inside grpcio, and what is left of it without."""

import asyncio
import importlib
import logging
import sys

import grpc
import pytest

from epserve.protocol import dropping
from tests.support.grpc_calls import until

HINT = f"grpcio {grpc.__version__} has changed: look at epserve/protocol/dropping.py"


class Waiting(grpc.GenericRpcHandler):
    """A server's only method: it never returns."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task] = []

    def service(self, _):
        async def wait(request, context):
            self.tasks.append(asyncio.current_task())
            await asyncio.Event().wait()

        return grpc.unary_unary_rpc_method_handler(wait)


@pytest.fixture
async def task():
    """A task in which a method runs."""
    waiting, server = Waiting(), grpc.aio.server()
    server.add_generic_rpc_handlers([waiting])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        made = channel.unary_unary("/a/b")(b"")
        await until(lambda: waiting.tasks)
        yield waiting.tasks[0]
        made.cancel()
    await server.stop(0)


async def test_grpcio_has_the_names_that_dropping_leans_on(task):
    from grpc._cython import cygrpc

    assert issubclass(cygrpc.ExecuteBatchError, Exception), HINT
    assert dropping.GRPC_LOG.name == cygrpc.__name__, HINT
    owners = [
        each.get_coro() for each in asyncio.all_tasks() if getattr(each.get_coro(), "__name__", "") == dropping._OWNER
    ]
    assert owners, HINT
    assert [owner for owner in owners if task in dropping._tasks_of(owner)], HINT


async def test_with_another_grpcio_the_method_ends_and_one_line_says_what_stays(task, monkeypatch, caplog):
    monkeypatch.setattr(dropping, "_OWNER", "another_name")
    monkeypatch.setattr(dropping, "_unknown", False)
    others = [asyncio.create_task(asyncio.Event().wait()) for _ in range(3)]
    for each in others:
        dropping.drop(each)
        await until(each.cancelled)
    dropping.drop(task)
    await until(task.done)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "epserve.server"]
    assert f"grpcio {grpc.__version__} keeps its tasks in a way that is not known here" in line


def test_without_grpcios_inner_module_the_log_keeps_its_tracebacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc._cython.cygrpc", None)
    monkeypatch.delattr(sys.modules["grpc._cython"], "cygrpc")
    try:
        importlib.reload(dropping)
        assert dropping._GONE == ()
        error = (ValueError, ValueError("x"), None)
        record = logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, "", 1, "text", (), error)
        assert dropping.quiet(record) and record.levelno == logging.ERROR
    finally:
        monkeypatch.undo()
        importlib.reload(dropping)
