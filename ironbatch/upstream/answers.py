"""What an answer that is not the stream asked for means: its status, head and body, as a problem.

An answer comes as plain values, so that nothing here needs a network or a clock.
"""

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple

import msgspec

from ironbatch.upstream.dialects import REFUSALS, UNREADABLE, message_in
from ironbatch.upstream.problems import (
    UpstreamAway,
    UpstreamBroken,
    UpstreamBusy,
    UpstreamMisset,
    UpstreamProblem,
    UpstreamRefused,
    one_line,
    said,
)

MAX_RETRY_AFTER_S: Final = 60.0  # an upstream's wish for more is cut: it may well be back sooner

_MAX_URL_CHARS: Final = 90  # of a URL in a message
_MAX_TYPE_CHARS: Final = 60  # of a content type in a message
_BUSY: Final = frozenset({429, 503})
_WORTH_ANOTHER_TRY: Final = frozenset({408, 425})  # of the 4xx: Request Timeout and Too Early; RFC 9110, RFC 8470

_REMEDIES: Final = {
    401: "give the right key with --backend-api-key-file",
    403: "give a key that may do this with --backend-api-key-file",
    404: "correct --backend-url (it usually ends in /v1) or --backend-model",
    405: "correct --backend-url: something else than a model server seems to answer there",
}
_REMEDY: Final = "correct --backend-url"


class Answer(NamedTuple):
    """A whole answer. `url` is what was asked, `retry_after` and `location` are headers; "" where there is none."""

    url: str
    status: int
    content_type: str
    body: bytes
    retry_after: str = ""
    location: str = ""


def shown(url: str) -> str:
    """A URL as messages show it: without credentials and query, on one line, and not too long."""
    bare = re.sub(r"^([a-zA-Z][a-zA-Z0-9+.-]*:)?//[^/?#]*@", r"\1//", url)
    return one_line(bare.partition("?")[0], _MAX_URL_CHARS)


def problem_of(answer: Answer) -> UpstreamProblem:
    """What is wrong with an answer that was refused, redirected, or is not of the kind asked for."""
    status = answer.status
    if status in REFUSALS:
        return UpstreamRefused(_message_of(answer) or f"the model server refused the request with status {status}")
    if status in _BUSY:
        return _busy_problem(answer)
    if status >= 500 or status in _WORTH_ANOTHER_TRY:
        return UpstreamBroken(f"{_where(answer)} failed with status {status}{_quoted_message(answer)}")
    if 300 <= status < 400:
        return _redirect_problem(answer)
    if status == 200:
        return UpstreamMisset(
            f"{_where(answer)} answered with {_type_of(answer)} instead of what was asked for"
            f"{_quoted_message(answer)}; {_REMEDIES[405]}"
        )
    remedy = _REMEDIES.get(status, _REMEDY)
    return UpstreamMisset(f"{_where(answer)} answered with status {status}{_quoted_message(answer)}; {remedy}")


def retry_after_s(header: str, now: datetime | None = None) -> float | None:
    """What a Retry-After header says (RFC 9110, 10.2.3: seconds or a date), in 0..MAX_RETRY_AFTER_S; None: nothing."""
    text = header.strip()
    if re.fullmatch(r"[0-9]{1,20}(\.[0-9]{1,9})?", text):  # fractions are against the RFC, and harmless
        return min(float(text), MAX_RETRY_AFTER_S)
    if re.fullmatch(r"[0-9]+", text):
        return MAX_RETRY_AFTER_S
    try:
        when = parsedate_to_datetime(text)
        if when.tzinfo is None:  # a date of "-0000" or of no zone: HTTP's are all in GMT
            when = when.replace(tzinfo=UTC)
        seconds = (when - (now or datetime.now(UTC))).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)


def _busy_problem(answer: Answer) -> UpstreamProblem:
    """llama.cpp answers 503 "Loading model" at start: that is no load, and nothing of it will come sooner."""
    message = _message_of(answer)
    if answer.status == 503 and message is not None and "loading" in message.lower():
        return UpstreamAway(f"{_where(answer)} is not ready: {said(message)}")
    return UpstreamBusy(
        f"{_where(answer)} is busy: status {answer.status}{_quoted_message(answer)}", retry_after_s(answer.retry_after)
    )


def _redirect_problem(answer: Answer) -> UpstreamProblem:
    target = said(shown(answer.location)) if answer.location else "nowhere"
    return UpstreamMisset(
        f"{_where(answer)} redirects (status {answer.status}) to {target}; redirects are not followed:"
        " give the address that is meant as --backend-url"
    )


def _where(answer: Answer) -> str:
    return f"the model server at {shown(answer.url)}"


def _type_of(answer: Answer) -> str:
    return one_line(answer.content_type, _MAX_TYPE_CHARS) or "no content type"


def _quoted_message(answer: Answer) -> str:
    message = _message_of(answer)
    return "" if message is None else f": {said(message)}"


def _message_of(answer: Answer) -> str | None:
    """What the body says, if it says it as JSON or as plain text; a page for browsers says nothing of use."""
    try:
        value: Any = msgspec.json.decode(answer.body)
    except UNREADABLE:
        text = answer.body.decode("utf-8", "replace").strip()
        return None if not text or text.startswith("<") else text
    return message_in(value)
