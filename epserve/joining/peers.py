"""The state that the front ends of a service share beside the queue: clients' use of their limits, and the board."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from epserve.engine.budgets import HERE, REPORT_S, Budgets

from .board import Board


class Peers:
    """The shared state in one process that serves clients. Its server and its connections to other processes share it."""

    def __init__(self) -> None:
        self.budgets = Budgets()
        self.board = Board()


class UseNews:
    """Tells one other process about clients' use: at most every `REPORT_S`, and only changes that it does not know."""

    def __init__(self, budgets: Budgets, tell: Callable[[list[list[Any]]], object], holder: Any):
        """Tells the present use, and changes from now on.

        Args:
            budgets: the budgets of this process.
            tell: gets [name, bytes, level of the bucket] of some clients.
            holder: the other process, to which its own use is no news. HERE: it is told the use of this process alone.
        """
        self._budgets, self._tell, self._holder = budgets, tell, holder
        self._changed: set[str] = set()
        self._last: dict[str, list[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._unwatch = budgets.watch(self._note)
        for budget in budgets:
            self._note(budget.name)

    def close(self) -> None:
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, name: str) -> None:
        self._changed.add(name)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._send)

    def _send(self) -> None:
        self._timer = None
        news, changed, self._changed = [], self._changed, set()
        for name in changed:
            budget = self._budgets.of(name)
            if self._holder is HERE:
                each = [name, budget.held(), 1.0]
            else:
                each = [name, budget.elsewhere(self._holder), round(budget.level, 4)]
            if self._last.get(name, [name, 0, 1.0]) != each:
                news.append(each)
                self._last[name] = each
            if each[1:] == [0, 1.0]:
                self._last.pop(name, None)
        if news:
            self._tell(news)
