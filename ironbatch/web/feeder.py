"""Feeds the connections' parsers with what may cost them much, a little in each turn of the event loop.

gunicorn's parser takes 2 to 3 us for a chunk of a body, be it a single byte. What one read of a socket brings may so
cost a tenth of a second, in which every stream of the worker stands still; and many connections may do it at once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Protocol

from ironbatch.clock import Clock

BUDGET_NS = 1_000_000
"""Of one turn, for all connections together."""


class Fed(Protocol):
    """A connection that has put something by."""

    parse_ns: int
    """What its parsing has cost so far."""

    def feed_slice(self) -> bool:
        """Parse a part of it. Returns whether there is more."""


class Feeder:
    """Takes first whoever has cost the least: a few honest bytes do not wait for a flood of tiny chunks.

    Args:
        loop: whose turns they are.
        clock: measures the budget.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._queue: list[tuple[int, int, Fed]] = []  # a heap: cost so far, order of coming
        self._order = itertools.count()

    def add(self, connection: Fed) -> None:
        """It has put something by; it is not in the queue already."""
        if not self._queue:
            self._loop.call_soon(self._feed)
        self._push(connection)

    def _push(self, connection: Fed) -> None:
        heapq.heappush(self._queue, (connection.parse_ns, next(self._order), connection))

    def _feed(self) -> None:
        now_ns = self._clock.now_ns()
        until_ns = now_ns + BUDGET_NS
        try:
            while self._queue and now_ns < until_ns:
                _, _, connection = heapq.heappop(self._queue)
                is_left = connection.feed_slice()
                before_ns, now_ns = now_ns, self._clock.now_ns()
                connection.parse_ns += now_ns - before_ns
                if is_left:
                    self._push(connection)
        finally:  # one connection's fault must not hold up the others
            if self._queue:
                self._loop.call_soon(self._feed)
