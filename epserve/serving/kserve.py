"""The Open Inference Protocol (KServe v2): a second face of the same calls. A layer is a model, `layer-3` for layer 3.

Requests become ForwardRequests whose bytes stay where they are (raw contents or shared memory), so that every check, limit
and message is that of the Experts service.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import numpy as np

from epserve import __version__
from epserve.errors import DeadlineExceeded, EpserveError, InvalidRequest, UnknownLayer
from epserve.serving import epserve_pb2 as pb
from epserve.serving import inference_pb2 as kserve
from epserve.serving import inference_pb2_grpc as kserve_grpc
from epserve.serving import status, wire
from epserve.serving.calls import Caller, Calls
from epserve.serving.cuda_regions import CudaRegion

DATATYPES = {
    "BF16": pb.BF16, "FP16": pb.FP16, "FP32": pb.FP32, "FP64": pb.FP64, "INT8": pb.INT8, "INT16": pb.INT16,
    "INT32": pb.INT32, "INT64": pb.INT64, "UINT8": pb.UINT8, "UINT16": pb.UINT16, "UINT32": pb.UINT32,
}  # fmt: skip
"""Those that some input may have or that get a better message than "unknown"."""
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
REGION_PARAMETERS = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
REFUSED_PARAMETERS = ("classification", "sequence_id")
"""Extensions that would change what the answer means; other unknown parameters are ignored, as the protocol says."""


class InferenceServicer(kserve_grpc.GRPCInferenceServiceServicer):
    def __init__(self, calls: Calls):
        self._calls = calls

    async def ServerLive(self, request, context: grpc.aio.ServicerContext) -> kserve.ServerLiveResponse:
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(self, request, context: grpc.aio.ServicerContext) -> kserve.ServerReadyResponse:
        return kserve.ServerReadyResponse(ready=self._serving)

    async def ModelReady(self, request, context: grpc.aio.ServicerContext) -> kserve.ModelReadyResponse:
        try:
            self._layer(request.name, request.version)
        except UnknownLayer:
            return kserve.ModelReadyResponse(ready=False)
        return kserve.ModelReadyResponse(ready=self._serving)

    async def ServerMetadata(self, request, context: grpc.aio.ServicerContext) -> kserve.ServerMetadataResponse:
        extensions = ["system_shared_memory"] if self._calls.limits.regions else []
        if self._calls.cuda_regions.offered:
            extensions.append("cuda_shared_memory")
        return kserve.ServerMetadataResponse(name="epserve", version=__version__, extensions=extensions)

    async def ModelMetadata(self, request, context: grpc.aio.ServicerContext) -> kserve.ModelMetadataResponse:
        info = self._calls.engine.info
        try:
            self._layer(request.name, request.version)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        metadata = kserve.ModelMetadataResponse.TensorMetadata
        datatype = DATATYPE_NAMES[wire.DTYPES[str(info.dtype).removeprefix("torch.")]]
        hidden = metadata(name="hidden_states", datatype=datatype, shape=(-1, info.hidden))
        ids = metadata(name="topk_ids", datatype="INT32", shape=(-1, info.top_k))
        weights = metadata(name="topk_weights", datatype="FP32", shape=(-1, info.top_k))
        return kserve.ModelMetadataResponse(
            name=request.name, versions=[VERSION], platform="epserve", inputs=[hidden, ids, weights], outputs=[hidden]
        )

    async def RepositoryIndex(self, request, context: grpc.aio.ServicerContext) -> kserve.RepositoryIndexResponse:
        state = "READY" if self._serving else "UNAVAILABLE"
        if request.ready and not self._serving:
            return kserve.RepositoryIndexResponse()
        index = kserve.RepositoryIndexResponse.ModelIndex
        layers = self._calls.engine.layers
        models = [index(name=f"layer-{layer}", version=VERSION, state=state) for layer in layers]
        return kserve.RepositoryIndexResponse(models=models)

    async def ModelInfer(self, request, context: grpc.aio.ServicerContext) -> kserve.ModelInferResponse:
        try:
            return await self._infer(request, self._calls.caller(context), context.time_remaining())
        except Exception as error:
            await status.abort(context, status.failure_of(error, request.id))

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[kserve.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> None:
        try:
            caller = self._calls.caller(context)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        answers: asyncio.Queue[asyncio.Task[kserve.ModelStreamInferResponse] | None]
        answers = asyncio.Queue(self._calls.limits.max_in_flight_per_stream)  # full: nothing more is read
        tasks: set[asyncio.Task[Any]] = set()

        async def read() -> None:
            try:
                async for request in request_iterator:
                    task = asyncio.create_task(self._stream_answer(request, caller, context.time_remaining()))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    await answers.put(task)
            finally:
                await answers.put(None)

        await context.send_initial_metadata(())  # see StreamSession.run
        reader = asyncio.create_task(read())
        try:
            while (task := await answers.get()) is not None:
                await self._write(context, await task)
            await reader
        except EpserveError as error:  # of reading: bytes that are no message
            await status.abort(context, status.failure_of(error))
        finally:
            for each in (reader, *tasks):
                each.cancel()
            await asyncio.gather(reader, *tasks, return_exceptions=True)

    async def _write(self, context: grpc.aio.ServicerContext, answer: kserve.ModelStreamInferResponse) -> None:
        """Raises DeadlineExceeded where nobody reads: the answers behind this one would lie here for ever."""
        limit = self._calls.default_deadline_s
        try:
            async with asyncio.timeout(limit):
                await status.write(context, answer)
        except TimeoutError:
            text = f"request {answer.infer_response.id!r}: its answer was not read within {limit:g} s"
            raise DeadlineExceeded(text) from None

    async def _stream_answer(
        self, request: kserve.ModelInferRequest, caller: Caller, remaining_s: float | None
    ) -> kserve.ModelStreamInferResponse:
        try:
            return kserve.ModelStreamInferResponse(infer_response=await self._infer(request, caller, remaining_s))
        except Exception as error:
            failure = status.failure_of(error, request.id)
            self._calls.observer.error(failure.code)
            unanswered = kserve.ModelInferResponse(model_name=request.model_name, id=request.id)
            return kserve.ModelStreamInferResponse(error_message=failure.message, infer_response=unanswered)

    async def SystemSharedMemoryRegister(
        self, request, context: grpc.aio.ServicerContext
    ) -> kserve.SystemSharedMemoryRegisterResponse:
        try:
            regions = self._calls.regions
            region = regions.register_leased(
                self._region_owner(context),
                name=request.name,
                key=request.key,
                offset=request.offset,
                size=request.byte_size,
            )
            await regions.share(region)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        return kserve.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request, context: grpc.aio.ServicerContext
    ) -> kserve.SystemSharedMemoryUnregisterResponse:
        """Requests that are using the region still finish; its name is free at once."""
        try:
            owner = self._region_owner(context)
            if request.name:
                self._calls.regions.unregister(owner, request.name)
            else:
                self._calls.regions.unregister_all(owner)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        return kserve.SystemSharedMemoryUnregisterResponse()

    async def SystemSharedMemoryStatus(
        self, request, context: grpc.aio.ServicerContext
    ) -> kserve.SystemSharedMemoryStatusResponse:
        """Of the caller's own regions. Asking renews their leases."""
        try:
            owner = self._region_owner(context)
            if request.name:
                found = [self._calls.regions.find(owner, request.name, "name", on_gpu=False)]
            else:
                found = self._calls.regions.of(owner, on_gpu=False)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        response = kserve.SystemSharedMemoryStatusResponse()
        for region in found:
            region.renew()
            entry = response.regions[region.name]
            entry.name, entry.key, entry.offset, entry.byte_size = region.name, region.key, region.offset, region.size
        return response

    async def CudaSharedMemoryRegister(
        self, request, context: grpc.aio.ServicerContext
    ) -> kserve.CudaSharedMemoryRegisterResponse:
        try:
            owner = self._region_owner(context)
            await self._calls.cuda_regions.register_leased(
                owner, name=request.name, handle=request.raw_handle, device_id=request.device_id, size=request.byte_size
            )
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        return kserve.CudaSharedMemoryRegisterResponse()

    async def CudaSharedMemoryUnregister(
        self, request, context: grpc.aio.ServicerContext
    ) -> kserve.CudaSharedMemoryUnregisterResponse:
        """Requests that are using the region still finish; its name is free at once."""
        try:
            owner = self._region_owner(context)
            if request.name:
                self._calls.regions.unregister(owner, request.name, on_gpu=True)
            else:
                self._calls.regions.unregister_all(owner, on_gpu=True)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        return kserve.CudaSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
        self, request, context: grpc.aio.ServicerContext
    ) -> kserve.CudaSharedMemoryStatusResponse:
        """As SystemSharedMemoryStatus."""
        try:
            owner = self._region_owner(context)
            if request.name:
                found = [self._calls.regions.find(owner, request.name, "name", on_gpu=True)]
            else:
                found = self._calls.regions.of(owner, on_gpu=True)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        response = kserve.CudaSharedMemoryStatusResponse()
        for region in found:
            assert isinstance(region, CudaRegion)
            region.renew()
            entry = response.regions[region.name]
            entry.name, entry.device_id, entry.byte_size = region.name, region.device_id, region.size
        return response

    @property
    def _serving(self) -> bool:
        return self._calls.engine.state() == "serving" and not self._calls.draining.is_set()

    def _region_owner(self, context: grpc.aio.ServicerContext) -> str:
        caller = self._calls.caller(context)
        self._calls.check_may_use_regions(caller)
        return caller.account.name

    def _layer(self, name: str, version: str) -> int:
        matched = re.fullmatch(r"layer-(0|[1-9][0-9]{0,8})", name)
        if matched is None or int(matched[1]) not in self._calls.engine.layers:
            served = ", ".join(f"layer-{layer}" for layer in self._calls.engine.layers)
            raise UnknownLayer(f"model_name: {name[:100]!r} is not served (served: {served})", field="model_name")
        if version not in ("", VERSION):
            text = f"model_version: {version[:100]!r} of {name!r} is not served (served: {VERSION})"
            raise UnknownLayer(text, field="model_version")
        return int(matched[1])

    async def _infer(
        self, request: kserve.ModelInferRequest, caller: Caller, remaining_s: float | None
    ) -> kserve.ModelInferResponse:
        calls = self._calls
        request_id = calls.request_id(request.id)
        deadline = calls.deadline(remaining_s, _timeout_s(request.parameters))
        translated, contents = to_forward_request(request, self._layer(request.model_name, request.model_version))
        checked = calls.check(translated, request_id, caller)
        assembly = self._calls.door.assembly(checked)
        with calls.admitted(checked, caller):
            for which, data in contents.items():
                assembly.add(which, data)
            tensors, _ = await calls.run(checked, assembly.finish(), deadline, caller)
        result = tensors[pb.HIDDEN_STATES]
        output = kserve.ModelInferResponse.InferOutputTensor(
            name=OUTPUT, datatype=DATATYPE_NAMES[result.dtype], shape=result.shape
        )
        response = kserve.ModelInferResponse(
            model_name=request.model_name, model_version=VERSION, id=request.id, outputs=[output]
        )
        if result.region is None:
            response.raw_output_contents.append(bytes(result.data))
        else:
            values = (result.region.region, result.region.offset, result.region.byte_size)
            parameters = response.outputs[0].parameters
            parameters[REGION_PARAMETERS[0]].string_param = values[0]
            for name, value in zip(REGION_PARAMETERS[1:], values[1:], strict=True):
                parameters[name].int64_param = value
        return response


def to_forward_request(
    request: kserve.ModelInferRequest, layer: int
) -> tuple[pb.ForwardRequest, dict[pb.Field, bytes]]:
    """The same request without its inline bytes, and those. Raises InvalidRequest."""
    _check_parameters(request.parameters, "parameters")
    translated = pb.ForwardRequest(layer=layer, priority=_priority(request.parameters))
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


def _typed_bytes(each: kserve.ModelInferRequest.InferInputTensor, name: str) -> bytes:
    """The bytes of typed contents, which are slow and for small tensors."""
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
        # NOTE: looking a missing key up in a protobuf map adds it
        if key in parameters and parameters[key].WhichOneof("parameter_choice"):
            raise InvalidRequest(f"{name}: parameter {key} is not supported", field=name)


def _priority(parameters: Mapping[str, kserve.InferParameter]) -> pb.Priority:
    """The protocol's `priority`: 1 is the highest, 0 the default; here 1, 2 and 3 are HIGH, NORMAL and LOW."""
    level = _number(parameters, "priority", "parameters") if "priority" in parameters else 0
    if level >= len(PRIORITY_LEVELS):
        raise InvalidRequest(
            f"parameters: priority {level}, must be 1 (high), 2 (normal), 3 (low) or 0", field="priority"
        )
    return PRIORITY_LEVELS[level]


def _timeout_s(parameters: Mapping[str, kserve.InferParameter]) -> float | None:
    """The protocol's `timeout`, in microseconds; 0 is none."""
    micros = _number(parameters, "timeout", "parameters") if "timeout" in parameters else 0
    return micros / 1e6 if micros else None
