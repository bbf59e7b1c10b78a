"""Defines dispatch handles and receivers. They are opaque, single-use, and owned by the backend that made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from epserve.errors import HandleError

T = TypeVar("T")


class HandleBook:
    """Counts the outstanding handles and receivers of one prepare/finalize object. It holds no state of a batch."""

    def __init__(self, owner: str):
        self.owner, self.closed = owner, False
        self._open: dict[int, str] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, kind: str) -> int:
        if self.closed:
            raise HandleError(f"{self.owner} is closed: no {kind} can be opened")
        self._next += 1
        self._open[self._next] = kind
        return self._next

    def take(self, ticket: int, kind: str) -> None:
        if self.closed:
            raise HandleError(f"{kind} of {self.owner} used after close")
        if self._open.pop(ticket, None) is None:
            raise HandleError(f"{kind} of {self.owner} used twice: each {kind} is good for one use")

    def forget(self) -> None:
        """Drops everything outstanding, after an error that ends the group."""
        self._open.clear()

    def close(self) -> None:
        """Raises HandleError when something was opened and never used."""
        self.closed = True
        if self._open:
            kinds = ", ".join(sorted(set(self._open.values())))
            count = len(self._open)
            self._open.clear()
            raise HandleError(f"{self.owner} closed with {count} outstanding and never used ({kinds})")


class DispatchHandle:
    """Holds the backend's state that finalize needs to send rows home. Only the backend that made it reads it, and only once."""

    __slots__ = ("_book", "_state", "_ticket")

    def __init__(self, book: HandleBook, state: Any):
        self._book, self._state, self._ticket = book, state, book.open("dispatch handle")

    def take(self, book: HandleBook) -> Any:
        """Returns the backend's state. Raises HandleError on a second use, after close, or by another backend."""
        if book is not self._book:
            raise HandleError(f"dispatch handle of {self._book.owner} given to {book.owner}")
        self._book.take(self._ticket, "dispatch handle")
        state, self._state = self._state, None
        return state


class Receiver(Generic[T]):
    """Ends a started transfer: it is called once, later, for the result."""

    __slots__ = ("_book", "_finish", "_ticket")

    def __init__(self, book: HandleBook, finish: Callable[[], T]):
        self._book, self._finish, self._ticket = book, finish, book.open("receiver")

    def __call__(self) -> T:
        self._book.take(self._ticket, "receiver")
        finish, self._finish = self._finish, None  # type: ignore[assignment]
        return finish()
