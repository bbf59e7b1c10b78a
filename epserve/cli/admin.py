"""`epserve rebalance` and `epserve scale`: an operator's commands to a running service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from epserve.client import Tls

Address = Annotated[str, typer.Argument(help="host:port of a service.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File whose first word is the token of an admin.", exists=True, dir_okay=False)
]
Authority = Annotated[
    Path | None,
    typer.Option(help="Certificate authority of the server; turns TLS on.", exists=True, dir_okay=False, readable=True),
]
Certificate = Annotated[
    Path | None,
    typer.Option(
        help="Our own certificate, where the server wants one (server.tls_client_ca).", exists=True, dir_okay=False
    ),
]
Key = Annotated[Path | None, typer.Option(help="The key of --tls-cert.", exists=True, dir_okay=False, readable=True)]
Name = Annotated[str, typer.Option(help="Name in the server's certificate, where it is not the address's.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait.", min=0.001)]


def tls_of(ca: Path | None, cert: Path | None, key: Path | None, name: str) -> Tls | None:
    """Returns the TLS settings of the four options. None: no TLS."""
    from epserve.client import Tls

    return Tls(ca=ca, cert=cert, key=key, server_name=name) if ca or cert or key or name else None


def rebalance(
    address: Address = "127.0.0.1:50051", token_file: TokenFile = None, tls_ca: Authority = None,
    tls_cert: Certificate = None, tls_key: Key = None, tls_name: Name = "", timeout: Timeout = 600,
    explain: Annotated[bool, typer.Option(help="Move nothing. Tell what would move, and the gain.")] = False,
) -> None:  # fmt: skip
    """Move experts so that the counted load is balanced, while the service goes on."""
    from epserve.protocol import admin_pb2 as pb

    tls = tls_of(tls_ca, tls_cert, tls_key, tls_name)
    done = _call("Rebalance", pb.RebalanceRequest(explain=explain), address, token_file, tls, timeout)
    if explain:
        for each in done.moves:
            print(_moves(each))
    if not done.moved:
        print(
            f"no expert {'would move' if explain else 'moved'}: the busiest rank has {done.imbalance_before:.2f} of the mean"
        )
    else:
        verb, had, has = ("would move", "has", "would have") if explain else ("moved", "had", "has")
        print(
            f"{done.moved} slots {verb} in {len(done.layers)} layers"
            + (
                f", {sum(each.bytes for each in done.moves) / 2**20:.1f} MiB"
                if explain
                else f" in {done.seconds:.1f} s"
            )
            + f"; the busiest rank of these layers {had} {done.imbalance_before:.2f} of the mean and {has}"
            f" {done.imbalance_after:.2f}"
        )
    if done.skipped:
        print(f"no memory for layers {', '.join(map(str, done.skipped))}: they stayed as they were")


def _moves(each) -> str:
    if not each.moved:
        return f"layer {each.layer}: nothing moves: {each.reason}"
    size = f"{each.bytes / 2**20:.1f} MiB"
    return f"layer {each.layer}: {each.moved} slots, {size}: {each.imbalance_before:.2f} -> {each.imbalance_after:.2f}"


def scale(
    address: Annotated[str, typer.Argument(help="host:port of a service.")],
    ranks: Annotated[int, typer.Argument(help="New number of ranks.", min=1)],
    token_file: TokenFile = None,
    tls_ca: Authority = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_name: Name = "",
    timeout: Timeout = 600,
) -> None:
    """Go on with another number of ranks. Requests wait for a moment, and none is lost."""
    from epserve.protocol import admin_pb2 as pb

    tls = tls_of(tls_ca, tls_cert, tls_key, tls_name)
    done = _call("Scale", pb.ScaleRequest(ranks=ranks), address, token_file, tls, timeout)
    print(f"{done.before} -> {done.after} ranks in {done.seconds:.1f} s; requests waited {done.paused_seconds:.2f} s")


def _call(method: str, request, address: str, token_file: Path | None, tls: Tls | None, timeout: float):
    import grpc

    from epserve.client.checks import check_target
    from epserve.config import read_token
    from epserve.errors import EpserveError
    from epserve.process import proxies
    from epserve.protocol import admin_pb2_grpc as pb_grpc
    from epserve.protocol import status

    check_target(address)
    metadata = []
    if token_file is not None:
        metadata.append(("authorization", f"Bearer {read_token(token_file)}"))
    if tls is None:
        channel = grpc.insecure_channel(address, options=proxies.channel_options(address))
    else:
        options = [*tls.channel_options(), *proxies.channel_options(address)]
        channel = grpc.secure_channel(address, tls.credentials(), options=options)
    with channel:
        try:
            return getattr(pb_grpc.AdminStub(channel), method)(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            text = f"{address}: {error.code().name}: {status.failure_of_rpc(error).message}"
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                text += (
                    f"\nno answer within {timeout:g} s (--timeout); the change may go on without us: `epserve top {address}`"
                    " shows the ranks that there are and whether the service is resizing; the service's log has the end"
                )
            raise EpserveError(text) from None
