"""Describes a layer as a model of the Open Inference Protocol: metadata, configuration, statistics. No I/O."""

from __future__ import annotations

from typing import Any

from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import wire
from epserve.server.codec import HIDDEN_DTYPES, ID_DTYPES, WEIGHT_DTYPES
from epserve.server.watch.layer_counts import LayerCount, Total

from .messages import DATATYPE_NAMES, INPUTS, OUTPUT, VERSION

PLATFORM = "epserve"
TAKEN = {"hidden_states": HIDDEN_DTYPES, "topk_ids": ID_DTYPES, "topk_weights": WEIGHT_DTYPES}


def metadata(name: str, info: Any) -> kserve.ModelMetadataResponse:
    """Returns the inputs and outputs of a layer. An input has one datatype there, and all of its own in `properties`."""
    tensor = kserve.ModelMetadataResponse.TensorMetadata
    widths = {"hidden_states": info.hidden, "topk_ids": info.top_k, "topk_weights": info.top_k}
    datatypes = _preferred(info)
    inputs = [tensor(name=each, datatype=datatypes[each], shape=(-1, widths[each])) for each in INPUTS]
    taken = {f"input_datatypes.{each}": ",".join(_taken(each)) for each in INPUTS}
    return kserve.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=inputs,
        outputs=[tensor(name=OUTPUT, datatype=datatypes["hidden_states"], shape=(-1, info.hidden))],
        properties=taken,
    )


def config(name: str, info: Any, max_tokens: int) -> kserve.ModelConfig:
    """Returns the configuration of a layer: its tokens are the batch, of `max_tokens` at most."""
    kinds = {each: f"TYPE_{datatype}" for each, datatype in _preferred(info).items()}
    routing = [
        kserve.ModelInput(name=each, data_type=kinds[each], dims=(info.top_k,), optional=True)
        for each in ("topk_ids", "topk_weights")
    ]
    hidden = kserve.ModelInput(name="hidden_states", data_type=kinds["hidden_states"], dims=(info.hidden,))
    return kserve.ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=max_tokens,
        input=[hidden, *routing],
        output=[kserve.ModelOutput(name=OUTPUT, data_type=kinds["hidden_states"], dims=(info.hidden,))],
    )


def statistics(name: str, count: LayerCount) -> kserve.ModelStatistics:
    """Returns the counts of a layer in the protocol's units."""
    times = kserve.InferStatistics(
        success=_duration(count.answered),
        fail=_duration(count.failed),
        queue=_duration(count.queue),
        compute_input=_duration(count.decoding),
        compute_infer=_duration(count.running),
        compute_output=_duration(count.encoding),
    )
    return kserve.ModelStatistics(
        name=name,
        version=VERSION,
        last_inference=round(count.last_at * 1e3),
        inference_count=count.tokens,
        execution_count=count.steps,
        inference_stats=times,
    )


def _preferred(info: Any) -> dict[str, str]:
    """Returns the datatype that each input is described with: the model's own for hidden states."""
    own = DATATYPE_NAMES[wire.DTYPES[str(info.dtype).removeprefix("torch.")]]
    return {"hidden_states": own, "topk_ids": "INT32", "topk_weights": "FP32"}


def _taken(name: str) -> list[str]:
    """Returns every datatype that the service takes for this input. FP8 is not one of this protocol's."""
    return [DATATYPE_NAMES[dtype] for dtype in TAKEN[name] if dtype in DATATYPE_NAMES]


def _duration(total: Total) -> kserve.StatisticDuration:
    return kserve.StatisticDuration(count=total.count, ns=round(total.seconds * 1e9))
