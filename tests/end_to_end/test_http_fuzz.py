"""Bytes that are nearly HTTP, and bytes that are not, to a whole server: each gets an answer or an end.

Findings become named tests in test_hostile_clients.py. More examples: IRONBATCH_FUZZ_EXAMPLES=1000.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ironbatch import layout
from tests.end_to_end.raw_http import connect
from tests.end_to_end.server import Server, generate_all, plain_body, running, wait_until

pytestmark = pytest.mark.end_to_end

DEADLINE_S = 60.0
MESSAGES = 40  # sent at once, since many of them end by a time-out
EXAMPLES = int(os.environ.get("IRONBATCH_FUZZ_EXAMPLES", "12"))

METHODS = [b"GET", b"POST", b"HEAD", b"OPTIONS", b"CONNECT", b"PRI", b"BREW", b"get", b"", b"A" * 30, b"P\xc3\xb6ST"]
TARGETS = [
    *(b"/generate", b"/health", b"/metrics", b"/", b"*", b"", b"http://h/health", b"h:1", b"/%00", b"/%", b"/%zz"),
    *(b"/\xff", b"//", b"/health?" + b"q" * 5000, b"/" + b"a" * 9000, b"http://", b"://", b"?", b"#", b"/a b"),
]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1 ", b"http/1.1", b"HTTP/1.", b""]
BODIES = [
    *(b"", b"{}", b'{"prompt_tokens": 3, "max_new_tokens": 4}', b'{"prompt_tokens": 3, "max_new_tokens": 4, "n": 3}'),
    *(b"\0" * 50, b"[" * 5000, b'{"prompt_token_ids": [1, 2, 3]}', b'"' + b"\xff" * 20, b" " * 20_000),
]
NAMES = [
    *(b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"Upgrade", b"TE", b"Trailer"),
    *(
        b"Content-Type",
        b"X",
        b"",
        b" X",
        b"X ",
        b"X\0",
        b"HTTP2-Settings",
        b"Sec-WebSocket-Key",
        b"Sec-WebSocket-Version",
    ),
    *(
        b"X_Y",
        b"Cookie",
        b"Accept",
        b"X-Forwarded-Proto",
        b"Keep-Alive",
        b"Content-Encoding",
        b"Range",
        b"Authorization",
    ),
]
VALUES = [
    *(b"test", b"0", b"2", b"5", b"41", b"-1", b"+5", b"5, 5", b"0x5", b"5 ", b"9" * 18, b"9" * 5000, b"\xb2"),
    *(b"chunked", b"CHUNKED", b"chunked, chunked", b"gzip, chunked", b"identity", b"chunked\t", b"xchunked"),
    *(b"close", b"keep-alive", b"Upgrade", b"close, keep-alive", b"100-continue", b"websocket", b"h2c", b"13"),
    *(b"", b"\0", b"\x07", b"a\rb", b"\xff\xfe", b"y" * 9000, b"https", b"a=b; c", b"gzip", b"bytes=0-5", b"*/*"),
]
FRAMING = {
    b"Content-Length": VALUES[:14],
    b"Transfer-Encoding": VALUES[13:22],
    b"Connection": [b"close", b"keep-alive", b"close, keep-alive", b"Upgrade", b"x"],
    b"Expect": [b"100-continue", b"x"],
    b"Upgrade": [b"websocket", b"h2c"],
}
ENDS = [b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\n ", b"\r\r\n"]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request, put together from parts of which most fit."""
    body = draw(st.sampled_from(BODIES))
    headers = [(b"Host", b"test")] if draw(st.integers(0, 9)) else []
    framing = draw(st.integers(0, 5))
    if framing <= 2:
        headers.append((b"Content-Length", b"%d" % (len(body) + draw(st.sampled_from([0, 0, 0, 0, -1, 1, 7])))))
    elif framing == 3:
        headers.append((b"Transfer-Encoding", b"chunked"))
        sizes = draw(st.lists(st.integers(1, 9), max_size=5))
        parts, rest = [], body
        for size in sizes:
            parts, rest = [*parts, rest[:size]], rest[size:]
        parts = [part for part in [*parts, rest] if part]
        body = b"".join(b"%x%b\r\n%b\r\n" % (len(part), draw(EXTENSIONS), part) for part in parts)
        body += draw(st.sampled_from([b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"00\r\n\r\n", b"0\r\n", b""]))
    headers += draw(st.lists(st.one_of(FRAMING_FIELDS, ANY_FIELDS), max_size=3))
    method = draw(st.sampled_from([b"POST"] * 8 + METHODS))
    target = draw(st.sampled_from([b"/generate"] * 8 + TARGETS))
    version = draw(st.sampled_from([b"HTTP/1.1"] * 8 + VERSIONS))
    lines = [b" ".join([method, target, version]), *(b"%b: %b" % header for header in headers), b""]
    return b"".join(line + draw(st.sampled_from(ENDS[:4] * 6 + ENDS)) for line in lines) + body


FRAMING_FIELDS = st.sampled_from([(name, value) for name, values in FRAMING.items() for value in values])
ANY_FIELDS = st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES))
EXTENSIONS = st.sampled_from([b"", b"", b"", b"", b";a", b";a=b", b';a="b"', b" ", b";", b";\r", b"\t;a"])
FRAGMENTS = st.sampled_from(
    [b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"0", b"\r\n\r\n", b"\xff", b"HTTP/1.1", b";", b"%"]
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Requests on one connection, of which some bytes were lost, doubled, moved, replaced."""
    data = b"".join(draw(st.lists(requests(), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(data)))
        end = min(begin + draw(st.integers(0, 12)), len(data))
        middle = draw(st.one_of(st.just(b""), FRAGMENTS, st.binary(max_size=6), st.just(data[begin:end] * 2)))
        data = data[:begin] + middle + data[end:]
    return data


@st.composite
def messages(draw: st.DrawFn) -> tuple[list[bytes], str]:
    """What a client sends, in which pieces, and what it does then."""
    data = draw(st.one_of(requests(), mutated(), mutated(), st.binary(max_size=300)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return pieces, draw(st.sampled_from(["waits", "waits", "shuts", "leaves"]))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = {"header_timeout_s": 1, "body_timeout_s": 1, "keepalive_timeout_s": 1, "write_timeout_s": 5}
    with running("gunicorn", workers=1, mock_token_latency_us=0, **options) as found:
        yield found
        assert found.is_healthy()
        assert generate_all(found.port, [{"prompt_tokens": 3, "max_new_tokens": 5}]) == [plain_body(5)]
        found.wait_idle()
        assert not owners(found).any(), "a slot is held"
        output = "".join(found.output)
        for word in ("Traceback", "ERROR", "Error in", "exception"):
            assert word not in output


def owners(server: Server) -> np.ndarray:
    """The owner word of every slot."""
    data = np.memmap(f"/dev/shm/{server.segment}", np.uint8, "r")
    header = server.header()
    return np.frombuffer(data, layout.SLOT, int(header["num_slots"]), int(header["slots_offset"]))["owner"]


class Talk:
    """One connection, until it has an answer or its end."""

    def __init__(self, port: int, pieces: list[bytes], ending: str) -> None:
        self.socket = connect(port)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent = pieces
        self.received = b""
        self.is_over = False
        try:
            for piece in pieces:
                self.socket.sendall(piece)
            if ending == "shuts":
                self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused in the middle
        if ending == "leaves":
            self.socket.close()
            self.is_over = True

    def read(self) -> None:
        """Take what has come."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        self.received += data
        self.is_over = not data
        if self.is_over:
            self.socket.close()


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="IRONBATCH_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # to shrink by time-outs takes for ever
    database=None,
)
@given(batch=st.lists(messages(), min_size=MESSAGES, max_size=MESSAGES))
def test_whatever_comes_gets_an_answer_and_an_end(server: Server, batch: list[tuple[list[bytes], str]]) -> None:
    """The connections end in all cases: a half-closed one after its answer, an idle one by the keep-alive time-out."""
    talks = [Talk(server.port, pieces, ending) for pieces, ending in batch]
    deadline = time.monotonic() + DEADLINE_S
    while open_ones := [talk for talk in talks if not talk.is_over]:
        assert time.monotonic() < deadline, [(talk.sent, talk.received) for talk in open_ones]
        readable, _, _ = select.select([talk.socket for talk in open_ones], [], [], 1)
        for talk in open_ones:
            if talk.socket in readable:
                talk.read()
    for talk in talks:
        assert not talk.received or talk.received.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), talk.sent
        assert b"HTTP/1.1 500" not in talk.received, talk.sent
    wait_until(server.is_healthy, "health")
