"""SGLang with its experts in a service: the entry point of `sglang.srt.plugins`.

    EPSERVE_TARGET=10.0.0.5:50051 python -m sglang.launch_server --model-path MODEL --disable-cuda-graph

SGLang calls `register` in each of its processes. Without EPSERVE_TARGET in the environment nothing changes.
"""

from __future__ import annotations


def register() -> None:
    from epserve.client.engines.sglang.plugin import install

    install()
