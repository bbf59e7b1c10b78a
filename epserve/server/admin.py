"""Serves the Admin service: it moves experts and changes the number of ranks, for operators only."""

from __future__ import annotations

import grpc

from epserve.engine.face import EngineFace
from epserve.errors import PermissionDenied
from epserve.protocol import admin_pb2 as pb
from epserve.protocol import admin_pb2_grpc as pb_grpc
from epserve.protocol import status

from .calls import is_on_this_host


class AdminServicer(pb_grpc.AdminServicer):
    """Serves operators. guarded: the service requires tokens, and the interceptor lets only admins in."""

    def __init__(self, engine: EngineFace, *, guarded: bool):
        self._engine, self._guarded = engine, guarded

    async def Rebalance(self, request: pb.RebalanceRequest, context: grpc.aio.ServicerContext) -> pb.RebalanceReply:
        try:
            self._check(context)
            done = await self._engine.rebalance(request.explain)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        return pb.RebalanceReply(
            layers=done.layers,
            skipped=done.skipped,
            moved=done.moved,
            imbalance_before=done.before,
            imbalance_after=done.after,
            seconds=done.seconds,
            moves=[
                pb.LayerMoves(
                    layer=each.layer, moved=each.moved, bytes=each.nbytes, imbalance_before=each.before,
                    imbalance_after=each.after, reason=each.reason,
                )
                for each in done.moves
            ],
        )  # fmt: skip

    async def Scale(self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext) -> pb.ScaleReply:
        try:
            self._check(context)
            done = await self._engine.scale(request.ranks)
        except Exception as error:
            await status.abort(context, status.failure_of(error))
        return pb.ScaleReply(before=done.before, after=done.after, seconds=done.seconds, paused_seconds=done.paused_s)

    def _check(self, context: grpc.aio.ServicerContext) -> None:
        if not self._guarded and not is_on_this_host(context.peer()):
            raise PermissionDenied(
                f"{context.peer()} is on another machine and server.tokens_file is not set: Admin is for local callers,"
                " or for tokens that are marked admin"
            )
