"""One request's way out: what is ready of all its choices as one chunk, the last joined to the end of the body.

The lines go straight to the server's ASGI `send`, past Falcon's response, which would take a task switch a chunk and
one more write for the end of the body. `send` only waits while the socket's buffer is full, so it is run as a plain
call; when it does wait, a task takes over, and what becomes ready meanwhile goes out as one chunk after it.

The chunks between the first and the last skip `send` too, where `Wire` knows the server. Which lines they are is the
affair of `web/choice.py`.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any

from ironbatch import logs
from ironbatch.web.choice import Choice, Choices, LineSource
from ironbatch.web.wire import Wire

Headers = tuple[tuple[bytes, bytes], ...]
Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]

NDJSON = "application/x-ndjson"
MAX_CHUNK_LINES = 4096
"""A chunk's tokens: a reader that comes back after a long stall costs this much memory at a time (150 KiB)."""

RESPONSE_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", NDJSON.encode()),
        (b"x-accel-buffering", b"no"),  # nginx would collect the lines
    ],
}


class Exit:
    """The way out of one request: Falcon's own `send`, until a stream takes it over.

    Args:
        send: the server's.
        arrival_ns: when the request came.
        wire: the connection below `send`, if it is one that we know.
        headers: of the answer, whatever it is.

    `status` is the answer's, or 0 while there is none.
    """

    __slots__ = ("_headers", "_is_taken", "_send", "arrival_ns", "has_answered", "status", "wire")

    def __init__(self, send: Send, arrival_ns: int, wire: Wire | None = None, headers: Headers = ()) -> None:
        self._send = send
        self._headers = headers
        self._is_taken = False
        self.arrival_ns = arrival_ns
        self.has_answered = False
        self.status = 0
        self.wire = wire

    def __call__(self, message: dict[str, Any]) -> Awaitable[None]:
        """Falcon's side: dropped once a stream has answered."""
        self.has_answered = True
        if self._is_taken:
            return _nothing()
        return self._send(self.head(message) if message["type"] == "http.response.start" else message)

    def head(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message that starts the answer, with the headers of any."""
        self.status = message["status"]
        return {**message, "headers": [*message["headers"], *self._headers]}

    def take(self) -> Send:
        """From now on the answer is the caller's alone."""
        self._is_taken = True
        self.has_answered = True
        return self._send


async def _nothing() -> None:
    return


class TokenStream:
    """The answer to one request. Told that its choices have news, it writes what its client lacks.

    Args:
        way_out: of this request; taken with the first token, so that an error before it is an ordinary answer.
        choices: the sequences that it answers with, by index.

    `ended` is done once the last chunk is handed to the socket, or has the exception that the client is owed.
    """

    __slots__ = ("_blocked", "_send", "_source", "_way_out", "_wire", "choices", "ended", "request_id", "was_cancelled")

    def __init__(self, way_out: Exit, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self.request_id = logs.request_id.get()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.was_cancelled = False
        self._way_out = way_out
        self._source: LineSource = choices[0] if len(choices) == 1 else Choices(choices)
        self._send: Send | None = None
        self._wire: Wire | None = None  # after the first chunk
        self._blocked: asyncio.Task[None] | None = None

    def write(self) -> None:
        """Write all that the client lacks, or until its socket is full."""
        if self._blocked is not None or self.was_cancelled or self.ended.done():
            return
        if self._send is None and not self._begin():
            return
        assert self._send is not None
        source = self._source
        while lines := source.take(MAX_CHUNK_LINES):
            is_last = source.is_over
            if self._wire is not None and not is_last and self._wire.try_write(lines):
                continue
            self._wire = self._way_out.wire
            sending = self._send({"type": "http.response.body", "body": lines, "more_body": not is_last})
            if not self._run(sending, is_last=is_last) or is_last:
                return

    def abandon(self) -> None:
        """The client has gone: write nothing more."""
        self.was_cancelled = True
        if self._blocked is not None:
            self._blocked.cancel()
            self._blocked = None  # or the two would keep each other, and all tokens, until the collector comes by

    def fail(self, problem: BaseException) -> None:
        """End the stream with an exception for whoever awaits `ended`."""
        if not self.ended.done():
            self.ended.set_exception(problem)

    @property
    def is_failure(self) -> bool:
        """Whether any of the choices has ended with an error."""
        return any(choice.is_failure for choice in self.choices)

    def _begin(self) -> bool:
        """Start the answer. False when it has none of its own to give, or none yet, or when the socket is full."""
        refusal = self._source.refusal
        if refusal is not None:
            self.fail(refusal)
        if not self._source.has_begun:
            return False
        self._send = self._way_out.take()
        return self._run(self._send(self._way_out.head(RESPONSE_START)), is_last=False)

    def _run(self, sending: Coroutine[Any, Any, None], *, is_last: bool) -> bool:
        """Send as a plain call. False when that waits: a task goes on with it."""
        waits_for = start(sending)
        if waits_for is not _ENDED:
            self._blocked = asyncio.get_running_loop().create_task(self._go_on(sending, waits_for, is_last=is_last))
            return False
        if is_last:
            self._end()
        return True

    async def _go_on(self, sending: Coroutine[Any, Any, None], waits_for: Any, *, is_last: bool) -> None:
        try:
            await _started(sending, waits_for)
            self._blocked = None
            if is_last:
                self._end()
            else:
                self.write()
        except Exception as problem:  # as a failed `send` is the client's end, whoever awaits the stream decides
            self.fail(problem)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


_ENDED = object()


def start(coroutine: Coroutine[Any, Any, None]) -> Any:
    """Run a coroutine as a plain call. Returns _ENDED, or what it waits for (None stands for "let others run")."""
    try:
        return coroutine.send(None)
    except StopIteration:
        return _ENDED


@types.coroutine
def _started(coroutine: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Await a coroutine that was started already and waits: hand what it waits for to the event loop's task."""
    try:
        while True:
            try:
                yield waits_for
            except BaseException as problem:  # a cancellation is the coroutine's to handle
                waits_for = coroutine.throw(problem)
            else:
                waits_for = coroutine.send(None)
    except StopIteration:
        return
