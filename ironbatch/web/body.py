"""Reading a request's body within its limit. gunicorn's asgi worker sets none."""

from __future__ import annotations

from collections.abc import Iterable

from falcon.asgi import Request

from ironbatch.errors import RequestRejected

BODY_TOO_LARGE = "body_too_large"
MAX_LENGTH_DIGITS = 18
REQUEST_TIMEOUT = "request_timeout"
NOT_IMPLEMENTED = "not_implemented"


def announced_problem(headers: Iterable[tuple[bytes, bytes]], limit_bytes: int) -> RequestRejected | None:
    """What the headers of an ASGI scope announce that is refused before it comes.

    That is a Content-Length over the limit (what is no number is the server's affair), or a coding that nobody here
    would undo.
    """
    for name, value in headers:
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            message = f"the body has the transfer coding {value[:40].decode('latin-1')!r}; send it as it is, or chunked"
            return RequestRejected(NOT_IMPLEMENTED, message, status=501)
        is_number = name == b"content-length" and value.isdigit()
        if is_number and (len(value) > MAX_LENGTH_DIGITS or int(value) > limit_bytes):
            return _too_large(f"the body has {value[:MAX_LENGTH_DIGITS].decode()} bytes", limit_bytes)
    return None


def body_missing() -> RequestRejected:
    """The request announced a body, and not all of it has come."""
    return RequestRejected(REQUEST_TIMEOUT, "the announced body has not come in time", status=408)


async def read_body(req: Request, limit_bytes: int) -> bytes:
    """The whole body, of an announced length or chunked; at most `limit_bytes` of it are ever held.

    Raises:
        RequestRejected: status 413; 408 if the server has given up waiting for the rest.
    """
    body: bytes | bytearray = b""
    async for part in req.stream:
        if len(body) + len(part) > limit_bytes:
            raise _too_large("the body goes on", limit_bytes)
        if not body:
            body = part
            continue
        if isinstance(body, bytes):  # a list of parts would cost forty times the bytes if each is of one
            body = bytearray(body)
        body += part
    if req.content_length is not None and len(body) < req.content_length:
        raise body_missing()
    return bytes(body)


def _too_large(what: str, limit_bytes: int) -> RequestRejected:
    return RequestRejected(
        BODY_TOO_LARGE,
        f"{what}, over this server's limit of {limit_bytes} bytes (--max-body-bytes); send a smaller one",
        status=413,
    )
