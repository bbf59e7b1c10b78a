"""Serves the Experts service: thin methods that turn messages into calls, and errors into statuses."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

import grpc

from epserve import __version__
from epserve.errors import EpserveError, InvalidRequest
from epserve.modular_kernel.measured.selection import Choice
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import status
from epserve.protocol.messages import Outgoing, Received
from epserve.protocol.served_model import model_reply

from .calls import Calls, until_sent
from .doorbell import Doorbell
from .lanes.door import LaneDoor
from .region import Region
from .stream import StreamSession

log = logging.getLogger("epserve.server")


class ExpertsServicer(pb_grpc.ExpertsServicer):
    def __init__(self, calls: Calls, doorbell: Doorbell, lanes: LaneDoor):
        self._calls, self._doorbell, self._lanes = calls, doorbell, lanes
        self._started = time.monotonic()

    async def Forward(self, request: Received, context: grpc.aio.ServicerContext) -> Outgoing:  # type: ignore[override]
        return await self._single(request, context, backward=False)

    async def Backward(self, request: Received, context: grpc.aio.ServicerContext) -> Outgoing:  # type: ignore[override]
        return await self._single(request, context, backward=True)

    async def _single(self, request: Received, context: grpc.aio.ServicerContext, *, backward: bool) -> Outgoing:
        try:
            check_method(request.header, backward)
            with until_sent() as held:
                return await self._calls.answer(request, context.time_remaining(), self._calls.caller(context), held)
        except Exception as error:
            await status.abort(context, status.failure_of(error, request.header.request_id))

    async def ForwardStream(self, request_iterator, context: grpc.aio.ServicerContext) -> None:
        await StreamSession(self._calls, context).run()

    async def HoldRegion(self, request: pb.HoldRegionRequest, context: grpc.aio.ServicerContext) -> None:
        regions = self._calls.regions
        region: Region
        try:
            caller = self._calls.caller(context)
            self._calls.check_may_use_regions(caller)
            window: dict[str, Any] = {
                "key": request.key,
                "offset": request.offset,
                "size": request.byte_size,
                "proof": request.proof,
            }
            if request.HasField("cuda"):
                cuda = self._calls.cuda_regions
                region = await cuda.register_proven(caller.account.name, memory=request.cuda, **window)
            else:
                region = regions.register_proven(caller.account.name, **window)
                await regions.share(region)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        key = self._doorbell.register(caller)
        name = self._doorbell.name if key else ""
        try:
            reply = pb.HoldRegionReply(region=region.name, doorbell=name, doorbell_key=key)
            await status.write(context, reply)
            await self._calls.draining.wait()  # a client that ends the call, or dies, cancels this
        finally:
            regions.forget(region)
            self._doorbell.forget(key)

    async def OpenLane(self, request: pb.OpenLaneRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            lane, reply = await self._lanes.open(request, self._calls.caller(context))
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        try:
            await status.write(context, reply)
            await self._lanes.hold(lane)  # a client that ends the call, or dies, cancels this
        except EpserveError as error:
            await status.abort(context, status.failure_of(error))
        finally:
            self._lanes.close(lane)

    async def ListRegions(
        self, request: pb.ListRegionsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRegionsReply:
        try:
            caller = self._calls.caller(context)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        return pb.ListRegionsReply(
            regions=[
                pb.RegionInfo(
                    region=region.name,
                    key=region.key,
                    offset=region.offset,
                    byte_size=region.size,
                    users=region.users,
                    gpu_uuid=region.gpu_uuid,
                )
                for region in self._calls.regions.of(caller.account.name)
            ]
        )

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelReply:
        engine = self._calls.engine
        return model_reply(engine.info, engine.layers, self._calls.limits)

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.GetStatusReply:
        engine, seen = self._calls.engine.status(), self._calls.observer
        ranks = [
            pb.RankStatus(
                rank=rank.rank,
                node=rank.node,
                pid=rank.pid,
                device=rank.device,
                gpu_uuid=rank.gpu_uuid,
                experts=rank.experts,
                tokens_done=rank.tokens_done,
                weights_bytes=rank.weights_bytes,
                alive=rank.alive,
                phase=rank.phase,
                expert_tokens=seen.recent_slots(rank.rank),
                late_compiles=rank.late_compiles,
                phase_seconds=seen.phases_of(rank.rank),
                layer_experts=[
                    pb.LayerExperts(layer=layer, experts=experts) for layer, experts in rank.layer_experts.items()
                ],
                experts_choices=[_choice(each) for each in rank.experts_choices],
            )
            for rank in engine.ranks
        ]
        return pb.GetStatusReply(
            state=engine.state,
            generation=engine.generation,
            steps=engine.steps,
            ranks=ranks,
            queue_tokens=engine.queue_tokens,
            backends=engine.backends,
            recoveries=engine.recoveries,
            replayed_requests=engine.replayed_requests,
            calls_in_flight=self._calls.in_flight,
            buffered_bytes=self._calls.buffered_bytes,
            uptime_s=time.monotonic() - self._started,
            latency=pb.Latency(**asdict(seen.latency())),
            rates=pb.Rates(**seen.rates()),
            server_version=__version__,
            spares=engine.spares,
            rebalances=engine.rebalances,
            rebalances_skipped=engine.rebalances_skipped,
            missing_experts=[
                pb.LayerExperts(layer=layer, experts=experts) for layer, experts in engine.missing_experts.items()
            ],
            front_ends=engine.front_ends,
            lanes=self._lanes.shown(),
        )


def check_method(request: pb.ForwardRequest, backward: bool) -> None:
    """Raises InvalidRequest for a Forward with output_gradients, and for a Backward without."""
    name = "output_gradients"
    if backward and not request.HasField(name):
        raise InvalidRequest(f"{name}: missing; Backward needs the gradients of the result", field=name)
    if not backward and request.HasField(name):
        raise InvalidRequest(f"{name}: Forward takes none; call Backward for gradients", field=name)


def _choice(each: Choice) -> pb.ExpertsChoice:
    times = {name: seconds * 1e6 for name, seconds in each.seconds.items()}
    return pb.ExpertsChoice(rows=each.rows, backend=each.backend, microseconds=times)
