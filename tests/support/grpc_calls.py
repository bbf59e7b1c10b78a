"""Raw gRPC calls for tests of the service: messages, frames and statuses without the client."""

import asyncio

import grpc
import pytest
import torch

from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import wire
from epserve.server.server import Server

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def encoded(x, ids=None, weights=None) -> dict:
    values = {pb.HIDDEN_STATES: x, pb.TOPK_IDS: ids, pb.TOPK_WEIGHTS: weights}
    return {which: wire.encode(value, "x") for which, value in values.items() if value is not None}


def message(x, ids=None, weights=None, layer=1, **header) -> pb.ForwardRequest:
    return wire.request_message(encoded(x, ids, weights), pb.ForwardRequest(layer=layer, **header), inline=True)


def tensor_of(reply) -> torch.Tensor:
    return wire.decode(reply.hidden_states.data, reply.hidden_states, as_torch=True)


def connect(server: Server):
    return grpc.aio.insecure_channel(server.address, options=UNLIMITED)


async def status_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


async def until(condition, timeout_s: float = 30.0) -> None:
    """Waits for a condition, far longer than a starved machine needs."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def in_thread(function, *arguments, **keywords):
    """Runs a blocking function beside the event loop. The limit only ends a hang."""
    return await asyncio.wait_for(asyncio.to_thread(function, *arguments, **keywords), 200)


class Frames:
    """A raw ForwardStream: frames out, frames in."""

    def __init__(self, channel, **call):
        self.call = pb_grpc.ExpertsStub(channel).ForwardStream(**call)

    async def send(self, number: int, x, layer=1, **header) -> None:
        for frame in wire.request_frames(number, encoded(x), pb.ForwardRequest(layer=layer, **header)):
            await self.call.write(frame)

    async def replies(self, count: int) -> dict[int, torch.Tensor | pb.Failure]:
        """Call number -> tensor or failure, in order of completion."""
        done, open_calls = {}, {}
        while len(done) < count:
            frame = await asyncio.wait_for(self.call.read(), 60)
            assert frame is not grpc.aio.EOF, "the stream ended early"
            if frame.HasField("failure"):
                done[frame.call] = frame.failure
            else:
                if frame.HasField("begin"):
                    header = frame.begin.hidden_states
                    open_calls[frame.call] = header, wire.Assembly({pb.HIDDEN_STATES: wire.num_bytes(header)})
                    open_calls[frame.call][1].add(pb.HIDDEN_STATES, header.data)
                else:
                    open_calls[frame.call][1].add(frame.part.field, frame.part.data)
                header, assembly = open_calls[frame.call]
                if assembly.done:
                    done[frame.call] = wire.decode(assembly.finish()[pb.HIDDEN_STATES], header, as_torch=True)
        return done
