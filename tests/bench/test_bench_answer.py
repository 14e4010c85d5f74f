"""The HTTP reader: good answers pass however they are cut, and no fault passes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.bench.http import MAX_HEAD_BYTES, Answer, BadAnswer

CUTS = st.lists(st.integers(0, 2000), max_size=30)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
INCOMPLETE, BAD = "incomplete", "bad"


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    """`text` in pieces, cut at these places (modulo its length)."""
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def read(pieces: list[bytes]) -> bytes | str:
    """The body, or what is wrong with the answer."""
    answer = Answer()
    try:
        body = b"".join([answer.feed(piece) for piece in pieces])
    except BadAnswer:
        return BAD
    return body if answer.end() else INCOMPLETE


def chunked(*chunks: bytes, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    body = b"".join(b"%X%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks if chunk)
    return CHUNKED + body + b"000" + extension + b"\r\n" + trailers + b"\r\n"


@given(
    chunks=st.lists(st.binary(max_size=40), max_size=8),
    extension=st.sampled_from([b"", b" ", b";a", b' ; a="1"']),
    trailers=st.sampled_from([b"", b"a: b\r\n", b"a: b\r\nc: d\r\n"]),
    cuts=CUTS,
)
def test_chunks_pass_however_they_are_cut(
    chunks: list[bytes], extension: bytes, trailers: bytes, cuts: list[int]
) -> None:
    text = chunked(*chunks, extension=extension, trailers=trailers)
    assert read(cut(text, cuts)) == b"".join(chunks)


@given(body=st.binary(max_size=60), cuts=CUTS)
def test_known_length_passes_however_it_is_cut(body: bytes, cuts: list[int]) -> None:
    assert read(cut(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body, cuts)) == body


@given(body=st.binary(max_size=60), cuts=CUTS)
def test_body_may_end_with_the_connection(body: bytes, cuts: list[int]) -> None:
    answer = Answer()
    pieces = cut(HEAD + b"\r\n" + body, cuts)
    assert b"".join([answer.feed(piece) for piece in pieces]) == body
    assert not answer.is_complete
    assert answer.end()
    assert not answer.keeps_alive


@given(cuts=CUTS)
def test_answers_about_the_answer_to_come_are_skipped(cuts: list[int]) -> None:
    text = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + chunked(b"abc", b"d")
    assert read(cut(text, cuts)) == b"abcd"


@given(chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=8), length=st.integers(0, 5000), cuts=CUTS)
def test_early_end_is_incomplete(chunks: list[bytes], length: int, cuts: list[int]) -> None:
    text = chunked(*chunks)
    assert read(cut(text[: length % len(text)], cuts)) == INCOMPLETE


@given(
    text=st.one_of(
        st.binary(max_size=80),
        st.lists(st.sampled_from([b"3", b"0", b"\r\n", b"abc", b"\r", b"x", b";"]), max_size=12).map(
            lambda parts: CHUNKED + b"".join(parts)
        ),
    ),
    cuts=CUTS,
)
def test_how_an_answer_is_cut_never_changes_the_verdict(text: bytes, cuts: list[int]) -> None:
    assert read(cut(text, cuts)) == read([text] if text else [])


@pytest.mark.parametrize(
    "text",
    [
        b"220 mail.example ESMTP\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nname : value\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        CHUNKED + b"x\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"0x1\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"f" * 16 + b"\r\n",
        CHUNKED + b"1;" + b"x" * MAX_HEAD_BYTES,
        CHUNKED + b"3\r\nabcd\r\n",
        CHUNKED + b"3\r\nabcX",
        chunked(b"abc") + b"more",
        HEAD + b"content-length: 3\r\n\r\nabcd",
        b"HTTP/1.1 204 No Content\r\n\r\nabcd",
    ],
)
def test_bad_answers(text: bytes) -> None:
    assert read([text]) == BAD
    step = max(7, len(text) // 50)
    assert read([text[start : start + step] for start in range(0, len(text), step)]) == BAD


@pytest.mark.parametrize(
    ("head", "keeps_alive"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n", True),
        (b"HTTP/1.1 200\r\ncontent-length: 0\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\ncontent-length: 0\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n", False),
        (b"HTTP/1.0 200 OK\r\nconnection: Keep-Alive\r\ncontent-length: 0\r\n", True),
        (b"HTTP/1.1 304 Not Modified\r\n", True),
    ],
)
def test_when_a_connection_can_be_kept(head: bytes, keeps_alive: bool) -> None:  # noqa: FBT001 - pytest's
    answer = Answer()
    assert answer.feed(head + b"\r\n") == b""
    assert (answer.is_complete, answer.keeps_alive) == (True, keeps_alive)


def test_head_is_read() -> None:
    answer = Answer()
    answer.feed(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After:  1 \r\nA: b\r\na: c\r\ncontent-length: 2\r\n\r\n")
    assert (answer.status, answer.reason, answer.is_complete) == (503, "Service Unavailable", False)
    assert answer.headers == {"retry-after": "1", "a": "b, c", "content-length": "2"}
