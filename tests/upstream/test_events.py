"""Server-sent events: any split of any stream gives the same events, and no stream fills the memory."""

import itertools
import time
import tracemalloc
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.upstream.events import MAX_EVENT_BYTES, EventReader
from ironbatch.upstream.problems import UpstreamBroken

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_all(*chunks: bytes) -> list[bytes]:
    reader = EventReader()
    return [event for chunk in chunks for event in reader.feed(chunk)]


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    """The stream in pieces, some of them perhaps empty."""
    places = [0, *sorted(place % (len(stream) + 1) for place in cuts), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(places)]


LINE_TEXTS = st.binary(max_size=12).map(lambda text: text.translate(None, b"\r\n"))
LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
OTHER_LINES = st.sampled_from([b": ping", b":", b"event: message", b"id: 7", b"retry: 10", b"data2: no", b"nonsense"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream and the events in it, made together."""
    stream = draw(st.sampled_from([b"", BYTE_ORDER_MARK]))
    events = []
    for data_lines in draw(st.lists(st.lists(LINE_TEXTS, max_size=3), max_size=5)):
        line_end = draw(LINE_ENDS)
        lines = [
            b"data:" + draw(st.sampled_from([b" ", b""]) if text[:1] != b" " else st.just(b" ")) + text
            for text in data_lines
        ]
        lines.insert(draw(st.integers(0, len(lines))), draw(OTHER_LINES))
        stream += line_end.join([*lines, b"", b""])
        data = b"\n".join(data_lines)
        if data and not data.isspace():
            events.append(data)
    return stream, events


@given(streams(), st.lists(st.integers(0, 10_000), max_size=20))
def test_any_split_gives_the_same_events(stream: tuple[bytes, list[bytes]], cuts: list[int]) -> None:
    assert read_all(*cut(stream[0], cuts)) == stream[1]


@given(streams())
def test_byte_by_byte(stream: tuple[bytes, list[bytes]]) -> None:
    assert read_all(*(bytes([byte]) for byte in stream[0])) == stream[1]


@given(st.lists(st.binary(max_size=30)), st.lists(st.integers(0, 1000)))
def test_any_bytes_are_read(chunks: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(chunks)
    assert read_all(*cut(stream, cuts)) == read_all(stream)


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\ndata: b\r\n\r\n", [b"a\nb"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\n\rdata: b\n\r", [b"a", b"b"]),  # mixed: LF, then CR
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),  # one blank is the format's, the second is the data's
        (b"data\n\n", []),
        (b"data:\n\ndata: \n\n", []),
        (b"data:\ndata: a\n\n", [b"\na"]),
        (b": ping\n\n\n\n", []),
        (b"event: x\ndata: a\nid: 1\n\n", [b"a"]),
        (b"data: not ended\n", []),
        (b"Data: a\n\n data: b\n\n", []),
        (BYTE_ORDER_MARK + b"data: a\n\n", [b"a"]),
        (BYTE_ORDER_MARK * 2 + b"data: a\n\ndata: b\n\n", [b"b"]),
        (b"data: a\n\n" + BYTE_ORDER_MARK + b"data: b\n\n", [b"a"]),  # only the stream may begin with one
        (b'error: {"message":"m"}\n\n', [b'{"error": {"message":"m"}}']),  # llama.cpp, until 2025
    ],
)
def test_lines(stream: bytes, events: list[bytes]) -> None:
    assert read_all(stream) == events
    assert read_all(*(bytes([byte]) for byte in stream)) == events


def test_event_of_the_limit_is_read() -> None:
    data = b"x" * (MAX_EVENT_BYTES - 10)
    assert read_all(b"data: ", data, b"\n", b"\n") == [data]
    assert read_all(*[b"data: a\n\n" * 1000] * 200) == [b"a"] * 200_000  # the limit is of an event, not of the stream


@pytest.mark.parametrize(
    "endless", [b"data: " + b"x" * 1000, b"data: xxxx\n" * 50, b"data:\n" * 50, b":" + b"x" * 1000]
)
def test_endless_event_is_refused_within_its_limit(endless: bytes) -> None:
    reader = EventReader()
    tracemalloc.start()
    try:
        with pytest.raises(UpstreamBroken, match=f"more than {MAX_EVENT_BYTES} bytes"):
            deque(map(reader.feed, itertools.repeat(endless, 2 * MAX_EVENT_BYTES)), maxlen=0)
        assert tracemalloc.get_traced_memory()[1] < 64 * MAX_EVENT_BYTES
    finally:
        tracemalloc.stop()


def test_endless_comments_are_skipped() -> None:
    reader = EventReader()
    for _ in range(3000):
        assert reader.feed(b": " + b"x" * 1000 + b"\n") == []


def test_many_chunks_of_one_event_take_linear_time() -> None:
    def seconds(num_chunks: int) -> float:
        chunks = [b"data: ", *[b"xx"] * num_chunks, b"\n\n"]
        began = time.process_time()
        assert len(read_all(*chunks)) == 1
        return time.process_time() - began

    few = min(seconds(20_000) for _ in range(3))
    many = min(seconds(320_000) for _ in range(3))
    assert many < 64 * few  # 16 times as many: quadratic would be 256 times
