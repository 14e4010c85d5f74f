"""The places of an upstream: how many streams it takes at once."""

from __future__ import annotations

import asyncio
from collections import deque


class Places:
    """First come, first served; the limit may change while places are taken. For one event loop."""

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def taken(self) -> int:
        """Places that somebody holds."""
        return self._taken

    def resize(self, limit: int) -> None:
        """From now on `limit` may be taken; who holds one of too many keeps it."""
        self._limit = limit
        self._hand_on()

    async def take(self) -> None:
        """Wait for a place; whoever has it owes a `release`."""
        if self._taken < self._limit and not self._waiting:
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given just now
                self.release()
            raise

    def release(self) -> None:
        """Give a place back."""
        self._taken -= 1
        self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting and self._taken < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled while it waited
                self._taken += 1
                turn.set_result(None)
