"""Serves the Open Inference Protocol (KServe v2) through the same calls. A layer is a model, `layer-3` for layer 3.

Requests become ForwardRequests whose bytes stay in place (raw contents or shared memory), so that every check, limit and
message is that of the Experts service.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import grpc

from epserve import __version__
from epserve.errors import DeadlineExceeded, EpserveError, UnknownLayer
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import inference_pb2_grpc as kserve_grpc
from epserve.protocol import status
from epserve.server.calls import Caller, Calls, until_sent
from epserve.server.cuda_regions import CudaRegion

from . import described
from .messages import VERSION, timeout_s, to_forward_request, to_response


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
        try:
            self._layer(request.name, request.version)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        return described.metadata(request.name, self._calls.engine.info)

    async def ModelConfig(self, request, context: grpc.aio.ServicerContext) -> kserve.ModelConfigResponse:
        try:
            self._layer(request.name, request.version)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        calls = self._calls
        config = described.config(request.name, calls.engine.info, calls.limits.max_tokens_per_request)
        return kserve.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request, context: grpc.aio.ServicerContext) -> kserve.ModelStatisticsResponse:
        """Returns the counts of this server's requests, over whatever protocol they came, and of the ranks' steps."""
        try:
            if request.name:
                layers: tuple[int, ...] = (self._layer(request.name, request.version),)
            else:
                layers = tuple(self._calls.engine.layers)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        counts = self._calls.observer.layers
        stats = [described.statistics(f"layer-{layer}", counts.of(layer)) for layer in layers]
        return kserve.ModelStatisticsResponse(model_stats=stats)

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
            with until_sent() as held:
                return await self._infer(request, self._calls.caller(context), context.time_remaining(), held)
        except Exception as error:
            await status.abort(context, status.failure_of(error, request.id))

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[kserve.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> None:
        try:
            caller = self._calls.caller(context)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        answers: asyncio.Queue[tuple[asyncio.Task[kserve.ModelStreamInferResponse], ExitStack] | None]
        answers = asyncio.Queue(self._calls.limits.max_in_flight_per_stream)  # when it is full, nothing more is read
        tasks: set[asyncio.Task[Any]] = set()
        unsent: set[ExitStack] = set()
        """The resources that each request holds until its answer is written."""

        async def read() -> None:
            try:
                async for request in request_iterator:
                    held = ExitStack()
                    unsent.add(held)
                    task = asyncio.create_task(self._stream_answer(request, caller, context.time_remaining(), held))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    await answers.put((task, held))
            except Exception:
                await answers.put(None)
                raise
            # NOTE: this must not run after a cancel: no task takes answers then, and a full queue would wait for ever.
            await answers.put(None)

        await context.send_initial_metadata(())  # see StreamSession.run
        reader = asyncio.create_task(read())
        try:
            while (answer := await answers.get()) is not None:
                task, held = answer
                await self._write(context, await task)
                held.close()
                unsent.discard(held)
            await reader
        except EpserveError as error:  # the reader met bytes that are not a message
            await status.abort(context, status.failure_of(error))
        finally:
            for each in (reader, *tasks):
                each.cancel()
            await asyncio.gather(reader, *tasks, return_exceptions=True)
            for held in unsent:
                held.close()

    async def _write(self, context: grpc.aio.ServicerContext, answer: kserve.ModelStreamInferResponse) -> None:
        """Writes an answer. Raises DeadlineExceeded if the client does not read: later answers would stay here for ever."""
        limit = self._calls.default_deadline_s
        try:
            async with asyncio.timeout(limit):
                await status.write(context, answer)
        except TimeoutError:
            text = f"request {answer.infer_response.id!r}: its answer was not read within {limit:g} s"
            raise DeadlineExceeded(text) from None

    async def _stream_answer(
        self, request: kserve.ModelInferRequest, caller: Caller, remaining_s: float | None, held: ExitStack
    ) -> kserve.ModelStreamInferResponse:
        try:
            answer = await self._infer(request, caller, remaining_s, held)
            return kserve.ModelStreamInferResponse(infer_response=answer)
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
                uid=await self._calls.uid_of(context.peer()),
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
        """Unregisters a region. Requests that use it still finish. Its name is free at once."""
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
        """Describes the caller's own regions. The call renews their leases."""
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
        """Unregisters a region. Requests that use it still finish. Its name is free at once."""
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
        """Describes the caller's own regions on GPUs, as SystemSharedMemoryStatus does for others."""
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
        self, request: kserve.ModelInferRequest, caller: Caller, remaining_s: float | None, held: ExitStack
    ) -> kserve.ModelInferResponse:
        """Runs one request. held: takes the resources that it holds, as in `Calls.answer`."""
        calls = self._calls
        request_id = calls.request_id(request.id)
        deadline = calls.deadline(remaining_s, timeout_s(request.parameters))
        translated, contents = to_forward_request(request, self._layer(request.model_name, request.model_version))
        checked = calls.check(translated, request_id, caller)
        assembly = calls.door.assembly(checked)
        held.enter_context(calls.admitting(checked, caller))
        for which, data in contents.items():
            assembly.add(which, data)
        tensors, reply = await calls.run(checked, assembly.finish(), deadline, caller)
        return to_response(request, tensors[pb.HIDDEN_STATES], reply.not_finite_rows)
