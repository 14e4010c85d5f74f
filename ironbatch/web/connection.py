"""One client's connection: gunicorn's ASGI protocol, and what it lacks against slow and hostile clients.

Nothing here runs for a chunk of a stream. A connection notes when it began to wait for what; `ConnectionBook` looks at
all of them once a second and cuts those whose time is up (docs/http.md has the limits and what a client sees).

A client that shuts its sending side may still read, or may have closed altogether: on the wire it is the same FIN. The
difference shows when it is sent something, since a closed one then answers with a reset. So it is sent what means
nothing in HTTP: before the answer an interim `100 Continue`, between two chunks a leading zero of the next size.

Private parts of gunicorn are used, so this is for the release that `web/wire.py` knows.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gunicorn.asgi.protocol import ASGIProtocol

from ironbatch.errors import RETRY_AFTER_S, RequestRejected
from ironbatch.limits import MAX_HEAD_BYTES
from ironbatch.web.body import body_missing
from ironbatch.web.plain_error import BAD_REQUEST, error_response
from ironbatch.web.request_body import RequestBody
from ironbatch.web.write_progress import WriteProgress

if TYPE_CHECKING:
    from ironbatch.web.connection_book import ConnectionBook

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CARRIAGE_RETURN = 13
FRESH_NS = 1_000_000_000
"""How long a head may still take when the worker ends: the connection may have been made just before."""

FEW_BYTES = 256
"""Always parsed at once."""

SLICE_BYTES = 1024
"""Parsed at a time, where each byte may cost the parser much (`web/feeder.py`)."""


class Connection(ASGIProtocol):  # type: ignore[misc]
    """See the module. `worker` has a `connections`, the book of them all."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self._book: ConnectionBook = worker.connections
        self._progress: WriteProgress | None = None
        self._head_since_ns: int | None = None  # since when a head is awaited that must come in time
        self._head_bytes = 0  # of the head that is not complete
        self._unfed: bytes | None = None  # what was put by for the parser
        self._fed_bytes = 0  # of it
        self.parse_ns = 0  # what the parsing of all that was put by has cost
        self._is_surplus = False
        self._has_answered = False  # with the status of the present request
        self._is_last_answer = False
        self._is_between_chunks = False
        self._closed: bool  # gunicorn's: nothing more is served
        self._has_eof = False
        self._lingers_until_ns: int | None = None

    # ----------------------------------------------------------------------------------------- what the loop calls

    def connection_made(self, transport: asyncio.Transport) -> None:
        now_ns = self._book.clock.now_ns()
        self._head_since_ns = now_ns
        self._progress = WriteProgress(transport, now_ns)
        super().connection_made(transport)
        if self._callback_parser is not None:  # it speaks HTTP/1; HTTP/2, which is off by default, has its own rules
            self._book.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._book.discard(self)
        self._unfed = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingers_until_ns is not None:
            return
        if len(data) > FEW_BYTES and not self._is_cheap:
            if self._current_request is None:  # the beginning of a head, and perhaps of a body that is cheap
                super().data_received(data[:SLICE_BYTES])
                data = data[SLICE_BYTES:]
            if not data or self._closed:
                return
            if not self._is_cheap:
                self._put_by(data)
                return
        super().data_received(data)

    def eof_received(self) -> bool:
        """The client will send no more. True keeps the connection, for its answer."""
        if self._lingers_until_ns is not None or self._closed or self._is_ssl or self._current_request is None:
            return False
        self._has_eof = True
        if self._body_receiver.is_complete:
            self._probe()
        self._end_input()
        self._book.watch_for_reset(self)
        return True

    # ------------------------------------------------------------------------------------- what the book asks for

    @property
    def fileno(self) -> int:
        """The socket's descriptor."""
        number: int = self.transport.get_extra_info("socket").fileno()
        return number

    @property
    def is_waiting(self) -> bool:
        """Whether no request is under way."""
        return self._current_request is None and not self._closed

    @property
    def is_sending(self) -> bool:
        """Whether something waits for room in the socket."""
        return self.transport is not None and self.transport.get_write_buffer_size() > 0

    def is_fresh(self, now_ns: int) -> bool:
        """Whether a request's head is awaited that may still come, since the client has had little time for it."""
        return self._head_since_ns is not None and now_ns - self._head_since_ns < FRESH_NS

    def make_surplus(self, app: Any) -> None:
        """There are too many: it is answered by `app`, once, and closed."""
        self._is_surplus = True
        self.app = app

    def refuse(self, message: str) -> None:
        """Answer 503 without having read anything, and close."""
        self._send_error_response(503, message, (("Retry-After", str(RETRY_AFTER_S)),))
        super()._close_transport()

    def close_waiting(self) -> None:
        """Close a connection without a request under way."""
        super()._close_transport()
        self._request_ready.set()  # gunicorn's loop waits for it, and finds the connection closed

    def end_lingering(self) -> None:
        """The client has had its answer for long enough."""
        if self._lingers_until_ns is not None:
            self._lingers_until_ns = self._book.clock.now_ns()

    def feed_slice(self) -> bool:
        """Parse a part of what was put by. Returns whether there is more."""
        data, begin = self._unfed, self._fed_bytes
        if data is None:  # the connection is lost or closed
            return False
        self._fed_bytes = len(data) if self._is_cheap else begin + SLICE_BYTES
        if self._fed_bytes >= len(data):
            self._unfed = None
        super().data_received(data[begin : self._fed_bytes])
        if self._closed:
            self._unfed = None
        elif self._unfed is None:
            self._maybe_resume_reading()
        return self._unfed is not None

    def abort(self) -> None:
        """Cut it: nothing more is sent."""
        self.transport.abort()

    def check(self, now_ns: int) -> str | None:
        """Cut what has taken too long. Returns what it was, or None."""
        assert self._progress is not None
        times = self._book.times
        if self.is_waiting:
            return self._check_head(now_ns, times.header_ns)
        if self._lingers_until_ns is not None:
            if now_ns >= self._lingers_until_ns and self.transport.get_write_buffer_size() == 0:
                self.abort()
                return None
        elif not self._closed and self._body_receiver.is_stalled(now_ns, times.body_ns):
            self._body_receiver.fail(body_missing())
            return "body time-out"
        if self._progress.stalled_ns(now_ns) >= times.write_ns:
            self._progress.forget_unsent()
            self.abort()
            return "write time-out"
        return None

    def _check_head(self, now_ns: int, timeout_ns: int) -> str | None:
        if self._head_since_ns is None or now_ns - self._head_since_ns < timeout_ns:
            return None
        if self._head_bytes:
            self._send_error_response(408, f"the request's head has not come within {timeout_ns // 10**9} s")
        self._close_transport()
        self._request_ready.set()
        return "header time-out"

    # ---------------------------------------------------------------------------------------- where gunicorn is met

    @property
    def _is_cheap(self) -> bool:
        """Whether what comes costs the parser nothing: a body of a known length, or what is put by for later."""
        request = self._current_request
        if request is None:
            return self.reader is not None
        return not request.chunked or self._body_receiver.is_complete

    def _put_by(self, data: bytes) -> None:
        """Parse it in the next turns of the loop, before what was put by already."""
        if self._unfed is None:
            self._book.feeder.add(self)
            self._unfed = data
        else:
            self._unfed = data + self._unfed[self._fed_bytes :]
        self._fed_bytes = 0
        self._pause_reading()

    def _resume_reading(self) -> None:
        if self._unfed is None and not self._has_eof:  # else what comes would overtake it, or be the end once more
            super()._resume_reading()

    def _end_input(self) -> None:
        """All that the client has sent is parsed, and it will send no more."""
        if self.is_waiting:
            self.close_waiting()
        elif not self._closed:
            problem = "the body has ended before the length that was announced"
            self._body_receiver.fail(RequestRejected(BAD_REQUEST, problem))  # unless it is complete

    def _feed_callback_parser(self, data: bytes) -> bool:
        if self._current_request is None:
            if len(data) > SLICE_BYTES:  # what was pipelined behind the last request
                self._put_by(data[SLICE_BYTES:])
                data = data[:SLICE_BYTES]
            if self._head_since_ns is None:
                self._cancel_keepalive_timer()
                self._head_since_ns = self._book.clock.now_ns()
                self._has_answered = self._is_between_chunks = False
            if self._head_bytes == 0 and not (0x21 <= data[0] <= 0x7E or data[0] == CARRIAGE_RETURN):
                return self._refuse_head(400, "this is not HTTP/1: the first byte is none of a method's")
            self._head_bytes += len(data)
        try:
            is_open: bool = super()._feed_callback_parser(data)
        except ValueError:  # of int(), which refuses a Content-Length of thousands of digits
            return self._refuse_head(400, "a number in the request's head is too long")
        if self._head_bytes > MAX_HEAD_BYTES and is_open and self._current_request is None:
            return self._refuse_head(431, f"the request's head is over {MAX_HEAD_BYTES} bytes; send a smaller one")
        if self._has_eof and self._unfed is None:
            self._end_input()
        return is_open

    def _refuse_head(self, status: int, message: str) -> bool:
        self._send_error_response(status, message)
        self._close_transport()
        return False

    def _on_headers_complete(self) -> bool:
        skips_body: bool = super()._on_headers_complete()
        self._body_receiver = RequestBody(self._current_request, self)
        self._head_since_ns = None
        self._head_bytes = 0
        return skips_body

    def _arm_keepalive_timer(self) -> None:
        """Nothing is under way, and a next request may come, unless the client has shut its sending side."""
        if self._has_eof:
            if self.is_waiting and self._unfed is None:  # else the next request is there, or may be
                self.close_waiting()
        elif self._head_since_ns is None:  # else the head has begun, and must come in its time
            super()._arm_keepalive_timer()

    def _build_http_scope(self, request: Any, sockname: Any, peername: Any) -> dict[str, Any]:
        scope: dict[str, Any] = super()._build_http_scope(request, sockname, peername)
        if not scope["path"].startswith("/"):  # a whole URL, which a server must understand (RFC 9112, section 3.2.2)
            _, separator, rest = scope["path"].partition("://")
            if separator:
                scope["path"] = "/" + rest.partition("/")[2]
        return scope

    def _is_websocket_upgrade(self, request: Any) -> bool:
        """There is nothing here to talk to: such a request is answered like any other."""
        return False

    def _will_close(self, request: Any, response_requires_close: bool) -> bool:  # noqa: FBT001 gunicorn's signature
        """Whether the answer says `Connection: close`.

        HTTP/1.0 knows no chunks, so that the end of a stream is the connection's. What a head has promised holds,
        though it is asked again when the answer is complete.
        """
        if not self._has_answered:
            self._is_last_answer = self._book.must_close()
        return (
            super()._will_close(request, response_requires_close)
            or request.version < (1, 1)
            or self._is_surplus
            or self._is_last_answer
            or not self._body_receiver.is_complete
        )

    def _send_response_start(self, status: int, headers: Any, request: Any, close: bool = False) -> None:  # noqa: FBT001, FBT002
        self._has_answered = True
        super()._send_response_start(status, headers, request, close)

    def _send_body(self, body: bytes, chunked: bool = False, last: bool = False, size: int | None = None) -> None:  # noqa: FBT001, FBT002
        self._is_between_chunks = chunked and not last
        super()._send_body(body, chunked, last, size)

    def _send_error_response(self, status: int, message: str, extra_headers: Any = ()) -> None:
        """In the shape of all errors; not into an answer that has begun."""
        if self._has_answered:
            return
        self._has_answered = True
        if " " not in message:  # gunicorn's parser says no more than what it has found
            message = f"the request's head holds what may not be there: {message}"
        self._safe_write(error_response(status, message, extra_headers))

    def _close_transport(self) -> None:
        """Close; but a client that is still sending gets the answer first.

        What it sends to a closed socket would be answered with a reset, which may overtake the answer and destroy it
        (RFC 9112, section 9.6). So only our side is shut, and what comes is dropped for a while.
        """
        if self.transport is None or self._closed:
            return
        if self._has_eof or not self._may_be_sending or not self.transport.can_write_eof():
            super()._close_transport()
            return
        self._closed = True
        self._unfed = None
        self._lingers_until_ns = self._book.clock.now_ns() + self._book.times.linger_ns
        self.transport.write_eof()
        self._resume_reading()

    @property
    def _may_be_sending(self) -> bool:
        if self._current_request is None:
            return self._head_bytes > 0
        if self._unfed is not None:
            return True
        parser = self._callback_parser
        return not self._body_receiver.is_complete or (parser is not None and bool(parser.remaining()))

    def _probe(self) -> None:
        """Send what means nothing, to find out whether the client still reads."""
        if not self._has_answered:
            if self._current_request.version >= (1, 1):
                self._safe_write(CONTINUE)
        elif self._is_between_chunks:
            self._safe_write(b"0")
