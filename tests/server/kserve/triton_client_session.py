"""Calls of NVIDIA's `tritonclient` against a service: `python -m tests.server.kserve.triton_client_session ADDRESS SOCKET`.

In a process of its own, since the client's message definitions and the service's have the same names. Prints one JSON
object; test_kserve.py judges it. The service computes `2 x` and knows layers 1, 2, 3 and 7 of hidden size 32.
"""

import json
import queue
import sys
import uuid

import numpy as np
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from ml_dtypes import bfloat16


def tensor(name: str, value: np.ndarray, datatype: str) -> triton.InferInput:
    sent = triton.InferInput(name, value.shape, datatype)
    sent.set_data_from_numpy(value)
    return sent


def error_of(call) -> list[str]:
    try:
        call()
    except triton.InferenceServerException as error:
        return [str(error.status()), str(error.message())]
    return ["none", ""]


def metadata(client) -> dict:
    layer = client.get_model_metadata("layer-3", as_json=True)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": [client.is_model_ready(name) for name in ("layer-3", "layer-4", "nonsense")],
        "server": client.get_server_metadata(as_json=True),
        "layer": layer,
        "config": client.get_model_config("layer-3", as_json=True)["config"],
        "unknown_config": error_of(lambda: client.get_model_config("layer-4")),
        "index": client.get_model_repository_index(as_json=True),
    }


def inference(client) -> dict:
    x = np.arange(96, dtype=np.float32).reshape(3, 32) / 8
    results = {}
    for datatype, dtype in (("FP32", np.float32), ("FP16", np.float16), ("BF16", bfloat16)):
        reply = client.infer("layer-3", [tensor("hidden_states", x.astype(dtype), datatype)], request_id="mine")
        got = reply.as_numpy("hidden_states")
        results[datatype] = [bool(np.array_equal(got.astype(np.float32), 2 * x)), reply.get_response().id]
    ids = np.array([[0, 1, 7], [2, 3, 4], [5, 6, -1]])
    weights = np.full((3, 3), 0.5, np.float32)
    for datatype, dtype in (("INT64", np.int64), ("INT32", np.int32), ("INT8", np.int8)):
        inputs = [
            tensor("topk_weights", weights, "FP32"),
            tensor("hidden_states", x, "FP32"),
            tensor("topk_ids", ids.astype(dtype), datatype),
        ]
        reply = client.infer("layer-1", inputs, outputs=[triton.InferRequestedOutput("hidden_states")])
        results[datatype] = bool(np.array_equal(reply.as_numpy("hidden_states"), 2 * x))
    large = np.ones((40_000, 32), np.float32)  # 5 MB: above gRPC's own default of 4 MiB
    reply = client.infer("layer-2", [tensor("hidden_states", large[:16_000], "FP32")])
    results["large"] = bool(np.array_equal(reply.as_numpy("hidden_states"), 2 * large[:16_000]))
    results["too_many"] = error_of(lambda: client.infer("layer-2", [tensor("hidden_states", large, "FP32")]))
    results["unknown"] = error_of(lambda: client.infer("layer-9", [tensor("hidden_states", x, "FP32")]))
    results["bad_width"] = error_of(lambda: client.infer("layer-1", [tensor("hidden_states", x[:, :31], "FP32")]))
    bad_ids = [*inputs[:2], tensor("topk_ids", ids + 1, "INT64")]
    results["bad_ids"] = error_of(lambda: client.infer("layer-1", bad_ids))
    results["late"] = error_of(lambda: client.infer("layer-1", [tensor("hidden_states", x, "FP32")], timeout=0))
    results["compressed"] = error_of(
        lambda: client.infer("layer-1", [tensor("hidden_states", x, "FP32")], compression_algorithm="gzip")
    )
    return results


def streaming(address: str) -> dict:
    answers: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for number in range(10):
            x = np.full((2, 32), number, np.float32)
            model = "layer-5" if number == 4 else "layer-1"
            client.async_stream_infer(model, [tensor("hidden_states", x, "FP32")], request_id=str(number))
        seen = []
        for _ in range(10):
            result, error = answers.get(timeout=120)
            seen.append("error" if error else float(result.as_numpy("hidden_states")[0, 0]))
        client.stop_stream()
    return {"stream": seen}


def shared_memory(client) -> dict:
    x = np.arange(128, dtype=np.float32).reshape(4, 32)
    names = [f"{kind}-{uuid.uuid4().hex[:8]}" for kind in ("in", "out")]
    handles = [shm.create_shared_memory_region(name, f"/test-{name}", 4096) for name in names]
    results = {}
    try:
        shm.set_shared_memory_region(handles[0], [x], offset=256)
        for name in names:
            client.register_system_shared_memory(name, f"/test-{name}", 4096)
        results["twice"] = error_of(lambda: client.register_system_shared_memory(names[0], f"/test-{names[0]}", 4096))
        results["too_large"] = error_of(lambda: client.register_system_shared_memory("x", f"/test-{names[0]}", 40960))
        results["traversal"] = error_of(lambda: client.register_system_shared_memory("x", "../etc/passwd", 10))
        status = client.get_system_shared_memory_status(as_json=True)["regions"]
        results["status"] = sorted(status) == sorted(names) and status[names[0]]["key"] == f"/test-{names[0]}"
        sent = triton.InferInput("hidden_states", x.shape, "FP32")
        sent.set_shared_memory(names[0], x.nbytes, offset=256)
        wanted = triton.InferRequestedOutput("hidden_states")
        wanted.set_shared_memory(names[1], x.nbytes, offset=1024)
        reply = client.infer("layer-1", [sent], outputs=[wanted])
        output = reply.get_output("hidden_states")
        got = shm.get_contents_as_numpy(handles[1], np.float32, [4, 32], offset=1024)
        results["result"] = bool(np.array_equal(got, 2 * x))
        results["no_bytes"] = (
            len(reply.get_response().raw_output_contents) == 0 and "shared_memory_region" in output.parameters
        )
        mixed = [sent, tensor("topk_ids", np.zeros((4, 1), np.int32), "INT32")]
        mixed.append(tensor("topk_weights", np.ones((4, 1), np.float32), "FP32"))
        reply = client.infer("layer-1", mixed)
        results["mixed"] = bool(np.array_equal(reply.as_numpy("hidden_states"), 2 * x))
        sent.set_shared_memory(names[0], x.nbytes, offset=4000)
        results["out_of_bounds"] = error_of(lambda: client.infer("layer-1", [sent]))
        client.unregister_system_shared_memory(names[0])
        sent.set_shared_memory(names[0], x.nbytes)
        results["unregistered"] = error_of(lambda: client.infer("layer-1", [sent]))
        results["unregister_twice"] = error_of(lambda: client.unregister_system_shared_memory(names[0]))
        client.unregister_system_shared_memory()
        results["empty"] = client.get_system_shared_memory_status(as_json=True)
    finally:
        for handle in handles:
            shm.destroy_shared_memory_region(handle)
    return results


def statistics(client) -> dict:
    def of(name: str) -> dict:
        return client.get_inference_statistics(name, as_json=True)["model_stats"]

    x = np.ones((5, 32), np.float32)
    before = of("layer-7")
    for _ in range(3):
        client.infer("layer-7", [tensor("hidden_states", x, "FP32")])
    return {"before": before, "after": of("layer-7"), "all": [each["name"] for each in of("")]}


def main() -> None:
    address, socket = sys.argv[1:]
    found = {}
    with triton.InferenceServerClient(address) as client:
        found |= {"metadata": metadata(client), "inference": inference(client), "memory": shared_memory(client)}
        found["statistics"] = statistics(client)
    found |= streaming(address)
    with triton.InferenceServerClient(f"unix:{socket}") as client:
        found["socket"] = client.is_server_live()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
