"""Turns requests of the Open Inference Protocol into ForwardRequests, and results into its responses. It does no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from epserve.errors import InvalidRequest
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import wire

DATATYPES = {
    "BF16": pb.BF16, "FP16": pb.FP16, "FP32": pb.FP32, "FP64": pb.FP64, "INT8": pb.INT8, "INT16": pb.INT16,
    "INT32": pb.INT32, "INT64": pb.INT64, "UINT8": pb.UINT8, "UINT16": pb.UINT16, "UINT32": pb.UINT32,
}  # fmt: skip
"""The datatypes that some input may have, or that get a better message than "unknown"."""
DATATYPE_NAMES = {dtype: name for name, dtype in DATATYPES.items()}
CONTENTS = {
    "FP32": "fp32_contents", "FP64": "fp64_contents", "INT8": "int_contents", "INT16": "int_contents",
    "INT32": "int_contents", "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents",
    "UINT32": "uint_contents",
}  # fmt: skip
PRIORITY_LEVELS = (pb.PRIORITY_UNSPECIFIED, pb.HIGH, pb.NORMAL, pb.LOW)
INPUTS = ("hidden_states", "topk_ids", "topk_weights")
OUTPUT = "hidden_states"
VERSION = "1"
"""The version of every layer."""
REGION_PARAMETERS = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
KEEP_NOT_FINITE, NOT_FINITE_ROWS = "keep_not_finite", "not_finite_rows"
"""The parameter of a request, and of its response: the numbers of rows with commas between them."""
REFUSED_PARAMETERS = ("classification", "sequence_id")
"""Extensions that would change the meaning of the answer. Other unknown parameters are ignored, as the protocol says."""


def to_forward_request(
    request: kserve.ModelInferRequest, layer: int
) -> tuple[pb.ForwardRequest, dict[pb.Field, bytes]]:
    """Returns the same request without its inline bytes, and those bytes. Raises InvalidRequest."""
    _check_parameters(request.parameters, "parameters")
    translated = pb.ForwardRequest(
        layer=layer, priority=_priority(request.parameters), keep_not_finite=_keep_not_finite(request.parameters)
    )
    contents: dict[pb.Field, bytes] = {}
    raw, fields = list(request.raw_input_contents), {name: which for which, name in wire.FIELDS.items()}
    seen = set()
    for each in request.inputs:
        name = each.name[:100]
        if name not in INPUTS or name in seen:
            known = ", ".join(INPUTS)
            raise InvalidRequest(f"inputs: {name!r} is unknown or there twice (inputs: {known})", field="inputs")
        seen.add(name)
        if each.datatype not in DATATYPES:
            known = ", ".join(DATATYPES)
            text = f"{name}: datatype {each.datatype[:100]!r} is not supported (supported: {known})"
            raise InvalidRequest(text, field=name)
        _check_parameters(each.parameters, name)
        region = _region(each.parameters, name)
        message = pb.Tensor(dtype=DATATYPES[each.datatype], shape=each.shape, region=region)
        getattr(translated, name).CopyFrom(message)
        if region is not None:
            if each.HasField("contents"):
                raise InvalidRequest(f"{name}: has contents and names a shared-memory region", field=name)
        elif request.raw_input_contents:
            if each.HasField("contents"):
                raise InvalidRequest(f"{name}: has contents while raw_input_contents came too", field=name)
            if not raw:
                raise InvalidRequest(f"raw_input_contents: none is left for {name}", field="raw_input_contents")
            contents[fields[name]] = raw.pop(0)
        else:
            contents[fields[name]] = _typed_bytes(each, name)
    if raw:
        text = f"raw_input_contents: {len(raw)} more than inputs that need one"
        raise InvalidRequest(text, field="raw_input_contents")
    for output in request.outputs:
        if output.name != OUTPUT or len(request.outputs) != 1:
            raise InvalidRequest(f"outputs: there is one output, {OUTPUT!r}", field="outputs")
        _check_parameters(output.parameters, "outputs")
        region = _region(output.parameters, "outputs")
        if region is not None:
            translated.output.CopyFrom(region)
    return translated, contents


def to_response(
    request: kserve.ModelInferRequest, result: wire.WireTensor, not_finite_rows: Sequence[int] = ()
) -> kserve.ModelInferResponse:
    """Returns the response with its one output: with the bytes, or with their place in a region."""
    output = kserve.ModelInferResponse.InferOutputTensor(
        name=OUTPUT, datatype=DATATYPE_NAMES[result.dtype], shape=result.shape
    )
    response = kserve.ModelInferResponse(
        model_name=request.model_name, model_version=VERSION, id=request.id, outputs=[output]
    )
    if not_finite_rows:
        response.parameters[NOT_FINITE_ROWS].string_param = ",".join(map(str, not_finite_rows))
    if result.region is None:
        response.raw_output_contents.append(bytes(result.data))
    else:
        values = (result.region.region, result.region.offset, result.region.byte_size)
        parameters = response.outputs[0].parameters
        parameters[REGION_PARAMETERS[0]].string_param = values[0]
        for name, value in zip(REGION_PARAMETERS[1:], values[1:], strict=True):
            parameters[name].int64_param = value
    return response


def _typed_bytes(each: kserve.ModelInferRequest.InferInputTensor, name: str) -> bytes:
    """Returns the bytes of typed contents. They are slow and for small tensors."""
    field = CONTENTS.get(each.datatype)
    if field is None:
        raise InvalidRequest(f"{name}: {each.datatype} needs raw_input_contents, it has no typed contents", field=name)
    others = [other.name for other, _ in each.contents.ListFields() if other.name != field]
    if others:
        raise InvalidRequest(f"{name}: {each.datatype} goes into {field}, but {others[0]} came", field=name)
    wide = np.asarray(getattr(each.contents, field), dtype=np.float64 if "fp" in field else np.int64)
    dtype = np.dtype(wire.DTYPE_NAMES[DATATYPES[each.datatype]]).newbyteorder("<")
    if dtype.kind in "iu" and wide.size:
        limits = np.iinfo(dtype)
        if wide.min() < limits.min or wide.max() > limits.max:
            text = f"{name}: holds {wide.min()} to {wide.max()}, outside of {each.datatype}"
            raise InvalidRequest(text, field=name)
    return wide.astype(dtype).tobytes()


def _region(parameters: Mapping[str, kserve.InferParameter], name: str) -> pb.RegionSlice | None:
    region, offset, size = REGION_PARAMETERS
    if region not in parameters:
        if offset in parameters or size in parameters:
            raise InvalidRequest(f"{name}: {offset} or {size} came without {region}", field=name)
        return None
    return pb.RegionSlice(
        region=_value(parameters, region, "string_param", name),
        offset=_number(parameters, offset, name) if offset in parameters else 0,
        byte_size=_number(parameters, size, name),
    )


def _number(parameters: Mapping[str, kserve.InferParameter], key: str, name: str) -> int:
    kind = "uint64_param" if parameters[key].HasField("uint64_param") else "int64_param"
    value = _value(parameters, key, kind, name)
    if value < 0:
        raise InvalidRequest(f"{name}: {key} is {value}", field=name)
    return value


def _value(parameters: Mapping[str, kserve.InferParameter], key: str, kind: str, name: str) -> Any:
    if key not in parameters or not parameters[key].HasField(kind):  # type: ignore[arg-type]
        raise InvalidRequest(f"{name}: parameter {key} must be there, as {kind}", field=name)
    return getattr(parameters[key], kind)


def _check_parameters(parameters: Mapping[str, kserve.InferParameter], name: str) -> None:
    for key in REFUSED_PARAMETERS:
        # NOTE: a protobuf map adds a missing key that is looked up
        if key in parameters and parameters[key].WhichOneof("parameter_choice"):
            raise InvalidRequest(f"{name}: parameter {key} is not supported", field=name)


def _priority(parameters: Mapping[str, kserve.InferParameter]) -> pb.Priority:
    """Reads the protocol's `priority`: 1 is the highest, 0 the default. Here 1, 2 and 3 are HIGH, NORMAL and LOW."""
    level = _number(parameters, "priority", "parameters") if "priority" in parameters else 0
    if level >= len(PRIORITY_LEVELS):
        raise InvalidRequest(
            f"parameters: priority {level}, must be 1 (high), 2 (normal), 3 (low) or 0", field="priority"
        )
    return PRIORITY_LEVELS[level]


def _keep_not_finite(parameters: Mapping[str, kserve.InferParameter]) -> bool:
    """Reads a parameter of our own: rows that are not finite come as they are, and the response names them."""
    return KEEP_NOT_FINITE in parameters and _value(parameters, KEEP_NOT_FINITE, "bool_param", "parameters")


def timeout_s(parameters: Mapping[str, kserve.InferParameter]) -> float | None:
    """Reads the protocol's `timeout`, in microseconds (0: none), as seconds."""
    micros = _number(parameters, "timeout", "parameters") if "timeout" in parameters else 0
    return micros / 1e6 if micros else None
