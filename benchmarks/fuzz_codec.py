"""Fuzzes the door, guided by coverage: `python -m benchmarks.fuzz_codec [--json=FILE] [-runs=N] [CORPUS_FOLDER]`.

The options with one dash are libFuzzer's. It needs `pip install -e '.[benchmarks]'`. Every input must end in a result or in a
typed error. Anything else stops the run with the input. FILE keeps the last count.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import atheris
import torch
from google.protobuf.message import DecodeError

from benchmarks import reports

with atheris.instrument_imports(include=["epserve.server"]):
    from epserve.config import ServerConfig
    from epserve.errors import CallerError, Overloaded
    from epserve.protocol import epserve_pb2 as pb
    from epserve.protocol import inference_pb2 as kserve
    from epserve.protocol import wire
    from epserve.server import codec, replies
    from epserve.server.kserve.messages import to_forward_request
    from epserve.server.regions import Regions
    from epserve.server.stream import StreamSession  # noqa: F401  instruments what it imports

MAX_DIMENSION = 5
FOLDER = Path(tempfile.mkdtemp())
KEY, REGION_BYTES = "object", 2048
REPORT_EVERY = 10_000
STARTED = time.monotonic()
report_to: Path | None = None
counts = {"accepted": 0, "refused": 0, "not a message": 0}


def door(hidden: int) -> codec.Door:
    info = SimpleNamespace(name="fuzzed", hidden=hidden, num_experts=8, top_k=3, dtype=torch.bfloat16)
    return codec.Door(info, (0, 3), ServerConfig(max_tokens_per_request=64, max_message_bytes=1 << 20))


DOORS = (door(4), door(128))
REGISTRY = Regions(ServerConfig(), folder=FOLDER)


def pass_door(request: pb.ForwardRequest, contents: dict, chosen: codec.Door) -> None:
    """Passes a request through the door as the servicer does, with an engine that echoes."""

    def resolve(wanted: pb.RegionSlice, nbytes: int, field: str):
        return REGISTRY.slice_of("me", wanted, nbytes, field)

    checked = chosen.check(request, codec.checked_request_id(request.request_id[:200]), resolve)
    assembly = wire.Assembly(checked.sizes)
    for which in checked.sizes:
        assembly.add(which, contents.get(which, checked.headers[which].data))
    decoded = chosen.decode(checked, assembly.finish())
    assert decoded.hidden.shape == (checked.tokens, chosen.info.hidden)
    assert torch.isfinite(decoded.hidden.float()).all()
    if decoded.ids is not None:
        assert decoded.ids.shape == decoded.weights.shape == (checked.tokens, 3)
        assert not decoded.ids.numel() or -1 <= decoded.ids.min() <= decoded.ids.max() < 8
    for tensor in replies.encode_reply(decoded.hidden, checked).tensors.values():
        assert tensor.region is not None or len(tensor.data) == tensor.nbytes


def built(data: atheris.FuzzedDataProvider) -> pb.ForwardRequest:
    """A request that is nearly right."""
    request = pb.ForwardRequest(layer=data.ConsumeIntInRange(-1, 4), request_id=data.ConsumeUnicodeNoSurrogates(3))
    request.reply_dtype = data.ConsumeIntInRange(0, 14)
    for name in wire.FIELDS.values():
        if not data.ConsumeBool():
            continue
        tensor = getattr(request, name)
        tensor.dtype = data.ConsumeIntInRange(0, 13)
        width = data.PickValueInList([1, 2, 3, 4, 128, -1, 2**62])
        tensor.shape.extend([data.ConsumeIntInRange(0, MAX_DIMENSION), width])
        if data.ConsumeBool():
            fill(tensor.region, data)
        elif data.ConsumeBool():
            tensor.data = data.ConsumeBytes(data.ConsumeIntInRange(0, 1024))
        elif width > 0:
            size = tensor.shape[0] * width * wire.ITEM_BYTES.get(tensor.dtype, 1)
            tensor.data = bytes([data.ConsumeIntInRange(0, 255)]) * min(size, 8192)
    if data.ConsumeBool():
        fill(request.output, data)
    return request


def fill(where: pb.RegionSlice, data: atheris.FuzzedDataProvider) -> None:
    where.region = data.PickValueInList(["region", "", "other"])
    where.offset = data.PickValueInList([0, 1, 2000, 2**64 - 1, data.ConsumeIntInRange(0, 2**64 - 1)])
    where.byte_size = data.PickValueInList([0, 8, 16, 24, 32, 512, 1024, data.ConsumeIntInRange(0, 2**64 - 1)])


def frames(data: atheris.FuzzedDataProvider) -> None:
    """Parts in any cut and order."""
    size = data.ConsumeIntInRange(0, 300)
    assembly = wire.Assembly({pb.HIDDEN_STATES: size, pb.TOPK_IDS: data.ConsumeIntInRange(0, 20)})
    while data.remaining_bytes():
        assembly.add(data.ConsumeIntInRange(0, 5), data.ConsumeBytes(data.ConsumeIntInRange(0, 64)))
    assert len(assembly.finish().get(pb.HIDDEN_STATES, b"")) == size


def key(data: atheris.FuzzedDataProvider) -> None:
    """Registering never leaves the folder."""
    name = data.ConsumeUnicodeNoSurrogates(20)
    size, offset = data.ConsumeIntInRange(0, 2**64 - 1), data.ConsumeIntInRange(0, 2**64 - 1)
    region = REGISTRY.register_leased("other", uid=0, name="x", key=name, offset=offset % 4096, size=size % 4096)
    REGISTRY.forget(region)
    assert name.lstrip("/") == KEY


def one(payload: bytes) -> None:
    data = atheris.FuzzedDataProvider(payload)
    chosen, target = DOORS[data.ConsumeIntInRange(0, 1)], data.ConsumeIntInRange(0, 4)
    try:
        if target == 0:
            pass_door(pb.ForwardRequest.FromString(data.ConsumeBytes(len(payload))), {}, chosen)
        elif target == 1:
            pass_door(built(data), {}, chosen)
        elif target == 2:
            request = kserve.ModelInferRequest.FromString(data.ConsumeBytes(len(payload)))
            pass_door(*to_forward_request(request, 3), chosen)
        elif target == 3:
            frames(data)
        else:
            key(data)
    except (CallerError, Overloaded):
        counts["refused"] += 1
    except DecodeError:
        counts["not a message"] += 1
    else:
        counts["accepted"] += 1
    if sum(counts.values()) % REPORT_EVERY == 0:  # libFuzzer ends the process by itself
        report()


def seeds() -> list[bytes]:
    """Valid messages, to which the mutations are close. The provider takes integers from the end: target, then door."""
    shape = (2, 4)
    hidden = pb.Tensor(dtype=pb.BF16, shape=shape, data=bytes(16))
    fp8 = pb.Tensor(dtype=pb.FP8_E4M3, shape=(1, 128), data=bytes(128))
    in_region = pb.Tensor(dtype=pb.BF16, shape=shape, region=pb.RegionSlice(region="region", byte_size=16))
    ids = pb.Tensor(dtype=pb.INT16, shape=(2, 1), data=b"\1\0\xff\xff")
    weights = pb.Tensor(dtype=pb.FP32, shape=(2, 1), data=bytes(8))
    scales = pb.Tensor(dtype=pb.FP32, shape=(1, 1), data=bytes(4))
    forward = [
        (pb.ForwardRequest(layer=3, hidden_states=hidden, topk_ids=ids, topk_weights=weights), 0),
        (pb.ForwardRequest(layer=3, hidden_states=in_region, output=in_region.region), 0),
        (pb.ForwardRequest(hidden_states=fp8, hidden_scales=scales, reply_dtype=pb.FP8_E4M3), 1),
    ]
    inputs = [
        {"name": "hidden_states", "datatype": "BF16", "shape": shape},
        {"name": "topk_ids", "datatype": "INT8", "shape": (2, 1), "contents": {"int_contents": [1, 2]}},
    ]
    parameters = {"shared_memory_region": {"string_param": "region"}, "shared_memory_byte_size": {"int64_param": 16}}
    infer = [
        kserve.ModelInferRequest(inputs=inputs[:1], raw_input_contents=[bytes(16)]),
        kserve.ModelInferRequest(inputs=[{**inputs[0], "parameters": parameters}, inputs[1]]),
        kserve.ModelInferRequest(outputs=[{"name": "hidden_states", "parameters": parameters}]),
    ]
    made = [message.SerializeToString() + bytes([0, number]) for message, number in forward]
    made += [message.SerializeToString() + bytes([2, 0]) for message in infer]
    return [*made, bytes(200) + bytes([1, 1]), bytes(range(100)) + bytes([3, 0]), b"object" + bytes(18) + bytes([4, 0])]


def report() -> None:
    files = len(os.listdir("/proc/self/fd"))
    print(f"inputs: {counts}, open files: {files}", flush=True)
    if report_to is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        run = {
            "seconds": round(time.monotonic() - STARTED),
            "machine": platform.platform(),
            "commit": commit.stdout.strip(),
        }
        result = {"inputs": sum(counts.values()), **counts, "open_files": files, "run": run}
        reports.save(report_to, result)


def main() -> None:
    global report_to
    for argument in [each for each in sys.argv if each.startswith("--json=")]:
        report_to = Path(argument.removeprefix("--json="))
        sys.argv.remove(argument)
    torch.set_num_threads(1)
    (FOLDER / KEY).write_bytes(bytes(REGION_BYTES))
    REGISTRY.register_leased("me", uid=0, name="region", key=KEY, offset=0, size=REGION_BYTES)
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds()):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([*sys.argv, "-max_len=4096", "-len_control=0", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
