"""`python -m epserve.probe HOST:PORT`: exit code 0 when the service says SERVING. For containers and load balancers.

Kubernetes' own gRPC probes do the same but know no TLS.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SERVICE = "epserve.v1.Experts"


def serving(target: str, *, timeout_s: float, ca: Path | None = None, server_name: str = "") -> str:
    """Returns the state's name (SERVING, NOT_SERVING ...), or the reason why there was no answer."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from .process import proxies

    options: list[tuple[str, str | int]] = [*proxies.channel_options(target)]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    if ca is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(ca.read_bytes()), options=options)
    with channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m epserve.probe", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds")
    parser.add_argument("--tls-ca", type=Path, help="authority of the server's certificate; turns TLS on")
    parser.add_argument("--server-name", default="", help="name in the certificate, where the target has another")
    options = parser.parse_args()
    state = serving(options.target, timeout_s=options.timeout, ca=options.tls_ca, server_name=options.server_name)
    print(state)
    sys.exit(0 if state == "SERVING" else 1)


if __name__ == "__main__":
    main()
