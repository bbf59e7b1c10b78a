"""What a GPU does with memory that is shared by CUDA IPC when things go wrong: measured, printed as JSON.

    python -m tests.gpus.cuda_ipc_facts > cuda_ipc_facts.json

One GPU is enough (a second one adds a fact), no other package than the driver's library and, for two facts, torch. Every
fact has processes of its own, since a fault ends a CUDA context for good. Ends within 60 s, whatever hangs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import subprocess
import sys
import time
from typing import Any

MIB = 1 << 20
ANSWER_S = 15.0
PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
ATTRIBUTE_DEVICE_ORDINAL = 9  # cuda.h, CUpointer_attribute


class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class Process:
    """One side of a fact: does what it is told, answers with the driver's error (0: none) and what it saw."""

    def __init__(self, device: int):
        cuda = self.cuda = ctypes.CDLL("libcuda.so.1")
        self.check(cuda.cuInit(0))
        self.context = ctypes.c_void_p()
        handle = ctypes.c_int()
        self.check(cuda.cuDeviceGet(ctypes.byref(handle), device))
        self.check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), handle))
        self.check(cuda.cuCtxSetCurrent(self.context))
        self.tensors: list[Any] = []

    def check(self, error: int) -> None:
        if error:
            raise RuntimeError(self.name(error))

    def name(self, error: int) -> str:
        text = ctypes.c_char_p()
        self.cuda.cuGetErrorName(error, ctypes.byref(text))
        return (text.value or b"?").decode()

    def answer(self, error: int, **seen: Any) -> dict[str, Any]:
        return {"error": self.name(error) if error else "", **seen}

    def alloc(self, size: int, fill: int) -> dict[str, Any]:
        pointer = ctypes.c_uint64()
        error = self.cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
        if not error:
            error = self.fill(pointer.value, size, fill)["code"]
        return {**self.answer(error), "pointer": pointer.value}

    def fill(self, pointer: int, size: int, fill: int) -> dict[str, Any]:
        error = self.cuda.cuMemsetD8_v2(ctypes.c_uint64(pointer), ctypes.c_ubyte(fill), ctypes.c_size_t(size))
        error = error or self.cuda.cuCtxSynchronize()
        return self.answer(error, code=error)

    def export(self, pointer: int) -> dict[str, Any]:
        handle = Handle()
        error = self.cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(pointer))
        return self.answer(error, handle=bytes(handle.reserved).hex())

    def open(self, handle: str, flags: int = PEER_ACCESS) -> dict[str, Any]:
        pointer, start = ctypes.c_uint64(), time.perf_counter()
        raw = Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(handle)))
        error = self.cuda.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), raw, ctypes.c_uint(flags))
        return self.answer(error, pointer=pointer.value, us=round((time.perf_counter() - start) * 1e6))

    def close(self, pointer: int) -> dict[str, Any]:
        start = time.perf_counter()
        error = self.cuda.cuIpcCloseMemHandle(ctypes.c_uint64(pointer))
        return self.answer(error, us=round((time.perf_counter() - start) * 1e6))

    def free(self, pointer: int) -> dict[str, Any]:
        return self.answer(self.cuda.cuMemFree_v2(ctypes.c_uint64(pointer)))

    def range(self, pointer: int) -> dict[str, Any]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        error = self.cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
        return self.answer(error, before=pointer - base.value, size=size.value)

    def device(self, pointer: int) -> dict[str, Any]:
        ordinal = ctypes.c_int(-1)
        error = self.cuda.cuPointerGetAttribute(
            ctypes.byref(ordinal), ATTRIBUTE_DEVICE_ORDINAL, ctypes.c_uint64(pointer)
        )
        return self.answer(error, ordinal=ordinal.value)

    def read(self, pointer: int, size: int) -> dict[str, Any]:
        """Which byte values lie there, and how many of each."""
        target = (ctypes.c_ubyte * size)()
        error = self.cuda.cuMemcpyDtoH_v2(target, ctypes.c_uint64(pointer), ctypes.c_size_t(size))
        error = error or self.cuda.cuCtxSynchronize()
        seen = bytes(target)
        return self.answer(error, values={} if error else {value: seen.count(value) for value in sorted(set(seen))})

    def copies(self, source: int, target: int, size: int, times: int) -> dict[str, Any]:
        """Device to device, queued and not waited for; rounds of the ring until `finish`."""
        error = 0
        for _ in range(times):
            error = error or self.cuda.cuMemcpyDtoDAsync_v2(
                ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), None
            )
        return self.answer(error)

    def finish(self) -> dict[str, Any]:
        start = time.perf_counter()
        error = self.cuda.cuCtxSynchronize()
        return self.answer(error, ms=round((time.perf_counter() - start) * 1e3, 3))

    def alive(self) -> dict[str, Any]:
        """Whether the context still works: memory of its own written and read."""
        mine = self.alloc(2 * MIB, 77)
        if mine["error"]:
            return self.answer(0, works=False, why=mine["error"])
        seen = self.read(mine["pointer"], 16)
        self.free(mine["pointer"])
        return self.answer(0, works=seen["values"] == {77: 16}, why=seen["error"])

    def free_memory(self) -> dict[str, Any]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        error = self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return self.answer(error, mib=free.value // MIB)

    def torch_tensor(self, size: int, fill: int, skip: int) -> dict[str, Any]:
        """A tensor of torch's caching allocator that does not lie at its segment's start: `skip` bytes lie before it."""
        import torch

        self.tensors.append(torch.empty(skip, dtype=torch.uint8, device="cuda"))
        tensor = torch.full((size,), fill, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.tensors.append(tensor)
        self.cuda.cuCtxSetCurrent(self.context)
        return {**self.export(tensor.data_ptr()), "range": self.range(tensor.data_ptr())}


def serve(device: int) -> None:
    side = Process(device)
    print(json.dumps({"error": "", "pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(side, asked.pop("do"))(**asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class Side:
    """The parent's end. `side.open(handle=...)` asks the process and waits; a process that hangs or ends is told as that."""

    def __init__(self, device: int = 0, **environment: str):
        command = [sys.executable, "-m", "tests.gpus.cuda_ipc_facts", "--serve", str(device)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
        )
        self.started = self._answer()

    def __getattr__(self, name: str) -> Any:
        return lambda **arguments: self._ask({"do": name, **arguments})

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(asked).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"error": f"the process has ended: {self.process.wait()}"}
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ANSWER_S)[0]:
            self.kill()
            return {"error": f"no answer within {ANSWER_S:g} s"}
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": f"the process has ended: {self.process.wait()}"}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Facts:
    """Each method is one fact; `pair` gives exporter and importer, which end with the fact."""

    def __init__(self) -> None:
        self._sides: list[Side] = []

    def side(self, device: int = 0, **environment: str) -> Side:
        self._sides.append(Side(device, **environment))
        return self._sides[-1]

    def end(self) -> None:
        for side in self._sides:
            side.kill()
        self._sides.clear()

    def shared(self, size: int, fill: int) -> tuple[Side, Side, dict[str, Any], dict[str, Any]]:
        exporter, importer = self.side(), self.side()
        mine = exporter.alloc(size=size, fill=fill)
        mine |= {"handle": exporter.export(pointer=mine["pointer"])["handle"]}
        return exporter, importer, mine, importer.open(handle=mine["handle"])

    def size_of_an_opened_handle(self) -> dict[str, Any]:
        """The bounds check: does the importer learn what was allocated?"""
        seen = {}
        for size in (32 * MIB, 3 * MIB, 5 * MIB // 2, 4096):
            _, importer, _, theirs = self.shared(size, 5)
            middle = importer.range(pointer=theirs["pointer"] + size // 2)
            seen[size] = {"opened": theirs, "range": importer.range(pointer=theirs["pointer"]), "from_middle": middle}
            seen[size]["device"] = importer.device(pointer=theirs["pointer"])
            self.end()
        return seen

    def small_allocations_share_a_block(self) -> dict[str, Any]:
        exporter, importer = self.side(), self.side()
        first, second = exporter.alloc(size=4096, fill=1), exporter.alloc(size=4096, fill=2)
        theirs = importer.open(handle=exporter.export(pointer=second["pointer"])["handle"])
        return {
            "apart": second["pointer"] - first["pointer"],
            "exporter_range": exporter.range(pointer=second["pointer"]),
            "importer_range": importer.range(pointer=theirs["pointer"]),
            "importer_reads": importer.read(pointer=theirs["pointer"], size=4096),
        }

    def opened_twice(self) -> dict[str, Any]:
        _, importer, mine, one = self.shared(4 * MIB, 5)
        two = importer.open(handle=mine["handle"])
        seen: dict[str, Any] = {"same_address": one["pointer"] == two["pointer"], "second": two["error"]}
        for each in ("first_close", "second_close", "third_close"):
            seen[each] = importer.close(pointer=one["pointer"])["error"]
            seen[f"range_after_{each}"] = importer.range(pointer=one["pointer"])
        return seen | {"alive": importer.alive()}

    def opened_by_its_exporter(self) -> dict[str, Any]:
        exporter, _, mine, _ = self.shared(4 * MIB, 5)
        return exporter.open(handle=mine["handle"]) | {"alive": exporter.alive()}

    def read_after_free(self) -> dict[str, Any]:
        """And whether the exporter gets the same memory again for something else."""
        exporter, importer, mine, theirs = self.shared(64 * MIB, 5)
        before = importer.free_memory()["mib"]
        seen: dict[str, Any] = {"free": exporter.free(pointer=mine["pointer"])}
        seen["memory_that_came_back_mib"] = importer.free_memory()["mib"] - before
        again = exporter.alloc(size=64 * MIB, fill=9)
        seen["allocated_again_at_the_same_address"] = again["pointer"] == mine["pointer"]
        seen["read"] = importer.read(pointer=theirs["pointer"], size=64 * MIB)
        seen["write"] = importer.fill(pointer=theirs["pointer"], size=64 * MIB, fill=3)
        seen["exporter_reads_new"] = exporter.read(pointer=again["pointer"], size=64 * MIB)
        seen["opened_after_free"] = self.side().open(handle=mine["handle"])
        seen["close"] = importer.close(pointer=theirs["pointer"])
        return seen | {"alive": importer.alive(), "exporter_alive": exporter.alive()}

    def read_after_kill(self) -> dict[str, Any]:
        """And whether the memory goes to someone else while it is open here."""
        exporter, importer, mine, theirs = self.shared(64 * MIB, 5)
        before = importer.free_memory()["mib"]
        exporter.kill()
        time.sleep(0.5)
        seen: dict[str, Any] = {"memory_that_came_back_mib": importer.free_memory()["mib"] - before}
        stranger = self.side()
        room = stranger.free_memory()["mib"] - 512
        taken = stranger.alloc(size=room * MIB, fill=9)  # whatever is free now, written over
        seen["stranger_took_mib"] = room if not taken["error"] else taken
        seen["read"] = importer.read(pointer=theirs["pointer"], size=64 * MIB)
        seen["write"] = importer.fill(pointer=theirs["pointer"], size=64 * MIB, fill=3)
        seen["range"] = importer.range(pointer=theirs["pointer"])
        if not taken["error"]:
            stranger.free(pointer=taken["pointer"])
        seen["opened_after_death"] = self.side().open(handle=mine["handle"])
        held = importer.free_memory()["mib"]
        seen["close"] = importer.close(pointer=theirs["pointer"])
        seen["memory_that_came_back_with_close_mib"] = importer.free_memory()["mib"] - held
        return seen | {"alive": importer.alive()}

    def killed_while_copies_run(self) -> dict[str, Any]:
        exporter, importer, _, theirs = self.shared(1024 * MIB, 5)
        target = importer.alloc(size=1024 * MIB, fill=0)
        queued = importer.copies(source=theirs["pointer"], target=target["pointer"], size=1024 * MIB, times=900)
        exporter.kill()
        seen = {"queued": queued, "finish": importer.finish()}
        seen["read"] = importer.read(pointer=target["pointer"], size=MIB)
        return seen | {"close": importer.close(pointer=theirs["pointer"]), "alive": importer.alive()}

    def freed_while_copies_run(self) -> dict[str, Any]:
        exporter, importer, mine, theirs = self.shared(1024 * MIB, 5)
        target = importer.alloc(size=1024 * MIB, fill=0)
        queued = importer.copies(source=theirs["pointer"], target=target["pointer"], size=1024 * MIB, times=900)
        seen = {"queued": queued, "free": exporter.free(pointer=mine["pointer"]), "finish": importer.finish()}
        seen["read"] = importer.read(pointer=target["pointer"], size=MIB)
        return seen | {"close": importer.close(pointer=theirs["pointer"]), "alive": importer.alive()}

    def closed_while_copies_run(self) -> dict[str, Any]:
        """Does closing, or opening, wait for the device?"""
        exporter, importer, _, theirs = self.shared(1024 * MIB, 5)
        other = exporter.alloc(size=4 * MIB, fill=6)
        handle = exporter.export(pointer=other["pointer"])["handle"]
        target = importer.alloc(size=1024 * MIB, fill=0)
        importer.copies(source=theirs["pointer"], target=target["pointer"], size=1024 * MIB, times=900)
        opened = importer.open(handle=handle)
        ranged = importer.range(pointer=opened["pointer"])
        closed = importer.close(pointer=theirs["pointer"])
        seen = {"open": opened, "range": ranged, "close": closed, "left_after": importer.finish()}
        return seen | {"alive": importer.alive()}

    def damaged_handles(self) -> dict[str, Any]:
        """Each byte of a good handle changed, then bytes that are none. What the driver says, and which process it ends."""
        exporter, importer = self.side(), self.side()
        mine = exporter.alloc(size=4 * MIB, fill=5)
        good = bytes.fromhex(exporter.export(pointer=mine["pointer"])["handle"])
        errors: dict[str, list[int]] = {}
        for at in range(64):
            bad = bytearray(good)
            bad[at] ^= 0x5A
            seen = importer.open(handle=bytes(bad).hex())
            what = seen["error"] or f"opened, {importer.range(pointer=seen['pointer'])}"
            errors.setdefault(what, []).append(at)
            if not seen["error"]:
                importer.close(pointer=seen["pointer"])
            if importer.process.poll() is not None:
                importer = self.side()
        result: dict[str, Any] = {"by_byte": errors, "alive": importer.alive()}
        for name, raw in {"zeros": bytes(64), "ones": b"\xff" * 64, "random": os.urandom(64)}.items():
            result[name] = importer.open(handle=raw.hex())
        return result | {"good": importer.open(handle=good.hex())["error"], "alive_after": importer.alive()}

    def torch_memory(self) -> dict[str, Any]:
        """The handle of a tensor in a segment of torch: is it the segment's?"""
        exporter, importer = self.side(), self.side()
        mine = exporter.torch_tensor(size=MIB, fill=5, skip=4 * MIB)
        theirs = importer.open(handle=mine["handle"])
        seen: dict[str, Any] = {"exporter": mine["range"], "error": mine["error"], "opened": theirs}
        seen["range"] = importer.range(pointer=theirs["pointer"])
        seen["at_the_pointer"] = importer.read(pointer=theirs["pointer"], size=16)
        seen["at_the_offset"] = importer.read(pointer=theirs["pointer"] + mine["range"]["before"], size=16)
        return seen

    def expandable_segments(self) -> dict[str, Any]:
        conf = "expandable_segments:True"
        exporter = self.side(PYTORCH_CUDA_ALLOC_CONF=conf, PYTORCH_ALLOC_CONF=conf)
        mine = exporter.torch_tensor(size=MIB, fill=5, skip=4 * MIB)
        if mine["error"]:
            return mine
        importer = self.side()
        theirs = importer.open(handle=mine["handle"])
        return {"exporter": mine["range"], "opened": theirs, "range": importer.range(pointer=theirs["pointer"])}

    def exported_again_at_the_same_address(self) -> dict[str, Any]:
        """Freed and allocated anew while the importer still has the old one open: which does the new handle open?"""
        exporter, importer, mine, theirs = self.shared(64 * MIB, 5)
        exporter.free(pointer=mine["pointer"])
        again = exporter.alloc(size=64 * MIB, fill=9)
        handle = exporter.export(pointer=again["pointer"])["handle"]
        changed = [at for at in range(64) if handle[2 * at : 2 * at + 2] != mine["handle"][2 * at : 2 * at + 2]]
        seen: dict[str, Any] = {"same_address": again["pointer"] == mine["pointer"], "bytes_that_changed": changed}
        opened = importer.open(handle=handle)
        seen["opened"] = {**opened, "at_the_old_ones": opened["pointer"] == theirs["pointer"]}
        seen["read"] = importer.read(pointer=opened["pointer"], size=16)
        seen["read_old"] = importer.read(pointer=theirs["pointer"], size=16)
        seen["close_new"] = importer.close(pointer=opened["pointer"])["error"]
        seen["read_old_after_close_of_new"] = importer.read(pointer=theirs["pointer"], size=16)
        return seen | {"close_old": importer.close(pointer=theirs["pointer"])["error"], "alive": importer.alive()}

    def handle_with_another_size(self) -> dict[str, Any]:
        """Bytes 16 to 23 of a handle are the size: can a client make the importer believe that there is more?"""
        seen: dict[str, Any] = {}
        for size in (2 * MIB, 64 * MIB, 1 << 40):
            exporter, importer = self.side(), self.side()
            mine = exporter.alloc(size=4 * MIB, fill=5)
            handle = bytearray.fromhex(exporter.export(pointer=mine["pointer"])["handle"])
            handle[16:24] = size.to_bytes(8, "little")
            opened = importer.open(handle=bytes(handle).hex())
            seen[str(size)] = {"opened": opened, "range": importer.range(pointer=opened["pointer"])}
            seen[str(size)] |= {"read": importer.read(pointer=opened["pointer"], size=16), "alive": importer.alive()}
            self.end()
        return seen

    def invisible_device(self) -> dict[str, Any]:
        """A handle of GPU 1 opened by a process that sees GPU 0 only, as ranks see theirs only."""
        exporter, importer = self.side(1), self.side(0, CUDA_VISIBLE_DEVICES="0")
        if exporter.started["error"]:
            return {"skipped": f"no second GPU: {exporter.started['error']}"}
        mine = exporter.alloc(size=4 * MIB, fill=5)
        opened = importer.open(handle=exporter.export(pointer=mine["pointer"])["handle"])
        return {"opened": opened, "device": importer.device(pointer=opened["pointer"]), "alive": importer.alive()}

    def another_device(self) -> dict[str, Any]:
        """A handle of GPU 1 opened by a process that works on GPU 0: where does the driver say it lies?"""
        exporter, importer = self.side(1), self.side(0)
        if exporter.started["error"]:
            return {"skipped": f"no second GPU: {exporter.started['error']}"}
        mine = exporter.alloc(size=4 * MIB, fill=5)
        handle = exporter.export(pointer=mine["pointer"])["handle"]
        plain, peer = importer.open(handle=handle, flags=0), importer.open(handle=handle)
        seen: dict[str, Any] = {"without_peer_access": plain, "with": peer}
        return seen | {"device": importer.device(pointer=peer["pointer"] or plain["pointer"])}


FACTS = [name for name, value in vars(Facts).items() if callable(value) and not name.startswith("_")]
FACTS = [name for name in FACTS if name not in ("side", "end", "shared")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", type=int, metavar="DEVICE", help="one side of a fact; started by the program itself")
    parser.add_argument("facts", nargs="*", help=f"of {', '.join(FACTS)}; default: all")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        return serve(arguments.serve)
    report: dict[str, Any] = {}
    for name in arguments.facts or FACTS:
        facts, start = Facts(), time.perf_counter()
        try:
            report[name] = getattr(facts, name)()
        except Exception as error:  # one that cannot be measured does not cost the others
            report[name] = {"failed": f"{type(error).__name__}: {error}"}
        finally:
            facts.end()
        report[name]["seconds"] = round(time.perf_counter() - start, 2)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
