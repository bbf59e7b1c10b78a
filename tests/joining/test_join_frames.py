"""What goes over a joined front end's connection, and in which order: a large batch holds up no small one."""

import asyncio
import contextlib
import os
import socket

import pytest
import torch

from epserve.errors import DeadlineExceeded
from epserve.joining.frames import PIECE_BYTES, SMALL_TURN_BYTES, JoinError, Outbox
from epserve.joining.link import Link
from tests.support.fake_engine import FakeEngine
from tests.support.front_ends import batch, joining, ordering
from tests.support.grpc_calls import until

HIDDEN = 1024


def rows(nbytes: int) -> torch.Tensor:
    return torch.randn(nbytes // (4 * HIDDEN), HIDDEN)


def kinds(outbox: Outbox) -> list[str]:
    """What each next frame is, until there is none."""
    found = []
    while (parts := outbox.next()) is not None:
        text = bytes(parts[0])
        found.append("piece" if text.startswith(b"EPSp") else text.split(b'"kind":"')[1].split(b'"')[0].decode())
    return found


class Collector:
    """A receiver that notes what comes and, where `refuse` says so, has no room for it."""

    def __init__(self, refuse=()):
        self.refuse, self.events, self.tensors = refuse, [], {}

    def arriving(self, header, nbytes):
        self.events.append(("arriving", header["kind"]))
        return None if header["kind"] in self.refuse else bytearray

    def arrived(self, header, tensors):
        if header["kind"] != "beat":
            self.events.append(("arrived", header["kind"]))
            self.tensors[header["kind"]] = tensors

    def dropped(self, header):
        self.events.append(("dropped", header["kind"]))


@contextlib.asynccontextmanager
async def pair(collector):
    """A link to send on, and what `collector` gets from it."""
    links = [Link(each) for each in socket.socketpair()]
    for link in links:
        link._max_header = 1 << 20
    reading = asyncio.ensure_future(links[1].read(collector))
    writing = asyncio.ensure_future(links[0].write())
    try:
        yield links[0], reading
    finally:
        for task in (reading, writing):
            task.cancel()
        await asyncio.gather(reading, writing, return_exceptions=True)
        for link in links:
            link.close()


class TestOrder:
    def test_small_messages_pass_a_large_one_that_has_begun(self):
        outbox = Outbox()
        outbox.add({"kind": "large"}, [rows(4 * PIECE_BYTES)])
        assert b"large" in outbox.next()[0]
        assert bytes(outbox.next()[0]).startswith(b"EPSp")
        outbox.add({"kind": "small"}, [rows(8192)])
        outbox.add({"kind": "tiny"})
        assert kinds(outbox) == ["small", "tiny", "piece", "piece", "piece"]

    def test_large_ones_take_turns(self):
        outbox = Outbox()
        outbox.add({"kind": "longest"}, [rows(5 * PIECE_BYTES)])
        outbox.add({"kind": "long"}, [rows(2 * PIECE_BYTES)])
        assert [outbox.next() and None for _ in range(2)] == [None, None]  # both headers
        streams = [bytes(parts[0])[-1] for parts in iter(outbox.next, None)]
        assert streams == [1, 2, 1, 2, 1, 1, 1]

    def test_a_flood_of_small_ones_leaves_large_ones_their_share(self):
        outbox = Outbox()
        outbox.add({"kind": "large"}, [rows(3 * PIECE_BYTES)])
        small = rows(PIECE_BYTES // 2)
        for _ in range(100):
            outbox.add({"kind": "small"}, [small])
        found = kinds(outbox)
        first = found.index("piece")
        assert first * PIECE_BYTES // 2 <= SMALL_TURN_BYTES + PIECE_BYTES
        assert [index for index, kind in enumerate(found) if kind == "piece"][-1] < 40, "and not after all of them"

    def test_what_nobody_wants_any_more_is_not_sent(self):
        outbox = Outbox()
        large = outbox.add({"kind": "large"}, [rows(4 * PIECE_BYTES)])
        assert [outbox.next() is not None for _ in range(2)] == [True, True]
        outbox.drop(large)
        outbox.drop(large)
        assert kinds(outbox) == ["dropped"]
        assert outbox.drop(outbox.add({"kind": "small"})) is None
        assert kinds(outbox) == ["small"]


class TestLink:
    async def test_all_bytes_arrive_where_they_belong(self):
        collector, sizes = Collector(), (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7)
        sent = {
            "-".join(map(str, shape)): [torch.randint(0, 99, (size,)).int() for size in shape]
            for shape in [(size,) for size in sizes] + [(0, 3 * PIECE_BYTES, 5), (PIECE_BYTES, 0, 1, 0), (3, 2, 1)]
        }
        async with pair(collector) as (link, _):
            for kind, tensors in sent.items():
                link.send({"kind": kind}, tensors)
            await until(lambda: len(collector.tensors) == len(sent))
        for kind, tensors in sent.items():
            assert all(map(torch.equal, collector.tensors[kind], tensors)), kind

    async def test_a_small_message_arrives_before_a_large_one_that_was_sent_before_it(self):
        collector = Collector()
        async with pair(collector) as (link, _):
            link.send({"kind": "large"}, [rows(12 * PIECE_BYTES)])
            link.send({"kind": "small"}, [rows(8192)])
            await until(lambda: ("arrived", "large") in collector.events)
        assert collector.events == [
            ("arriving", "large"), ("arriving", "small"), ("arrived", "small"), ("arrived", "large"),
        ]  # fmt: skip

    async def test_a_small_message_that_comes_while_a_large_one_goes_out_does_not_wait_for_its_end(self):
        """Also over a socket that takes all that it is given, so that nothing ever waits."""
        async with pair(Collector()) as (link, _):
            sent: list[bytes] = []

            async def send(parts):
                sent.append(bytes(parts[0][:4]) if b"small" not in bytes(parts[0]) else b"small")

            link._send = send
            link.send({"kind": "large"}, [rows(8 * PIECE_BYTES)])
            while len(sent) < 2:
                await asyncio.sleep(0)
            link.send({"kind": "small"})
            await link.sent()
        assert sent[0] == b"EPS2"
        assert sent.index(b"small") <= 4
        assert sent.count(b"EPSp") == 8

    async def test_what_finds_no_room_is_passed_over_and_what_is_dropped_is_told(self):
        collector = Collector(refuse=("no room",))
        async with pair(collector) as (link, _):
            link.send({"kind": "no room"}, [rows(3 * PIECE_BYTES)])
            link.drop(link.send({"kind": "given up"}, [rows(3 * PIECE_BYTES)]))
            link.send({"kind": "good"}, [rows(3 * PIECE_BYTES)])
            await until(lambda: ("arrived", "good") in collector.events)
        assert [event for event in collector.events if event[0] != "arriving"] == [
            ("dropped", "given up"), ("arrived", "good"),
        ]  # fmt: skip

    async def test_the_end_of_a_connection_drops_what_was_arriving(self):
        collector = Collector()
        async with pair(collector) as (link, reading):
            link._outbox.add({"kind": "half"}, [rows(4 * PIECE_BYTES)])
            for _ in range(2):
                for part in link._outbox.next():
                    await asyncio.get_running_loop().sock_sendall(link._sock, part)
            link._sock.shutdown(socket.SHUT_WR)
            with pytest.raises(JoinError, match="closed"):
                await reading
        assert collector.events == [("arriving", "half"), ("dropped", "half")]

    @pytest.mark.parametrize(
        ("frame", "why"),
        [
            (b"EPSp\0\0\0\4\0\0\0\7" + bytes(4), "of no message"),
            (b"EPSp\0\0\0\4\0\0\0\1" + bytes(4) + b"EPSp\0\4\0\0\0\0\0\1" + bytes(1 << 18), "beyond|are missing"),
        ],
    )
    async def test_pieces_that_make_no_sense_end_the_connection(self, frame, why):
        collector = Collector()
        async with pair(collector) as (link, reading):
            for part in [b"EPS2\0\0\0\x3c\0\0\0\1" + b'{"kind":"a","tensors":[["int32",[65536]]]}'.ljust(60), frame]:
                await asyncio.get_running_loop().sock_sendall(link._sock, part)
            with pytest.raises(JoinError, match=why):
                await reading


class TestFrontEnds:
    async def test_large_batches_and_their_results_are_whole_and_take_room_once(self):
        engine = FakeEngine(hidden=HIDDEN)
        async with ordering(engine) as port, joining(port) as one, joining(port) as other:
            sent = [rows(size) for size in (4096, 4 * PIECE_BYTES, 8192, 7 * PIECE_BYTES, 0, 5 * PIECE_BYTES)]
            calls = [each.forward(batch(x)) for each in (one, other) for x in sent]
            answers = await asyncio.gather(*calls)
            assert all(map(torch.equal, answers, [*sent, *sent]))
            await until(lambda: port._held == 0)

    async def test_a_call_that_is_given_up_on_its_way_gives_its_room_back(self):
        engine = FakeEngine(hidden=HIDDEN)
        async with ordering(engine, f"unix:@epserve-frames-{os.getpid()}") as port, joining(port) as front_end:
            (guest,) = port._guests
            outbox = front_end._link._outbox
            following = outbox.next
            outbox.next = lambda: following() if outbox._small else None  # pieces are held back
            call = asyncio.ensure_future(front_end.forward(batch(rows(8 * PIECE_BYTES))))
            await until(lambda: port._held > 0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: port._held == 0 and not guest._arriving)
            outbox.next = following
            assert not engine.seen, "it never came as a whole"
            x = rows(8192)
            assert torch.equal(await front_end.forward(batch(x)), x)
            with pytest.raises(DeadlineExceeded):
                await front_end.forward(batch(x, deadline=0.0))
