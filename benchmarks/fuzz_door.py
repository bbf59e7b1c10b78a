"""Fuzzes a running server: `python -m benchmarks.fuzz_door [--cases 10000] [--seed 1] [--json FILE]`.

Hypothesis draws messages for every method that the server has (requests, streams, regions, the Open Inference Protocol,
administration, reflection, health), by the fields of their types: some nearly right, some anything, some with their bytes
changed. They go over a real connection to a real server whose engine answers with its input. Every call must end within its
time, with an answer or with a status that tells the side at fault. Afterwards a good call must be right, and nothing may be left
in flight. Every fifth case also comes over a connection that stops in the middle of messages and reads no reply. Hypothesis
shrinks and reports every other outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import logging
import os
import platform
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import hypothesis
import torch
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import reports
from epserve.config import ServerConfig
from epserve.engine.face import EngineFace
from epserve.engine.planning import Answer, Batch
from epserve.errors import ConfigError, NotReady
from epserve.modular_kernel import GateSpec
from epserve.protocol import admin_pb2 as admin
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import wire
from epserve.server import reflection
from epserve.server.server import Server
from tests.server.raw_http2 import RawConnection
from tests.support.fake_engine import tiny_info

HIDDEN, TOP_K, EXPERTS, LAYERS = 32, 3, 8, (0, 3)
CALL_S = 20.0
"""A call that takes longer hangs."""
TYPED = {
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION", "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "UNIMPLEMENTED",
}  # fmt: skip
"""DEADLINE_EXCEEDED counts for a timeout in the message. For the call's own deadline it counts as a hang."""
SERVICES = (
    (pb.DESCRIPTOR, "Experts", 12), (kserve.DESCRIPTOR, "GRPCInferenceService", 8), (admin.DESCRIPTOR, "Admin", 2),
    (reflection_pb2.DESCRIPTOR, "ServerReflection", 1), (reflection.describe_v1(), "ServerReflection", 1),
    (health_pb2.DESCRIPTOR, "Health", 1),
)  # fmt: skip
"""With how often each is called, relatively."""
_F = FieldDescriptor
WHOLE = {
    _F.TYPE_INT32: (32, False), _F.TYPE_SINT32: (32, False), _F.TYPE_SFIXED32: (32, False), _F.TYPE_UINT32: (32, True),
    _F.TYPE_FIXED32: (32, True), _F.TYPE_INT64: (64, False), _F.TYPE_SINT64: (64, False), _F.TYPE_SFIXED64: (64, False),
    _F.TYPE_UINT64: (64, True), _F.TYPE_FIXED64: (64, True),
}  # fmt: skip
"""Integer types: bits, and whether there is no sign."""


class Echo(EngineFace):
    """Is an engine that answers with its input and refuses changes."""

    def __init__(self) -> None:
        super().__init__()
        self.info = tiny_info(
            family="fuzzed", name="fuzzed", hidden=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, layers=LAYERS,
            gate=GateSpec(top_k=TOP_K),
        )  # fmt: skip

    @property
    def layers(self) -> tuple[int, ...]:
        return LAYERS

    async def answer(self, batch: Batch) -> Answer:
        assert batch.hidden.shape[1] == HIDDEN
        assert torch.isfinite(batch.hidden).all()
        assert batch.ids is None or (int(batch.ids.min()) >= -1 and int(batch.ids.max()) < EXPERTS)
        return Answer(out_MK=batch.hidden)

    async def rebalance(self, explain: bool = False) -> Any:
        raise NotReady("nothing to balance")

    async def scale(self, ranks: int) -> Any:
        raise ConfigError(f"{ranks} ranks: this service cannot change")

    def state(self) -> str:
        return "serving"

    def status(self) -> Any:
        return SimpleNamespace(
            state="serving", generation=1, steps=0, ranks=(), queue_tokens=0, backends="none", recoveries=0,
            replayed_requests=0, expert_tokens={}, slots={}, spares=0, rebalances=0, rebalances_skipped=0, front_ends=0,
            missing_experts={},
        )  # fmt: skip


# Strategies: any value of a field, with those preferred that get far.

NEAR = {
    "layer": [0, 3, 1, -1], "timeout_ms": [0, 0, 1, 1000], "call": [0, 1, 1, 2], "request_id": ["", "r", "a b"],
    "model_name": ["layer-0", "layer-3", "layer-1", ""], "name": ["hidden_states", "topk_ids", "topk_weights", "mine", "layer-0"],
    "datatype": ["FP32", "BF16", "INT32", "INT64", "BYTES"], "key": ["/mine", "epserve-x", "..", ""],
    "version": ["", "1"], "model_version": ["", "1"], "region": ["region", ""], "byte_size": [0, 128, 256, 2**63],
    "offset": [0, 1, 128, 2**63], "ranks": [0, 1, 4], "service": ["", "epserve.v1.Experts", "x"],
    "list_services": [""], "file_containing_symbol": ["epserve.v1.Experts", "x"], "id": ["", "r"],
}  # fmt: skip


def field_values(field: FieldDescriptor, depth: int) -> st.SearchStrategy:
    kind = field.type
    if kind == field.TYPE_MESSAGE:
        return messages(field.message_type, depth - 1)
    if kind == field.TYPE_ENUM:
        return st.one_of(st.sampled_from([each.number for each in field.enum_type.values]), st.integers(-2, 99))
    if kind == field.TYPE_BOOL:
        anything: st.SearchStrategy = st.booleans()
    elif kind in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        anything = st.floats(width=32)
    elif kind == field.TYPE_STRING:
        anything = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    elif kind == field.TYPE_BYTES:
        anything = st.binary(max_size=300)
    else:
        bits, unsigned = WHOLE[kind]
        anything = st.integers(0 if unsigned else -(2 ** (bits - 1)), 2 ** (bits if unsigned else bits - 1) - 1)
    near = [value for value in NEAR.get(field.name, ()) if isinstance(value, str) == (kind == field.TYPE_STRING)]
    return st.one_of(st.sampled_from(near), anything) if near else anything


@st.composite
def messages(draw: Any, descriptor: Descriptor, depth: int = 4) -> Any:
    if descriptor is pb.Tensor.DESCRIPTOR and draw(st.integers(0, 3)):
        return draw(tensors())
    if descriptor is kserve.ModelInferRequest.DESCRIPTOR and draw(st.integers(0, 3)):
        return draw(inferences())
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if depth <= 0 and field.type == field.TYPE_MESSAGE:
            continue
        if not draw(st.integers(0, 2)):
            continue
        set_field(draw, message, field, depth)
    return message


def set_field(draw: Any, message: Any, field: FieldDescriptor, depth: int) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        name = (
            draw(st.one_of(st.sampled_from(PARAMETERS), field_values(key, depth))) if key.type == key.TYPE_STRING else 1
        )
        if value.type == value.TYPE_MESSAGE:
            target[name].CopyFrom(draw(field_values(value, depth)))
        else:
            target[name] = draw(field_values(value, depth))
    elif field.is_repeated:
        target.extend(draw(st.lists(field_values(field, depth), max_size=3)))
    elif field.type == field.TYPE_MESSAGE:
        target.CopyFrom(draw(field_values(field, depth)))
    else:
        setattr(message, field.name, draw(field_values(field, depth)))


PARAMETERS = (
    "timeout", "priority", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "classification",
)  # fmt: skip


@st.composite
def tensors(draw: Any) -> pb.Tensor:
    """Draws tensors. Most of them have the bytes of their size."""
    dtype = draw(st.sampled_from([pb.FP32, pb.BF16, pb.INT32, pb.INT64, pb.FP8_E4M3]))
    shape = [
        draw(st.sampled_from([0, 1, 2, 2, 5, 2**40, -1])),
        draw(st.sampled_from([HIDDEN, HIDDEN, TOP_K, 1, 2**40])),
    ]
    size = shape[0] * shape[1] * wire.ITEM_BYTES[dtype]
    size = draw(st.sampled_from([max(min(size, 4096), 0), 7])) if draw(st.booleans()) else max(min(size, 4096), 0)
    fill = draw(st.sampled_from([b"\0", b"\1\0\0\0", b"\xff", b"\0\0\x80\x7f"]))
    return pb.Tensor(dtype=dtype, shape=shape, data=(fill * (size // len(fill) + 1))[:size])


@st.composite
def inferences(draw: Any) -> kserve.ModelInferRequest:
    tensor = kserve.ModelInferRequest.InferInputTensor
    rows = draw(st.integers(0, 4))
    inputs, raw = [tensor(name="hidden_states", datatype="FP32", shape=[rows, HIDDEN])], [bytes(rows * HIDDEN * 4)]
    if draw(st.booleans()):
        width, value = draw(st.integers(0, TOP_K + 1)), draw(st.integers(-2, EXPERTS))
        inputs.append(tensor(name="topk_ids", datatype="INT32", shape=[rows, width]))
        raw.append(value.to_bytes(4, "little", signed=True) * rows * width)
        inputs.append(tensor(name="topk_weights", datatype="FP32", shape=[rows, width]))
        raw.append(bytes(4) * rows * width)
    request = kserve.ModelInferRequest(
        model_name=draw(st.sampled_from(["layer-0", "layer-3", "layer-9"])), inputs=inputs
    )
    request.raw_input_contents.extend(raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw)
    return request


@st.composite
def payloads(draw: Any, descriptor: Descriptor) -> bytes:
    """One message's bytes, of which some are other ones now and then."""
    payload = bytearray(draw(messages(descriptor)).SerializePartialToString())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3])) if payload else 0):
        payload[draw(st.integers(0, len(payload) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.sampled_from([None, None, None, 1]))
    return bytes(payload) if cut is None or not payload else bytes(payload[: draw(st.integers(0, len(payload)))])


def methods() -> list[Any]:
    found: list[Any] = []
    for file, name, weight in SERVICES:
        service: ServiceDescriptor = file.services_by_name[name]
        each = max(1, weight // len(service.methods))
        found += list(service.methods) * each
        found += [m for m in service.methods if m.name in ("Forward", "ForwardStream", "ModelInfer")] * weight
    return found


@st.composite
def cases(draw: Any) -> tuple[Any, list[bytes]]:
    method = draw(st.sampled_from(METHODS))
    count = draw(st.integers(0, 6)) if method.client_streaming else 1
    return method, [draw(payloads(method.input_type)) for _ in range(count)]


METHODS = methods()


class Target:
    """The server and a channel, in a loop of their own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server: Server = self.run(self._start())
        self.x = torch.randn(2, HIDDEN)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(CALL_S * 2)

    async def _start(self) -> Server:
        engine: Any = Echo()
        limits = ServerConfig(port=0, max_tokens_per_request=64, max_message_bytes=1 << 20, max_priority="high")
        server = Server(engine, limits, default_deadline_s=5)
        await server.start()
        self.channel = grpc.aio.insecure_channel(server.address)
        self.caller = grpc.insecure_channel(server.address)
        return server

    def call(self, method: Any, requests: list[bytes]) -> list[str]:
        """Returns status names: the call's, and each failure's of a ForwardStream. Raises AssertionError for an unknown status.

        It uses gRPC's blocking client, since grpc.aio's loses a status that comes while it is still sending.
        """
        path = f"/{method.containing_service.full_name}/{method.name}"
        found: list[str] = []
        started, details = time.monotonic(), ""
        try:
            if not method.client_streaming and not method.server_streaming:
                self.caller.unary_unary(path)(requests[0], timeout=CALL_S)
            elif method.client_streaming:
                for reply in self.caller.stream_stream(path)(iter(requests), timeout=CALL_S):
                    if method.name == "ForwardStream" and (frame := pb.ReplyFrame.FromString(reply)).HasField(
                        "failure"
                    ):
                        found.append(frame.failure.code)
            else:  # a stream that is held open: its first answer is enough
                stream = self.caller.unary_stream(path)(requests[0], timeout=CALL_S)
                next(stream)
                stream.cancel()
            found.append("OK")
        except grpc.RpcError as error:
            found.append(error.code().name)
            details = error.details()
        seconds = time.monotonic() - started
        assert seconds < CALL_S, f"{path}: no end after {seconds:.1f} s"
        assert set(found) <= TYPED, f"{path}: {found}: {details}"
        return found

    async def rude(self, method: Any, requests: list[bytes], number: int) -> None:
        """A connection below gRPC: some streams whose messages stop somewhere, some whose replies are never read."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        async with await RawConnection(window=0).connect(self.server.address) as raw:
            for place, request in enumerate((*requests, bytes(number % 5000))):
                half = (number + place) % 2 == 0
                size = (number * 31 + place) % (len(request) + 5) if half else None
                await raw.send(path, request, size=size, timeout_s=1)
            await asyncio.sleep(number % 7 / 20)

    async def good(self) -> None:
        """A right answer, and nothing left over."""
        header = pb.ForwardRequest(layer=3)
        request = wire.request_message({pb.HIDDEN_STATES: wire.encode(self.x, "x")}, header, inline=True)
        reply = await pb_grpc.ExpertsStub(self.channel).Forward(request, timeout=CALL_S)
        assert torch.equal(wire.decode(reply.hidden_states.data, reply.hidden_states, as_torch=True), self.x)
        calls = self.server._calls
        assert calls is not None
        end = time.monotonic() + CALL_S
        while calls.in_flight or calls.buffered_bytes:
            assert time.monotonic() < end, f"{calls.in_flight} calls and {calls.buffered_bytes} bytes are left"
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        await self.channel.close()
        self.caller.close()
        await self.server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    target = Target()
    target.run(target.good())
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    rude: collections.Counter[str] = collections.Counter()
    files, started, ran = len(os.listdir("/proc/self/fd")), time.monotonic(), 0

    @hypothesis.seed(options.seed)
    @settings(max_examples=options.cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def fuzz(case: tuple[Any, list[bytes]]) -> None:
        nonlocal ran
        method, requests = case
        statuses = target.call(method, requests)
        outcomes[f"{method.containing_service.name}/{method.name}"].update(statuses)
        ran += 1
        if ran % 5 == 0:
            target.run(target.rude(method, requests, ran))
            rude[method.name] += 1
        if ran % 100 == 0:
            target.run(target.good())
        if ran % 1000 == 0:
            print(f"{ran} cases, {time.monotonic() - started:.0f} s", flush=True)

    fuzz()
    target.run(target.good())
    seconds, files_now = time.monotonic() - started, len(os.listdir("/proc/self/fd"))
    target.run(target.stop())
    target.loop.call_soon_threadsafe(target.loop.stop)
    target.thread.join()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "cases": ran,
        "connections_with_half_messages_or_unread_replies": sum(rude.values()),
        "outcomes": {name: dict(sorted(counts.items())) for name, counts in sorted(outcomes.items())},
        "statuses": dict(sum(outcomes.values(), collections.Counter()).most_common()),
        "untyped_or_hanging": 0,  # hypothesis raises at the first
        "open_files": {"before": files, "after": files_now},
        "run": {
            "seconds": round(seconds, 1), "seed": options.seed, "hypothesis": hypothesis.__version__, "grpc": grpc.__version__,
            "machine": platform.platform(), "commit": commit.stdout.strip(),
        },
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.json:
        reports.save(options.json, result)


if __name__ == "__main__":
    main()
