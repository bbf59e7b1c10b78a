"""Calls of NVIDIA's `tritonclient` and a GPU: `python -m tests.server.kserve.triton_cuda_session ADDRESS LAYER HIDDEN [cuda]`.

In a process of its own, as triton_client_session.py. With `cuda` the memory is a real GPU's, made by tritonclient itself;
without, it is a made-up one's (tests/support/fake_device_memory.py), on GPU 1. Prints one JSON object.
"""

from __future__ import annotations

import base64
import json
import sys

import numpy as np
import tritonclient.grpc as triton

SIZE = 1 << 16


class FakeMemory:
    device = 1

    def __init__(self):
        from tests.support.fake_device_memory import FakeGpuMemory

        self._memory = FakeGpuMemory(SIZE, self.device)
        self.raw_handle = base64.b64encode(self._memory.handle)

    def write(self, x: np.ndarray) -> None:
        self._memory.piece(0, x.nbytes)[1].numpy()[:] = x.reshape(-1).view(np.uint8)

    def read(self, shape: tuple[int, ...], offset: int) -> np.ndarray:
        return self._memory.piece(offset, 4 * int(np.prod(shape)))[1].numpy().view(np.float32).reshape(shape)

    def free(self) -> None:
        self._memory.free()


class CudaMemory:
    device = 0

    def __init__(self):
        import tritonclient.utils.cuda_shared_memory as cuda

        self._cuda, self._handle = cuda, cuda.create_shared_memory_region("mine", SIZE, self.device)
        self.raw_handle = cuda.get_raw_handle(self._handle)

    def write(self, x: np.ndarray) -> None:
        self._cuda.set_shared_memory_region(self._handle, [x])

    def read(self, shape: tuple[int, ...], offset: int) -> np.ndarray:
        whole = self._cuda.get_contents_as_numpy(self._handle, np.uint8, [SIZE])
        return whole[offset : offset + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)

    def free(self) -> None:
        self._cuda.destroy_shared_memory_region(self._handle)


def error_of(call) -> list[str]:
    try:
        call()
    except triton.InferenceServerException as error:
        return [str(error.status()), str(error.message())]
    return ["none", ""]


def session(client, model: str, hidden: int, memory) -> dict:
    x = np.random.default_rng(1).standard_normal((5, hidden)).astype(np.float32)
    sent = triton.InferInput("hidden_states", x.shape, "FP32")
    sent.set_data_from_numpy(x)
    expected = client.infer(model, [sent]).as_numpy("hidden_states")
    found = {"extensions": list(client.get_server_metadata().extensions)}
    memory.write(x)
    register = client.register_cuda_shared_memory
    found["too_large"] = error_of(lambda: register("mine", memory.raw_handle, memory.device, 2 * SIZE))
    found["unknown_handle"] = error_of(lambda: register("mine", base64.b64encode(bytes(64)), memory.device, SIZE))
    register("mine", memory.raw_handle, memory.device, SIZE)
    found["twice"] = error_of(lambda: register("mine", memory.raw_handle, memory.device, SIZE))
    found["status"] = client.get_cuda_shared_memory_status(as_json=True).get("regions", {})
    found["as_system_memory"] = error_of(lambda: client.unregister_system_shared_memory("mine"))
    sent.set_shared_memory("mine", x.nbytes)
    wanted = triton.InferRequestedOutput("hidden_states")
    wanted.set_shared_memory("mine", x.nbytes, offset=SIZE // 2)
    reply = client.infer(model, [sent], outputs=[wanted])
    found["no_bytes"] = len(reply.get_response().raw_output_contents) == 0
    found["difference"] = float(np.abs(memory.read(x.shape, SIZE // 2) - expected).max())
    sent.set_shared_memory("mine", x.nbytes, offset=SIZE - 64)
    found["out_of_bounds"] = error_of(lambda: client.infer(model, [sent]))
    client.unregister_cuda_shared_memory("mine")
    sent.set_shared_memory("mine", x.nbytes)
    found["unregistered"] = error_of(lambda: client.infer(model, [sent]))
    found["unregister_twice"] = error_of(lambda: client.unregister_cuda_shared_memory("mine"))
    register("again", memory.raw_handle, memory.device, SIZE)
    client.unregister_cuda_shared_memory()
    found["empty"] = client.get_cuda_shared_memory_status(as_json=True).get("regions", {})
    return found


def main() -> None:
    address, layer, hidden, *real = sys.argv[1:]
    memory = CudaMemory() if real else FakeMemory()
    try:
        with triton.InferenceServerClient(address) as client:
            print(json.dumps(session(client, f"layer-{layer}", int(hidden), memory)))
    finally:
        memory.free()


if __name__ == "__main__":
    main()
