"""The connection below gunicorn's ASGI `send`, for what needs nothing of it: a chunk in the middle of a stream.

`send` costs a message, a coroutine and many questions that only the beginning and the end of a response raise. It keeps
those: the first chunk goes through it with the head, and so does the last, which ends the body and frees the connection
for the next request. A chunk in between is only framed and written. When the socket is behind or closing, `send` has it
again: it waits for the one, and drops what comes after the other.

    head + chunk (send), chunk (wire), chunk (wire), ..., chunk + end (send)

Nothing private of gunicorn is used, but its habits are: they are known of one release only, and any other goes without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import gunicorn

Receive = Callable[[], Awaitable[Any]]

KNOWN_GUNICORN = (27, 0)
FRAMINGS = {"1.0": False, "1.1": True}
"""HTTP version: whether a body without a length is sent in chunks (RFC 9112, section 6.3); else its end is a close."""


def known_protocols(version_info: tuple[int, ...]) -> tuple[Any, ...]:
    """The protocol classes of a gunicorn of the known release: its own, and ours on top of it; else none."""
    if version_info[:2] != KNOWN_GUNICORN:
        return ()
    from gunicorn.asgi.protocol import ASGIProtocol  # noqa: PLC0415  which another release need not have

    from ironbatch.web.connection import Connection  # noqa: PLC0415  which needs it

    return (ASGIProtocol, Connection)


KNOWN_PROTOCOLS = known_protocols(gunicorn.version_info)


class Wire:
    """Writes chunks between the first and the last of one response; see the module.

    Args:
        transport: the client's connection.
        is_chunked: whether the response is in chunks of HTTP/1.1.
    """

    __slots__ = ("_is_chunked", "_transport")

    def __init__(self, transport: asyncio.Transport, *, is_chunked: bool) -> None:
        self._transport = transport
        self._is_chunked = is_chunked

    @classmethod
    def of(cls, scope: Mapping[str, Any], receive: Receive) -> Wire | None:
        """The wire below an ASGI request; None for another server than the known one, and for another protocol."""
        protocol: Any = getattr(getattr(receive, "__self__", None), "protocol", None)
        if type(protocol) not in KNOWN_PROTOCOLS:
            return None
        is_chunked = FRAMINGS.get(scope["http_version"])
        if is_chunked is None or protocol.reader is not None:  # HTTP/2 and uwsgi read from a stream
            return None
        if protocol.log.access_log_enabled:  # its lines have the bytes that `send` has counted
            return None
        return cls(protocol.transport, is_chunked=is_chunked)

    def try_write(self, body: bytes) -> bool:
        """Write a chunk, which must not be empty. False: nothing was written, `send` must have it."""
        transport = self._transport
        if transport.get_write_buffer_size() != 0 or transport.is_closing():
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body)
        return True
