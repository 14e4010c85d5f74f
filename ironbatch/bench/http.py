"""One HTTP/1.1 answer, read as its bytes come in: no network, no clock.

A general client costs several times what a token costs the server, on the cores that both share. This one reads
what a server answers to a POST: a head, then a body that is chunked, has a known length, or ends with the
connection (RFC 9112, sections 4, 6 and 7).
"""

import re
from typing import Final

from ironbatch.errors import IronbatchError

MAX_HEAD_BYTES: Final = 65_536
"""Of a head, and of a line between chunks: what a server sends can't fill the client's memory."""

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\r\n]*))?")
_FIELD_LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_LENGTH: Final = re.compile(r"[0-9]{1,15}")

# Where in the answer the next byte belongs.
_HEAD: Final = 0
_SIZE_LINE_OF_CHUNK: Final = 1
_CHUNK: Final = 2
_END_OF_CHUNK: Final = 3
_TRAILERS: Final = 4
_KNOWN_LENGTH: Final = 5
_UNTIL_CLOSE: Final = 6
_COMPLETE: Final = 7


class BadAnswer(IronbatchError):
    """The bytes are not an HTTP/1.1 answer. The message says what stands in its place."""


class Answer:
    """Takes the bytes of one answer, split anywhere, and gives those of its body.

    `status` is 0 until the head is complete; `headers` has lower-case names; `keeps_alive` says whether the
    connection can carry another request once `is_complete`.
    """

    def __init__(self) -> None:
        self.status = 0
        self.reason = ""
        self.headers: dict[str, str] = {}
        self.keeps_alive = False
        self._place = _HEAD
        self._left_bytes = 0
        self._pending = b""  # the beginning of a head, or of a line, whose end has not come yet

    @property
    def is_complete(self) -> bool:
        """Whether the body has ended."""
        return self._place == _COMPLETE

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes. Returns those of the body among them. Raises BadAnswer."""
        if self._pending:
            data, self._pending = self._pending + data, b""
        at = 0
        if self._place == _HEAD:
            at = self._read_head(data)
            if at < 0:
                return b""
        if self._place in {_KNOWN_LENGTH, _UNTIL_CLOSE}:
            return self._read_plain(data[at:])
        return self._read_chunks(data, at)

    def end(self) -> bool:
        """The connection is closed. Returns whether the answer is complete with that."""
        if self._place == _UNTIL_CLOSE:
            self._place = _COMPLETE
        return self.is_complete

    def _read_head(self, data: bytes) -> int:
        """Returns where the body begins, or -1 if the head is not complete."""
        start = 0
        while True:
            end = data.find(b"\r\n\r\n", start, start + MAX_HEAD_BYTES)
            if end < 0:
                beginning = data[start:]
                if not beginning.startswith(b"HTTP/"[: len(beginning)]):
                    raise BadAnswer(f"{beginning[:60]!r} is no status line")
                self._keep(beginning)
                return -1
            self._parse_head(data[start:end])
            start = end + 4
            if self.status >= 200:  # what comes before is about the answer to come, such as 103 (RFC 9110, 15.2)
                return start

    def _parse_head(self, head: bytes) -> None:
        status_line, *field_lines = head.split(b"\r\n")
        match = _STATUS_LINE.fullmatch(status_line)
        if match is None:
            raise BadAnswer(f"{status_line[:60]!r} is no status line")
        minor_version, status, reason = match.groups()
        headers: dict[str, str] = {}
        for field_line in field_lines:
            field = _FIELD_LINE.fullmatch(field_line)
            if field is None:
                raise BadAnswer(f"{field_line[:60]!r} is no header")
            name, value = (part.decode("latin-1") for part in field.groups())
            name = name.lower()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        self.status, self.reason, self.headers = int(status), (reason or b"").decode("latin-1"), headers
        connection = headers.get("connection", "").lower()
        self.keeps_alive = "close" not in connection if minor_version == b"1" else "keep-alive" in connection
        self._frame_body()

    def _frame_body(self) -> None:
        """How the body ends (RFC 9112, section 6.3)."""
        coding, length = self.headers.get("transfer-encoding"), self.headers.get("content-length")
        if self.status < 200:
            return
        if self.status in {204, 304}:
            self._place = _COMPLETE
        elif coding is not None:
            if coding.lower() != "chunked":
                raise BadAnswer(f"transfer-encoding {coding[:60]!r} was not asked for")
            self._place = _SIZE_LINE_OF_CHUNK
        elif length is not None:
            if _LENGTH.fullmatch(length) is None:
                raise BadAnswer(f"content-length {length[:60]!r} is no length")
            self._left_bytes = int(length)
            self._place = _KNOWN_LENGTH if self._left_bytes else _COMPLETE
        else:
            self._place, self.keeps_alive = _UNTIL_CLOSE, False

    def _read_plain(self, data: bytes) -> bytes:
        if self._place == _KNOWN_LENGTH:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                raise BadAnswer(f"{-self._left_bytes} bytes follow its end")
            if self._left_bytes == 0:
                self._place = _COMPLETE
        return data

    def _read_chunks(self, data: bytes, at: int) -> bytes:
        """Read chunks (RFC 9112, section 7.1). The loop runs twice or thrice a chunk: it is what a token costs."""
        parts: list[bytes] = []
        while at < len(data):
            if self._place == _CHUNK:
                part = data[at : at + self._left_bytes]
                parts.append(part)
                at += len(part)
                self._left_bytes -= len(part)
                if self._left_bytes == 0:
                    self._place = _END_OF_CHUNK
                continue
            if self._place == _COMPLETE:
                raise BadAnswer(f"{len(data) - at} bytes follow its end")
            end = data.find(b"\r\n", at)
            if end < 0:
                self._keep(data[at:])
                break
            self._read_line(data[at:end])
            at = end + 2
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_line(self, line: bytes) -> None:
        """A line between chunks, or behind them."""
        if self._place == _END_OF_CHUNK:
            if line:
                raise BadAnswer(f"{line[:60]!r} stands at a chunk's end")
            self._place = _SIZE_LINE_OF_CHUNK
        elif self._place == _SIZE_LINE_OF_CHUNK:
            size = _SIZE_LINE.fullmatch(line)
            if size is None:
                raise BadAnswer(f"{line[:60]!r} is no chunk size")
            self._left_bytes = int(size[1], 16)
            self._place = _CHUNK if self._left_bytes else _TRAILERS
        elif not line:
            self._place = _COMPLETE

    def _keep(self, beginning: bytes) -> None:
        if len(beginning) >= MAX_HEAD_BYTES:
            raise BadAnswer(f"{beginning[:60]!r} goes on for {MAX_HEAD_BYTES} bytes")
        if self._place == _END_OF_CHUNK and beginning != b"\r":
            raise BadAnswer(f"{beginning[:60]!r} stands at a chunk's end")
        self._pending = beginning
