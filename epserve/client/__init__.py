"""This package holds the clients of the service: `Client` for threads, `AsyncClient` for asyncio.

Tensors go in, and tensors of the same shape come out, over any path: one message, a stream, shared memory, or GPU
memory. The package may import `protocol` and `process`, and nothing of the service. `engines/` has the engines whose
experts a service runs.
"""

from .async_client import AsyncClient
from .clients import (
    Client,
    ClientOptions,
    ClientRegion,
    CudaClientRegion,
    Lane,
    RetryPolicy,
    Tls,
    WireFormat,
)

__all__ = [
    "AsyncClient",
    "Client",
    "ClientOptions",
    "ClientRegion",
    "CudaClientRegion",
    "Lane",
    "RetryPolicy",
    "Tls",
    "WireFormat",
]
