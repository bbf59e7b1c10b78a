"""examples/torchrun_layer.py: the modular kernel in a plain torch program, on two ranks, without Ray and gRPC."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "torchrun_layer.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def launch(*options: str) -> str:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE, *options]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PAIRS = [
    ("all_to_all", "grouped_mm", "--num-experts", "5", "--top-k", "2"),  # uneven experts a rank
    ("allgather_reducescatter", "loop", "--tokens", "1"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a host with GPUs runs the GPU row")
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_two_cpu_ranks(pair):
    out = launch("--all2all", pair[0], "--experts", pair[1], *pair[2:])
    assert out.count("relative error") == 2 and "rank 0 of 2, cpu" in out and "rank 1 of 2, cpu" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a host with GPUs runs the GPU row")
def test_two_ranks_with_open_mpis_names():
    """mpirun sets these; torch reads the master's address by itself."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    for rank in range(2):
        names = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": rank,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        environment = ENVIRONMENT | {name: str(value) for name, value in names.items()}
        words = [sys.executable, EXAMPLE, "--repeat", "1"]
        processes.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "rank 0 of 2" in outputs[0] and "rank 1 of 2" in outputs[1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_gpus():
    out = launch("--dtype", "bfloat16", "--hidden", "1024", "--intermediate", "512")
    assert out.count("relative error") == 2 and "cuda:1" in out


def test_one_process_needs_no_launcher_and_imports_neither_ray_nor_grpc():
    code = (
        "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__');"
        "print(sorted({'ray', 'grpc', 'pydantic'} & sys.modules.keys()))"
    )
    words = [sys.executable, "-c", code, EXAMPLE, "--repeat", "1"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1" in done.stdout and done.stdout.splitlines()[-1] == "[]"
