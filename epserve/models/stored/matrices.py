"""Turns a checkpoint's tensors into matrices, each with its layout, and reads them.

`stored_tensors` finds, by names and dtypes, which tensors together are one matrix. A matrix that cannot be read gets a
`problem`, which is raised when the matrix is wanted. Other parts of a model may be stored in unknown ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from epserve.errors import CheckpointError
from epserve.models.tensors import DTYPES, FLOATS, TensorInfo, TensorReader, check_values

from .declared import Declared, Rule
from .layouts import LAYOUTS, PLAIN, Layout, StoredTensor

FLOAT_NAMES = frozenset(name for name, dtype in DTYPES.items() if dtype in FLOATS)
BY_METHOD = {"awq": ("awq",), "gptq": ("gptq",)}
"""Layouts with the same names of tensors. Only the declared method tells them apart."""
_ENDINGS = {layout: layout.codes.replace("{name}", "").replace("{module}", "") for layout in LAYOUTS}
_SAME_NAME = tuple(layout for layout in LAYOUTS if not _ENDINGS[layout])
_OTHER_NAME = tuple((ending, layout) for layout, ending in _ENDINGS.items() if ending)


def stored_tensors(tensors: Mapping[str, TensorInfo], declared: Declared) -> dict[str, StoredTensor]:
    """Returns matrices by the names that the model knows. Companions (scales, zero points) are part of their matrix."""
    found: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for info in tensors.values():
        for logical, layout in _candidates(info, declared):
            parts = _parts(tensors, info, logical, layout)
            if parts is not None:
                found[logical] = _stored(logical, layout, parts, declared)
                used.update(part.name for part in parts.values())
                break
    for name, info in tensors.items():
        if name not in used:
            problem = "" if info.dtype in FLOAT_NAMES or not _is_code(info) else _lonely(info)
            plain = StoredTensor(name=name, shape=info.shape, layout=PLAIN, parts={"weight": info}, problem=problem)
            found.setdefault(name, plain)
    return found


def _candidates(info: TensorInfo, declared: Declared) -> Iterator[tuple[str, Layout]]:
    if info.dtype in FLOAT_NAMES:
        return
    for ending, layout in _OTHER_NAME:
        if info.name.endswith(ending) and info.dtype in layout.dtypes:
            if layout.name in BY_METHOD and declared.method not in BY_METHOD[layout.name]:
                continue
            stem = info.name.removesuffix(ending)
            yield (f"{stem}.weight" if layout.codes.startswith("{module}") else stem), layout
    for layout in _SAME_NAME:
        if info.dtype in layout.dtypes:
            yield info.name, layout


def _parts(
    tensors: Mapping[str, TensorInfo], codes: TensorInfo, name: str, layout: Layout
) -> dict[str, TensorInfo] | None:
    """Returns role -> tensor. None: the codes are not in this layout."""
    module = name.removesuffix(".weight")

    def first(templates: tuple[str, ...]) -> TensorInfo | None:
        names = (each.format(name=name, module=module) for each in templates)
        return next((tensors[each] for each in names if each in tensors and each != codes.name), None)

    if first(layout.foreign) is not None:
        return None
    parts = {"weight": codes}
    for role, templates in layout.parts.items():
        if (part := first(templates)) is None:
            return None
        parts[role] = part
    if parts["weight_scale"].dtype not in layout.scales:
        return None
    return parts | {role: part for role, each in layout.optional.items() if (part := first(each)) is not None}


def _stored(name: str, layout: Layout, parts: Mapping[str, TensorInfo], declared: Declared) -> StoredTensor:
    rule = (declared.rule(name) if declared.method else None) or Rule()
    codes = parts["weight"]
    try:
        if not declared.method:
            raise CheckpointError(
                f"tensor {codes.name} is stored as {layout.name}, and neither a quantization_config in config.json nor a"
                " file beside it declares that"
            )
        shape = layout.shape(parts, rule)
        block = layout.block(shape, parts, rule)
    except CheckpointError as error:
        return StoredTensor(name=name, shape=codes.shape, layout=layout, parts=parts, rule=rule, problem=str(error))
    if layout.swapped:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return StoredTensor(name=name, shape=shape, layout=layout, parts=parts, rule=rule, block=block)


def _is_code(info: TensorInfo) -> bool:
    return len(info.shape) > 1 and info.dtype in ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")


def _lonely(info: TensorInfo) -> str:
    wanted = sorted({layout.name for layout in LAYOUTS if info.dtype in layout.dtypes})
    scale = f"{info.name}_scale_inv" if info.dtype == "F8_E4M3" else "its scales"
    known = ", ".join(sorted({layout.name for layout in LAYOUTS}))
    hint = (
        f"; {scale} is missing" if info.dtype == "F8_E4M3" else f"; that could be {', '.join(wanted)}" if wanted else ""
    )
    return f"tensor {info.name} is stored as {info.dtype} and is in none of the known layouts ({known}){hint}"


class StoredReader:
    """Reads matrices through a TensorReader. A result of `parts` is valid until the next read."""

    def __init__(self, reader: TensorReader):
        self.files = reader

    def parts(self, stored: StoredTensor, index: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the tensors of a matrix, or of expert `index` in a stack. Raises CheckpointError for values not finite."""
        stored.check()
        stack = stored.parts["weight"].shape[0]
        found = {}
        for role, info in stored.parts.items():
            own = index is not None and info.shape[:1] == (stack,)
            found[role] = self.files.read(info, index if own else None, buffer=role)
            if found[role].dtype.is_floating_point:
                check_values(info.name if not own else f"{info.name}[{index}]", found[role], found[role].dtype)
        return found

    def values(self, stored: StoredTensor, index: int | None = None) -> torch.Tensor:
        """Returns the matrix multiplied out, float32 `(..., out, in)`. A matrix without quantisation keeps its dtype.

        The memory is the caller's own.
        """
        if not stored.quantised:
            stored.check()
            return self.files.read(stored.parts["weight"], index).clone()
        return stored.layout.values(self.parts(stored, index), stored)

    def read(self, stored: StoredTensor, index: int | None = None) -> torch.Tensor:
        """Returns the same as `values`, in the model's own orientation."""
        value = self.values(stored, index)
        return value.transpose(-1, -2).contiguous() if stored.layout.swapped else value
