"""Reading a request's body within its limit. gunicorn's asgi worker sets none."""

from __future__ import annotations

from falcon.asgi import Request

from ironbatch.errors import RequestRejected

BODY_TOO_LARGE = "body_too_large"


async def read_body(req: Request, limit_bytes: int) -> bytes:
    """The whole body, with a Content-Length or chunked; at most `limit_bytes` of it are ever held.

    Raises:
        RequestRejected: status 413.
    """
    length = req.content_length
    if length is not None and length > limit_bytes:
        raise _too_large(f"the body has {length} bytes", limit_bytes)
    parts: list[bytes] = []
    total = 0
    async for part in req.stream:
        total += len(part)
        if total > limit_bytes:
            raise _too_large("the body goes on", limit_bytes)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(what: str, limit_bytes: int) -> RequestRejected:
    return RequestRejected(
        BODY_TOO_LARGE,
        f"{what}, over this server's limit of {limit_bytes} bytes (--max-body-bytes); send a smaller one",
        status=413,
    )
