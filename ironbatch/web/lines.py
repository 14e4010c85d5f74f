"""The lines of an answer, as bytes: NDJSON, one line a token.

A line's choice is named in it only where the request has several: `tag` is that part of the line, or empty.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import msgspec

from ironbatch import layout
from ironbatch.errors import RETRY_AFTER_S, RequestRejected
from ironbatch.text_rows import NOT_TOLD, TokenUsage

CACHED_LINES = 8192
"""Lines kept ready-made: the default longest sequence."""

NS_PER_US = 1_000

FINISH_NAMES = {layout.FINISH_LENGTH: "length", layout.FINISH_STOP: "stop", layout.FINISH_CANCELLED: "cancelled"}

# What a sequence's error is to HTTP, when it comes before the first token: type, status, Retry-After.
_ERROR_KINDS: dict[int, tuple[str, int, int | None]] = {
    layout.ERROR_BACKEND: ("backend_error", 500, None),
    layout.ERROR_LOST: ("engine_restarted", 503, RETRY_AFTER_S),
    layout.ERROR_REQUEST: ("backend_refused", 400, None),
    layout.ERROR_INVALID: ("internal_error", 500, None),
    layout.ERROR_NO_BLOCKS: ("out_of_blocks", 500, None),
    layout.ERROR_POISON: ("scheduler_killed", 500, None),
    layout.ERROR_UNAVAILABLE: ("engine_unavailable", 503, RETRY_AFTER_S),
}


def _plain_line(token_index: int) -> bytes:
    return b'{"token_index":%d,"done":false}\n' % token_index


_TEXT = b"".join(map(_plain_line, range(CACHED_LINES)))
_STARTS = [0, *itertools.accumulate(len(_plain_line(index)) for index in range(CACHED_LINES))]


def plain_lines(before: int, after: int) -> bytes:
    """The lines of tokens before <= index < after of an only choice, none of them the last."""
    if after <= CACHED_LINES:
        return _TEXT[_STARTS[before] : _STARTS[after]]
    beyond = b"".join(map(_plain_line, range(max(before, CACHED_LINES), after)))
    return _TEXT[_STARTS[before] :] + beyond if before < CACHED_LINES else beyond


def choice_tag(index: int, choices: int) -> bytes:
    """What tells the lines of choice `index` from those of the others."""
    return b',"choice":%d' % index if choices > 1 else b""


def last_line(token_index: int, tag: bytes = b"", more: bytes = b"") -> bytes:
    """The line that ends a choice; `more` is what follows its `"done":true`."""
    return b'{"token_index":%d%b,"done":true%b}\n' % (token_index, tag, more)


def id_part(token_id: int) -> bytes:
    """Which token a line is about; null if nobody has said."""
    return b',"token_id":null' if token_id == layout.NO_TOKEN_ID else b',"token_id":%d' % token_id


def text_part(text: str) -> bytes:
    """The text that a line's token completes."""
    return b',"text":' + msgspec.json.encode(text)


def problem_part(problem: RequestRejected) -> bytes:
    """What the last line of a failed sequence says of it."""
    error = {"type": problem.type, "message": problem.message, "param": problem.param}
    return b',"error":' + msgspec.json.encode(error)


def error_answer(error_code: int, message: str = "") -> RequestRejected:
    """A sequence's error, in the backend's words if it has any: the answer to a request of which nothing else came."""
    error_type, status, retry_after_s = _ERROR_KINDS[error_code]
    message = message or layout.ERROR_MESSAGES[error_code]
    return RequestRejected(error_type, message, status=status, retry_after_s=retry_after_s)


def finish_part(reason: int) -> bytes:
    """Why a sequence ended, for a client that asked for details."""
    return b',"finish_reason":"%b"' % FINISH_NAMES[reason].encode()


def usage_part(usage: TokenUsage) -> bytes:
    """What the backend has counted; null for what it has not told."""
    counts = {name: None if count == NOT_TOLD else count for name, count in usage._asdict().items()}
    return b',"usage":' + msgspec.json.encode(counts)


STATS_FIELDS = (
    "generation",
    "admitted_generation",
    "cached_tokens",
    "preemptions",
    *(f"waited_{reason}_ns" for reason in layout.WAIT_REASONS),
)
"""Of a slot's record, what `SequenceStats.read` wants."""


class SequenceStats(NamedTuple):
    """How a sequence fared, as the scheduler has left it in its slot; all zero for one that was never admitted."""

    cached_tokens: int
    preemptions: int
    waited_us: tuple[int, ...]  # in the order of WAIT_REASONS

    @classmethod
    def read(cls, record: Any) -> SequenceStats:
        """From STATS_FIELDS of a slot not yet given back; what an earlier request has left there does not count."""
        generation, admitted_generation, cached_tokens, preemptions, *waited_ns = record.item()
        if admitted_generation != generation:
            return NO_STATS
        return cls(cached_tokens, preemptions, tuple(ns // NS_PER_US for ns in waited_ns))

    @property
    def part(self) -> bytes:
        """What the last line says of it; `queue_us` is exactly the sum of `waited_us`."""
        waits = b",".join(
            b'"%b":%d' % (reason.encode(), us) for reason, us in zip(layout.WAIT_REASONS, self.waited_us, strict=True)
        )
        return b',"cached_tokens":%d,"preemptions":%d,"queue_us":%d,"waited_us":{%b}' % (
            self.cached_tokens,
            self.preemptions,
            sum(self.waited_us),
            waits,
        )


NO_STATS = SequenceStats(0, 0, (0,) * len(layout.WAIT_REASONS))
