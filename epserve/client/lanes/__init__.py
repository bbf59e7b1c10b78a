"""This package holds a client's end of a lane: rows and words in memory that it shares with the service, and the operator
for compiled code. It may import what the clients may.
"""

from .for_asyncio import AsyncLane
from .lane import Lane, request

__all__ = ["AsyncLane", "Lane", "request"]
