"""Server-sent events out of a stream of bytes, as the WHATWG's HTML standard defines them (9.2.6).

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation

Of an event only its data is wanted: comments, `event`, `id` and `retry` are skipped. Two liberties, both for model
servers: an event whose data is blank is no event, and llama.cpp's former `error: {...}` is an event `{"error":{...}}`.
"""

from typing import Final

from ironbatch.limits import MIB
from ironbatch.upstream.problems import UpstreamBroken

MAX_EVENT_BYTES: Final = MIB

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_LINE_ENDS: Final = (b"\n", b"\r")


class EventReader:
    """Decodes one stream. A chunk may begin and end anywhere; what is kept between chunks is bounded."""

    def __init__(self) -> None:
        self._line_parts: list[bytes] = []  # of the line that has not ended yet; joined once, when it ends
        self._data_lines: list[bytes] = []  # of the event that has not ended yet
        self._held_bytes = 0  # in both
        self._is_first_line = True
        self._is_after_cr = False  # a line feed that comes next belongs to that line's end

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that end in `chunk`. Raises UpstreamBroken if an event exceeds MAX_EVENT_BYTES."""
        if self._is_after_cr and chunk:
            self._is_after_cr = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        if not chunk:
            return []
        lines = chunk.splitlines()
        last_part = None if chunk.endswith(_LINE_ENDS) else lines.pop()
        self._is_after_cr = chunk.endswith(b"\r")
        if lines and (self._line_parts or self._is_first_line):
            lines[0] = self._begun_line(lines[0])
        events = self._take_lines(lines)
        if last_part is not None:
            self._line_parts.append(last_part)
            self._hold(len(last_part))
        return events

    def _begun_line(self, end: bytes) -> bytes:
        """The line that began in earlier chunks, or the stream's first line, without a byte order mark."""
        self._held_bytes -= sum(map(len, self._line_parts))
        line = b"".join((*self._line_parts, end))
        self._line_parts.clear()
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        return line

    def _take_lines(self, lines: list[bytes]) -> list[bytes]:
        events = []
        for line in lines:
            if line:
                self._take_line(line)
            elif self._data_lines:
                data = self._data_lines[0] if len(self._data_lines) == 1 else b"\n".join(self._data_lines)
                self._data_lines.clear()
                self._held_bytes = 0
                if data and not data.isspace():
                    events.append(data)
        return events

    def _take_line(self, line: bytes) -> None:
        if line.startswith(b"data: "):  # as nearly every server writes it
            data = line[6:]
        else:
            field, _, value = line.partition(b":")
            if field == b"data":
                data = value.removeprefix(b" ")
            elif field == b"error":
                data = b'{"error":' + value + b"}"
            else:
                return
        self._data_lines.append(data)
        self._hold(len(data) + 1)  # with the line feed that joins it, so that empty lines are bounded, too

    def _hold(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        if self._held_bytes > MAX_EVENT_BYTES:
            raise UpstreamBroken(f"the model server sent an event of more than {MAX_EVENT_BYTES} bytes")
