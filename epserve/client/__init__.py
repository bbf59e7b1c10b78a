"""Clients of the service: `Client` for threads, `AsyncClient` for asyncio.

Tensors go in, tensors of the same shape come out, whatever the path: one message, a stream, shared memory, or memory of a GPU.
It may import `protocol` and `process`, and nothing of the service. `engines/` has the engines whose experts a service runs.
"""

from .clients import AsyncClient, Client, ClientOptions, ClientRegion, CudaClientRegion, RetryPolicy, Tls, WireFormat

__all__ = [
    "AsyncClient",
    "Client",
    "ClientOptions",
    "ClientRegion",
    "CudaClientRegion",
    "RetryPolicy",
    "Tls",
    "WireFormat",
]
