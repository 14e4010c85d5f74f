"""Feeds the connections' parsers with what may cost them much, a little in each turn of the event loop.

gunicorn's parser takes 2 to 3 us for a chunk of a body, be it a single byte. What one read of a socket brings may so
cost a tenth of a second, in which every stream of the worker stands still; and many connections may do it at once.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Protocol

from ironbatch.clock import Clock

BUDGET_NS = 1_000_000
"""Of one turn, for all connections together."""


class Fed(Protocol):
    """A connection that has put something by."""

    def feed_slice(self) -> bool:
        """Parse a part of it. Returns whether there is more."""


class Feeder:
    """Takes one connection after the other.

    Args:
        loop: whose turns they are.
        clock: measures the budget.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._queue: collections.deque[Fed] = collections.deque()

    def add(self, connection: Fed) -> None:
        """It has put something by; it is not in the queue already."""
        if not self._queue:
            self._loop.call_soon(self._feed)
        self._queue.append(connection)

    def _feed(self) -> None:
        until_ns = self._clock.now_ns() + BUDGET_NS
        try:
            while self._queue and self._clock.now_ns() < until_ns:
                connection = self._queue.popleft()
                if connection.feed_slice():
                    self._queue.append(connection)
        finally:  # one connection's fault must not hold up the others
            if self._queue:
                self._loop.call_soon(self._feed)
