"""Attention here, experts there: two tiny models generate with their experts in a service of two ranks.

    python examples/remote_experts.py

Writes a DeepSeek-V3-like and a gpt-oss-like checkpoint of random weights, starts `epserve serve` for each, loads the model
a second time without its experts, and compares the tokens of both. Takes about a minute on a laptop; no GPU is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig

import epserve.transformers

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
}
CONFIGS = {
    "DeepSeek-V3-like": DeepseekV3Config(
        **SMALL, intermediate_size=128, moe_intermediate_size=32, n_routed_experts=16, n_shared_experts=1, n_group=4,
        topk_group=2, first_k_dense_replace=1, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    ),
    "gpt-oss-like": GptOssConfig(
        **SMALL, intermediate_size=64, num_local_experts=16, num_key_value_heads=2, head_dim=16, sliding_window=16
    ),
}  # fmt: skip
START_S = 180


def write_checkpoint(config: transformers.PretrainedConfig, folder: Path) -> None:
    torch.manual_seed(1)
    config.initializer_range = 0.2  # larger than usual, so that random weights do not all say the same token
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@contextmanager
def service(checkpoint: Path, ranks: int) -> Iterator[str]:
    """`epserve serve` on `ranks` CPU ranks; yields its address."""
    ready, config = checkpoint / "ready.json", checkpoint / "service.yaml"
    settings = {"model": {"path": str(checkpoint)}, "engine": {"ranks": ranks, "device": "cpu"}, "server": {"port": 0}}
    config.write_text(json.dumps(settings))  # JSON is YAML
    command = [sys.executable, "-m", "epserve", "serve", str(config), "--ready-file", str(ready)]
    log = checkpoint / "service.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the service did not start (exit code {process.poll()}):\n{log.read_text()}")
            time.sleep(0.1)
        where = json.loads(ready.read_text())
        yield f"{where['host']}:{where['port']}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def weights_mib(model: torch.nn.Module) -> float:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 2**20


@torch.no_grad()
def compare(title: str, checkpoint: Path, address: str) -> bool:
    prompts = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(2))
    settings = {"do_sample": False, "max_new_tokens": 32, "min_new_tokens": 32, "pad_token_id": 0}
    local = AutoModelForCausalLM.from_pretrained(checkpoint)
    wanted = local.generate(input_ids=prompts, **settings)
    with epserve.transformers.connect(address) as experts:
        remote = AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation="epserve")
        start = time.perf_counter()
        tokens = remote.generate(input_ids=prompts, **settings)
        seconds = time.perf_counter() - start
    same = bool(torch.equal(tokens, wanted))
    print(
        f"{title}: {weights_mib(local):.2f} MiB of weights, {weights_mib(remote):.2f} MiB here and the experts of layers"
        f" {list(experts.model.layers)} in the service; 2 x 32 tokens in {seconds:.1f} s,"
        f" {'the same' if same else 'NOT the same'} as with local experts"
    )
    return same


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    same = True
    for title, config in CONFIGS.items():
        with tempfile.TemporaryDirectory(prefix="epserve-example-") as folder:
            write_checkpoint(config, Path(folder))
            with service(Path(folder), ranks=2) as address:
                same &= compare(title, Path(folder), address)
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
