"""An error that is written without an application: its kinds, its body, its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from ironbatch.web.body import REQUEST_TIMEOUT
from ironbatch.web.json_body import error_body

BAD_REQUEST = "bad_request"
TOO_MANY_CONNECTIONS = "too_many_connections"
_TYPES = {
    400: BAD_REQUEST,
    408: REQUEST_TIMEOUT,
    414: "uri_too_long",
    431: "head_too_large",
    500: "internal_error",
    501: "not_implemented",
    503: TOO_MANY_CONNECTIONS,
}


def error_response(status: int, message: str, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """The whole answer, of HTTP/1.1, after which the connection is closed."""
    body = msgspec.json.encode(error_body(_TYPES.get(status, "http_error"), message))
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers),
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
