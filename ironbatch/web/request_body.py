"""A request's body as it comes in: gunicorn's receiver, which can also say that the rest will not come.

gunicorn tells an application of a stalled body in the way of a client that has gone, which then gets no answer. Here
`receive` raises what the client is owed. Nor does a wait have a timer of its own: the connection's guard looks at all
bodies once a second.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gunicorn.asgi.protocol import BodyReceiver

from ironbatch.errors import RequestRejected
from ironbatch.limits import MIN_BODY_RATE

NS_PER_S = 1_000_000_000


class RequestBody(BodyReceiver):  # type: ignore[misc]
    """The ASGI `receive` of one request, made of gunicorn's request and protocol."""

    _waiter: asyncio.Future[None] | None

    # Defaults of the class, as most bodies are there whole before anybody looks.
    _problem: RequestRejected | None = None
    _fed_bytes = 0
    _began_ns: int | None = None
    _seen_bytes = -1
    _seen_ns = 0

    @property
    def is_complete(self) -> bool:
        """Whether all of it has come."""
        complete: bool = self._complete
        return complete

    def feed(self, chunk: bytes) -> None:
        """Take in what has come. Small parts become one, which costs no more memory than its bytes."""
        if not chunk:
            return
        self.expect_continue = False  # the client sent without waiting for a 100
        self._fed_bytes += len(chunk)
        self._buffered += len(chunk)
        if self._chunks:
            held = self._chunks[0]
            if held.__class__ is not bytearray:
                held = self._chunks[0] = bytearray(held)
            held += chunk
        else:
            self._chunks.append(chunk)
        self._wake_waiter()

    def fail(self, problem: RequestRejected) -> None:
        """The rest will not come: from now on `receive` raises `problem`, after what has come already."""
        if self._problem is None and not self._complete:
            self._problem = problem
            self._wake_waiter()

    def is_stalled(self, now_ns: int, timeout_ns: int) -> bool:
        """Whether nothing has come for `timeout_ns`, or so little that the client only means to hold the connection.

        Both are counted in looks: the first begins the time, and what has come since the last one counts as coming now.
        """
        if self._complete or self._problem is not None:
            return False
        if self._began_ns is None:
            self._began_ns = now_ns
        if self._fed_bytes != self._seen_bytes:
            self._seen_bytes, self._seen_ns = self._fed_bytes, now_ns
        owed_bytes = (now_ns - self._began_ns - timeout_ns) * MIN_BODY_RATE // NS_PER_S
        return now_ns - self._seen_ns >= timeout_ns or self._fed_bytes < owed_bytes

    def _pop_chunk(self) -> dict[str, Any]:
        message: dict[str, Any] = super()._pop_chunk()
        message["body"] = bytes(message["body"])
        return message

    async def _wait_for_data(self) -> None:
        if not (self._chunks or self._complete or self._disconnected or self._problem):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._problem is not None and not (self._chunks or self._disconnected):
            raise self._problem
