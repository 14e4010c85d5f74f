"""The answer of POST /generate, checked as its bytes come in: no network, no clock.

A good answer is one line per token, `{"token_index":0,"done":false}` and so on; the last says `"done":true`.
What differs is a `StreamFault`, named so that faults of one kind can be counted together.
"""

import re
from typing import Final

import msgspec

from ironbatch.errors import IronbatchError

MAX_LINE_BYTES: Final = 65_536
"""A longer line is a fault: what a server sends can't fill the client's memory."""

MAX_SHOWN_CHARS: Final = 160
MAX_LABEL_CHARS: Final = 60

TRUNCATED: Final = "truncated stream"
MALFORMED_LINE: Final = "malformed line"
OUT_OF_ORDER: Final = "token out of order"
TOO_MANY_TOKENS: Final = "too many tokens"
DATA_AFTER_DONE: Final = "data after the last line"
STREAM_ERROR: Final = "error in the stream"


class StreamFault(IronbatchError):
    """The stream is not what was asked for. `name` is its kind, `detail` what was seen in this one."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


class ErrorObject(msgspec.Struct, frozen=True):
    """The `error` of an error answer, and of the last line of a stream that failed after its first token."""

    type: str
    message: str = ""


class _Line(msgspec.Struct, frozen=True):
    token_index: int
    done: bool
    error: ErrorObject | None = None


_LINE_DECODER: Final = msgspec.json.Decoder(_Line)


class ExpectedStream:
    """The bytes of a complete answer of `max_new_tokens` tokens.

    All lines but the last are shared with the other answers: `lines` begins with them, and `lines_bytes` is how
    far they go.
    """

    def __init__(self, max_new_tokens: int, lines: bytes, lines_bytes: int) -> None:
        self.max_new_tokens = max_new_tokens
        self.lines = lines
        self.lines_bytes = lines_bytes
        self._last_line = b'{"token_index":%d,"done":true}\n' % (max(max_new_tokens, 1) - 1)
        self.length_bytes = lines_bytes + len(self._last_line)

    def continues(self, chunk: bytes, at: int) -> bool:
        """Whether the bytes from `at` on begin with `chunk`; `at` is at most `length_bytes`."""
        if at + len(chunk) <= self.lines_bytes:
            return self.lines.startswith(chunk, at)
        if at >= self.lines_bytes:
            return self._last_line.startswith(chunk, at - self.lines_bytes)
        cut = self.lines_bytes - at
        return self.lines.startswith(chunk[:cut], at) and self._last_line.startswith(chunk[cut:])

    def partial_line(self, end: int) -> bytes:
        """The bytes before `end` that belong to no complete line."""
        if end < self.lines_bytes:
            return self.lines[self.lines.rfind(b"\n", 0, end) + 1 : end]
        return self._last_line[: (end - self.lines_bytes) % len(self._last_line)]


class ExpectedStreams:
    """Makes the expected answer of every length from one common text, so that thousands of lengths cost no memory."""

    def __init__(self) -> None:
        self._lines = b""
        self._ends = [0]  # how far the first n lines go
        self._streams: dict[int, ExpectedStream] = {}

    def of(self, max_new_tokens: int) -> ExpectedStream:
        """The complete answer of so many tokens."""
        assert max_new_tokens >= 0
        stream = self._streams.get(max_new_tokens)
        if stream is None:
            lines = max(max_new_tokens, 1) - 1  # no tokens at all is a single line, too
            self._extend(lines)
            stream = ExpectedStream(max_new_tokens, self._lines, self._ends[lines])
            self._streams[max_new_tokens] = stream
        return stream

    def _extend(self, lines: int) -> None:
        known = len(self._ends) - 1
        if lines <= known:
            return
        more = [b'{"token_index":%d,"done":false}\n' % index for index in range(known, max(lines, 2 * known))]
        for line in more:
            self._ends.append(self._ends[-1] + len(line))
        self._lines += b"".join(more)
        self._streams.clear()  # they would keep the shorter text


class StreamChecker:
    """Takes the chunks of one answer, split anywhere, and counts its lines.

    While the bytes are the expected ones, a chunk costs one comparison, however many lines it holds. From the
    first other byte on, each line is parsed: a stream may end early, and may carry fields not asked for.
    """

    def __init__(self, expected: ExpectedStream) -> None:
        self.lines = 0
        self.done = False
        self._expected = expected
        self._matched_bytes = 0
        self._matches = True
        self._partial_line = b""

    @property
    def tokens(self) -> int:
        """Tokens received in order so far."""
        return self.lines if self._expected.max_new_tokens else 0

    @property
    def ended_early(self) -> bool:
        """Whether the stream is done with fewer tokens than asked for."""
        return self.done and self.tokens < self._expected.max_new_tokens

    def feed(self, chunk: bytes) -> int:
        """Check the next bytes and return how many lines they complete. Raises StreamFault."""
        lines_before = self.lines
        if self._matches and self._expected.continues(chunk, self._matched_bytes):
            self._matched_bytes += len(chunk)
            self.lines += chunk.count(b"\n")
            self.done = self._matched_bytes == self._expected.length_bytes
        else:
            self._feed_by_line(chunk)
        return self.lines - lines_before

    def finish(self) -> None:
        """The stream is at its end. Raises StreamFault if that is too soon."""
        if not self.done:
            asked = self._expected.max_new_tokens
            raise StreamFault(TRUNCATED, f"it ended after {self.tokens} of {asked} tokens, without a last line")

    def _feed_by_line(self, chunk: bytes) -> None:
        if self._matches:
            self._matches = False
            self._partial_line = self._expected.partial_line(self._matched_bytes)
        *whole_lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        for line in whole_lines:
            self._accept(line)
        if self._partial_line:
            self._check_partial_line()

    def _check_partial_line(self) -> None:
        if self.done:
            raise StreamFault(DATA_AFTER_DONE, shown(self._partial_line))
        if len(self._partial_line) > MAX_LINE_BYTES:
            raise StreamFault(MALFORMED_LINE, f"it is longer than {MAX_LINE_BYTES} bytes")

    def _accept(self, text: bytes) -> None:
        if self.done:
            raise StreamFault(DATA_AFTER_DONE, shown(text))
        try:
            line = _LINE_DECODER.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StreamFault(MALFORMED_LINE, f"{shown(text)} ({error})") from None
        if line.error is not None:
            label = shown(line.error.type, MAX_LABEL_CHARS)
            raise StreamFault(f"{STREAM_ERROR}: {label}", shown(line.error.message))
        if line.token_index != self.lines:
            raise StreamFault(OUT_OF_ORDER, f"token_index {line.token_index} came where {self.lines} was due")
        asked = self._expected.max_new_tokens
        if self.lines >= asked and not (line.done and self.lines == 0):
            raise StreamFault(TOO_MANY_TOKENS, f"{asked} were asked for, {shown(text)} is one more")
        self.lines += 1
        self.done = line.done


def shown(text: bytes | str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """What a server sent, made fit for a terminal: cut to `max_chars`, and no control characters."""
    if isinstance(text, bytes):
        text = text[: 4 * max_chars].decode("utf-8", "replace")
    if len(text) > max_chars:
        text = text[: max_chars - 3] + "..."
    return "".join(char if char.isprintable() else "?" for char in re.sub(r"\s+", " ", text))
