"""One request's answer: tokens as lines, all that is ready as one chunk, the last joined to the end of the body.

The lines go straight to the server's ASGI `send`, past Falcon's response, which would take a task switch a chunk and
one more write for the end of the body. `send` only waits while the socket's buffer is full, so it is run as a plain
call; when it does wait, a task takes over, and what becomes ready meanwhile goes out as one chunk after it.

The chunks between the first and the last skip `send` too, where `Wire` knows the server.
"""

from __future__ import annotations

import asyncio
import itertools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.errors import RETRY_AFTER_S, RequestRejected
from ironbatch.web.wire import Wire

Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]

NDJSON = "application/x-ndjson"
MAX_CHUNK_LINES = 4096
"""A chunk's lines: a reader that comes back after a long stall costs this much memory at a time (150 KiB)."""

CACHED_LINES = 8192
"""Lines kept ready-made: the default longest sequence."""

RESPONSE_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", NDJSON.encode()),
        (b"x-accel-buffering", b"no"),  # nginx would collect the lines
    ],
}

FINISH_NAMES = {layout.FINISH_LENGTH: "length", layout.FINISH_STOP: "stop", layout.FINISH_CANCELLED: "cancelled"}

# What a sequence's error is to HTTP, when it comes before the first token: type, status, Retry-After.
_ERROR_KINDS: dict[int, tuple[str, int, int | None]] = {
    layout.ERROR_BACKEND: ("backend_error", 500, None),
    layout.ERROR_LOST: ("engine_restarted", 503, RETRY_AFTER_S),
    layout.ERROR_REQUEST: ("backend_refused", 400, None),
    layout.ERROR_INVALID: ("internal_error", 500, None),
}


def _plain_line(token_index: int) -> bytes:
    return b'{"token_index":%d,"done":false}\n' % token_index


_TEXT = b"".join(map(_plain_line, range(CACHED_LINES)))
_STARTS = [0, *itertools.accumulate(len(_plain_line(index)) for index in range(CACHED_LINES))]


def plain_lines(before: int, after: int) -> bytes:
    """The lines of tokens before <= index < after, none of them the last."""
    if after <= CACHED_LINES:
        return _TEXT[_STARTS[before] : _STARTS[after]]
    beyond = b"".join(map(_plain_line, range(max(before, CACHED_LINES), after)))
    return _TEXT[_STARTS[before] :] + beyond if before < CACHED_LINES else beyond


def last_line(token_index: int) -> bytes:
    """The line that ends a stream."""
    return b'{"token_index":%d,"done":true}\n' % token_index


class Exit:
    """The way out of one request: Falcon's own `send`, until a stream takes it over.

    Args:
        send: the server's.
        arrival_ns: when the request came.
        wire: the connection below `send`, if it is one that we know.
    """

    __slots__ = ("_is_taken", "_send", "arrival_ns", "has_answered", "wire")

    def __init__(self, send: Send, arrival_ns: int, wire: Wire | None = None) -> None:
        self._send = send
        self._is_taken = False
        self.arrival_ns = arrival_ns
        self.has_answered = False
        self.wire = wire

    def __call__(self, message: dict[str, Any]) -> Awaitable[None]:
        """Falcon's side: dropped once a stream has answered."""
        self.has_answered = True
        return _nothing() if self._is_taken else self._send(message)

    def take(self) -> Send:
        """From now on the answer is the caller's alone."""
        self._is_taken = True
        self.has_answered = True
        return self._send


async def _nothing() -> None:
    return


class TokenStream:
    """Follows one slot. The collector tells it how far the slot has come; it writes what its client lacks.

    Args:
        slot: whose tokens these are.
        way_out: of this request; taken with the first token, so that an error before it is an ordinary answer.
        output_ids: int32[max_new_tokens], the slot's output, for a client that asked for details; else None.

    `ended` is done once the last chunk is handed to the socket, or has the exception that the client is owed.
    """

    __slots__ = (
        "_blocked",
        "_error_code",
        "_has_bare_end",
        "_output_ids",
        "_produced",
        "_reason",
        "_send",
        "_sent",
        "_way_out",
        "_wire",
        "ended",
        "slot",
        "was_cancelled",
    )

    def __init__(self, slot: int, way_out: Exit, output_ids: NDArray[np.int32] | None) -> None:
        self.slot = slot
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.was_cancelled = False
        self._way_out = way_out
        self._send: Send | None = None
        self._wire: Wire | None = None  # after the first chunk
        self._output_ids = output_ids
        self._produced = 0
        self._sent = 0
        self._reason = layout.FINISH_NONE
        self._error_code = layout.ERROR_NONE
        self._has_bare_end = False
        self._blocked: asyncio.Task[None] | None = None

    def advance(self, produced: int, reason: int, error_code: int) -> None:
        """The slot now has `produced` tokens. With a finish `reason` this is the last call: the slot is given away."""
        self._produced = produced
        self._reason = reason & ~layout.FINISH_WITHOUT_TOKEN
        self._has_bare_end = reason & layout.FINISH_WITHOUT_TOKEN != 0
        self._error_code = error_code
        if self.was_cancelled:
            return
        if reason != layout.FINISH_NONE and self._output_ids is not None:  # some may be written after the slot is gone
            self._output_ids = self._output_ids[:produced].copy()
        if self._blocked is None:
            self._write()

    def abandon(self) -> None:
        """The client has gone: write nothing more."""
        self.was_cancelled = True
        if self._blocked is not None:
            self._blocked.cancel()

    def fail(self, problem: BaseException) -> None:
        """End the stream with an exception for whoever awaits `ended`."""
        if not self.ended.done():
            self.ended.set_exception(problem)

    def _write(self) -> None:
        """Write all that the client lacks, or until its socket is full."""
        if self._send is None:
            if self.is_failure and self._produced == 0:
                self._refuse()
                return
            self._send = self._way_out.take()
            if not self._run(self._send(RESPONSE_START), is_last=False):
                return
        while not self.ended.done() and (self._sent < self._produced or self._reason != layout.FINISH_NONE):
            after = min(self._produced, self._sent + MAX_CHUNK_LINES)
            is_last = self._reason != layout.FINISH_NONE and after == self._produced
            body = self._lines(self._sent, after, is_last=is_last)
            self._sent = after
            if self._wire is not None and not is_last and self._wire.try_write(body):
                continue
            self._wire = self._way_out.wire
            sending = self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
            if not self._run(sending, is_last=is_last):
                return

    def _run(self, sending: Coroutine[Any, Any, None], *, is_last: bool) -> bool:
        """Send as a plain call. False when that waits: a task goes on with it."""
        waits_for = start(sending)
        if waits_for is not _ENDED:
            self._blocked = asyncio.get_running_loop().create_task(self._go_on(sending, waits_for, is_last=is_last))
            return False
        if is_last:
            self._end()
        return True

    def _refuse(self) -> None:
        error_type, status, retry_after_s = _ERROR_KINDS[self._error_code]
        message = layout.ERROR_MESSAGES[self._error_code]
        self.fail(RequestRejected(error_type, message, status=status, retry_after_s=retry_after_s))

    async def _go_on(self, sending: Coroutine[Any, Any, None], waits_for: Any, *, is_last: bool) -> None:
        try:
            await _started(sending, waits_for)
            self._blocked = None
            if is_last:
                self._end()
            else:
                self._write()
        except Exception as problem:  # as a failed `send` is the client's end, whoever awaits the stream decides
            self.fail(problem)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def is_failure(self) -> bool:
        """Whether the sequence has ended with an error."""
        return self._reason == layout.FINISH_ERROR

    def _lines(self, before: int, after: int, *, is_last: bool) -> bytes:
        if self._output_ids is not None:
            return self._detailed_lines(self._output_ids, before, after, is_last=is_last)
        if not is_last:
            return plain_lines(before, after)
        if self.is_failure:
            return plain_lines(before, after) + self._error_line()
        last = after if self._has_bare_end else after - 1
        return plain_lines(before, last) + last_line(last) if last > before else last_line(last)

    def _detailed_lines(self, ids: NDArray[np.int32], before: int, after: int, *, is_last: bool) -> bytes:
        lines = [
            b'{"token_index":%d,"token_id":%d,"done":false}\n' % (index, token)
            for index, token in enumerate(ids[before:after].tolist(), before)
        ]
        if is_last and self.is_failure:
            lines.append(self._error_line())
        elif is_last:
            end = b'"done":true,"finish_reason":"%b"}\n' % FINISH_NAMES[self._reason].encode()
            if not self._has_bare_end:
                lines[-1] = lines[-1].removesuffix(b'"done":false}\n') + end
            else:
                lines.append(b'{"token_index":%d,' % after + end)
        return b"".join(lines)

    def _error_line(self) -> bytes:
        error_type = _ERROR_KINDS[self._error_code][0].encode()
        message = layout.ERROR_MESSAGES[self._error_code].encode()
        return b'{"token_index":%d,"done":true,"error":{"type":"%b","message":"%b","param":null}}\n' % (
            self._produced,
            error_type,
            message,
        )


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
