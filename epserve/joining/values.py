"""Values between a joined front end and the process that orders the steps, as JSON and back.

Times are relative (seconds from now, seconds ago), since clocks of hosts need not agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from epserve import errors
from epserve.engine.records import StepRecord
from epserve.errors import EpserveError, InternalError
from epserve.link.wire import DTYPES, NAMES
from epserve.modular_kernel import Activation, GateSpec


def error_as_json(error: BaseException) -> dict[str, Any]:
    """Returns an error for the other side. A defect loses its text, which is in the log of its process."""
    if not isinstance(error, EpserveError):
        error = InternalError("internal error; the log of the process that orders the steps has the details")
    known = {
        name: getattr(error, name) for name in ("field", "retry_after_s", "layer", "experts") if hasattr(error, name)
    }
    return {"class": type(error).__name__, "message": str(error), **known}


def error_from_json(value: Mapping[str, Any]) -> EpserveError:
    """Returns an error of the same class with the same text, without its constructor."""
    cls = getattr(errors, str(value.get("class")), None)
    if not (isinstance(cls, type) and issubclass(cls, EpserveError)):
        cls = InternalError
    error = cls.__new__(cls)
    Exception.__init__(error, value.get("message", ""))
    for name in ("field", "retry_after_s", "layer", "experts"):
        if name in value:
            setattr(error, name, tuple(value[name]) if isinstance(value[name], list) else value[name])
    return error


def model_as_json(info: Any, layers: Sequence[int]) -> dict[str, Any]:
    """Returns the fields of a ModelInfo that a front end shows and checks requests with."""
    names = "family", "name", "hidden", "intermediate", "num_experts", "top_k", "shared_intermediate", "fingerprint"
    return {
        **{name: getattr(info, name) for name in names},
        "dtype": NAMES[info.dtype],
        "activation": asdict(info.activation),
        "gate": asdict(info.gate),
        "quantisation": info.quant.scheme,
        "layers": list(layers),
    }


def model_from_json(value: Mapping[str, Any]) -> SimpleNamespace:
    """Returns an object with the same fields as the ModelInfo."""
    read = dict(value)
    read["dtype"] = DTYPES[read["dtype"]]
    read["layers"] = tuple(read["layers"])
    read["activation"] = Activation(**read["activation"])
    read["gate"] = GateSpec(**read["gate"])
    read["quant"] = SimpleNamespace(scheme=read.pop("quantisation"))
    return SimpleNamespace(**read)


def record_as_json(record: StepRecord, now: float) -> dict[str, Any]:
    """Returns a record without its parts."""
    return {
        "step": record.step,
        "layer": record.layer,
        "mode": record.mode,
        "tokens_per_rank": list(record.tokens_per_rank),
        "started": now - record.started,
        "ended": now - record.ended,
        "phases": [dict(phases) for phases in record.phases],
    }


OBJECT = "@"


def plain(value: Any) -> Any:
    """Returns a dataclass, a namespace or a mapping as plain JSON objects. `made` undoes it."""
    if isinstance(value, Mapping):
        return dict(value)
    names = [each.name for each in fields(value)] if is_dataclass(value) else vars(value)
    return {OBJECT: {name: getattr(value, name) for name in names}}


def made(value: dict[str, Any]) -> Any:
    """Returns an object for each object of `plain`, and dicts with numbers as keys again, since JSON has only strings."""
    if OBJECT in value:
        return SimpleNamespace(**value[OBJECT])
    return {int(key): each for key, each in value.items()} if value and all(map(str.isdigit, value)) else value
