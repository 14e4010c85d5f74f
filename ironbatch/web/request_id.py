"""Each request's id: the one that its client or gateway has given it in `X-Request-Id`, else a new one."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ironbatch import logs

HEADER: Final = b"x-request-id"
MAX_CHARS: Final = 128

_GOOD: Final = re.compile(rb"[!#-&(-\[\]-~]{1,%d}" % MAX_CHARS)
"""Printable ASCII without space, quotes and backslash: it stands in headers and logs as it is."""


class RequestIds:
    """Of one worker. New ids are its random prefix and a count: unique, and a tenth of a UUID's cost."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8).encode()
        self._counts = itertools.count(1)

    def begin(self, scope: Mapping[str, Any]) -> tuple[tuple[bytes, bytes]]:
        """Give the request of an ASGI scope its id, in all that the running task logs. Returns the answer's header."""
        found = self.of(scope["headers"])
        logs.request_id.set(found.decode("ascii"))
        return ((HEADER, found),)

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The id in these headers, or a new one.

        One that is not good is replaced, not refused: an id is for whoever reads logs, and no reason to fail a request.
        """
        for name, value in headers:
            if name == HEADER:
                if _GOOD.fullmatch(value):
                    return value
                break
        return b"%b-%x" % (self._prefix, next(self._counts))
