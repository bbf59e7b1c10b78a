"""vLLM with its experts in a service: the entry point of `vllm.general_plugins`.

    vllm serve MODEL --additional-config '{"epserve": {"target": "10.0.0.5:50051"}}'

vLLM calls `register` in each of its processes. Without that setting, or EPSERVE_TARGET in the environment, nothing changes.
"""

from __future__ import annotations


def register() -> None:
    from epserve.client.engines.vllm.plugin import install

    install()
