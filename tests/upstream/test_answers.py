"""What statuses, heads and bodies mean, and that a message is one bounded line without secrets."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.upstream.answers import Answer, problem_of, retry_after_s, shown
from ironbatch.upstream.problems import (
    MAX_MESSAGE_CHARS,
    UpstreamAway,
    UpstreamBroken,
    UpstreamBusy,
    UpstreamMisset,
    UpstreamProblem,
    UpstreamRefused,
    one_line,
)

NOW = datetime(2026, 12, 3, 12, 0, 0, tzinfo=UTC)
URL = "http://host:8000/v1/completions"


def answer(status: int, body: bytes = b"", content_type: str = "application/json", **headers: str) -> Answer:
    return Answer(URL, status, content_type, body, **headers)


@pytest.mark.parametrize(("header", "seconds"), [
    ("5", 5.0), ("0", 0.0), (" 7 ", 7.0), ("1.5", 1.5), ("60", 60.0), ("61", 60.0), ("9" * 400, 60.0),
    ("-1", None), ("", None), ("soon", None), ("nan", None), ("inf", None), ("1e3", None), ("٣", None), ("0x10", None),
    ("Thu, 03 Dec 2026 12:00:30 GMT", 30.0), ("Thu, 03 Dec 2026 11:00:00 GMT", 0.0),
    ("Fri, 04 Dec 2099 12:00:00 GMT", 60.0), ("Thursday, 03-Dec-26 12:00:05 GMT", 5.0),
    ("Thu, 03 Dec 2026 12:00:30", 30.0), ("Thu, 99 Dec 2026 12:00:30 GMT", None),
    ("Thu, 03 Dec 99999999 12:00:30 GMT", None), ("Thu, 03 Dec 2026 12:00:30 +99999999999999", None),
])  # fmt: skip
def test_retry_after(header: str, seconds: float | None) -> None:
    assert retry_after_s(header, NOW) == seconds


def test_retry_after_by_the_clock() -> None:
    seconds = retry_after_s(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True))
    assert seconds is not None
    assert 20 < seconds <= 30


@given(st.text(max_size=40))
def test_any_retry_after(header: str) -> None:
    seconds = retry_after_s(header)
    assert seconds is None or 0 <= seconds <= 60


@pytest.mark.parametrize(("status", "kind"), [
    (400, UpstreamRefused), (413, UpstreamRefused), (422, UpstreamRefused),
    (401, UpstreamMisset), (403, UpstreamMisset), (404, UpstreamMisset), (405, UpstreamMisset), (410, UpstreamMisset),
    (301, UpstreamMisset), (302, UpstreamMisset), (307, UpstreamMisset), (308, UpstreamMisset), (304, UpstreamMisset),
    (200, UpstreamMisset), (204, UpstreamMisset),
    (429, UpstreamBusy), (503, UpstreamBusy),
    (408, UpstreamBroken), (500, UpstreamBroken), (502, UpstreamBroken), (504, UpstreamBroken), (599, UpstreamBroken),
])  # fmt: skip
@pytest.mark.parametrize(
    "body", [b"", b'{"error": {"message": "' + b"why " * 1000 + b'"}}', b"\xff\x00\x1b[2J", b"<html>"]
)
def test_statuses(status: int, kind: type[UpstreamProblem], body: bytes) -> None:
    problem = problem_of(answer(status, body, location="http://elsewhere/" + "x" * 1000))
    assert type(problem) is kind
    assert 0 < len(problem.message) <= MAX_MESSAGE_CHARS
    assert problem.message.isprintable()
    if kind is UpstreamMisset:
        assert "--backend-" in problem.message


def test_loading_is_away() -> None:
    assert type(problem_of(answer(503, b'{"error": {"message": "Loading model", "code": 503}}'))) is UpstreamAway


def test_busy_says_when() -> None:
    problem = problem_of(answer(429, b"slow down", retry_after="3"))
    assert isinstance(problem, UpstreamBusy)
    assert problem.retry_after_s == 3
    assert 'status 429: "slow down"' in problem.message


@pytest.mark.parametrize("body", [
    b'{"error": {"message": "too long"}}', b'{"error": "too long"}', b'{"detail": "too long"}', b"too long\n",
    b'"too long"',
])  # fmt: skip
def test_refusal_is_told_in_the_upstreams_words(body: bytes) -> None:
    assert problem_of(answer(400, body)).message == "too long"


def test_message_of_control_characters_only() -> None:
    assert "without a readable message" in problem_of(answer(400, b"\x1b\x00")).message


def test_redirect_names_its_target_without_secrets() -> None:
    message = problem_of(answer(307, location="https://me:secret@other/v1?key=secret")).message
    assert '"https://other/v1"' in message
    assert "secret" not in message


def test_wrong_content_type_is_named() -> None:
    assert "text/html" in problem_of(answer(200, b"<html>", "text/html")).message


@pytest.mark.parametrize(("url", "expected"), [
    ("http://me:pw@h:1/v1?k=v#f", "http://h:1/v1"), ("//me@h/v1", "//h/v1"), ("/v1/x?k=v", "/v1/x"),
    ("http://h/a@b", "http://h/a@b"), ("http://a@b@h/", "http://h/"), ("http://h/\x1b[2J", "http://h/ [2J"),
])  # fmt: skip
def test_urls_are_shown_without_credentials(url: str, expected: str) -> None:
    assert shown(url) == expected


@given(st.text(), st.integers(2, 50))
def test_one_line(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line) <= limit
    assert line.isprintable()
    line.encode()
