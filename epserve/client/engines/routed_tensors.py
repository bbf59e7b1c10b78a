"""Which tensors of a checkpoint are those of routed experts, by their names, so that an engine does not read them."""

from __future__ import annotations

import re

_ROUTED = re.compile(
    r"(?:^|\.)(?:experts\.(?!e_score_correction_bias|correction_bias)|block_sparse_moe\.(?:in|out)put_linear\.)"
)
"""In any layout, scales and biases too. The second form is Granite's."""


def is_routed(name: str) -> bool:
    return _ROUTED.search(name) is not None
