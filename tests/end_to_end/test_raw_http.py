"""A whole server's answers byte for byte: those that skip gunicorn's `send` in the middle, and those that don't."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from tests.end_to_end.server import Server, plain_body, running

pytestmark = pytest.mark.end_to_end

OPTIONS = {"workers": 1, "mock_token_latency_us": 1_000}
TOKENS = 40
BODY = b'{"prompt_tokens": 3, "max_new_tokens": %d}' % TOKENS


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """One as it is; and one with an access log, whose streams therefore go through `send` alone (`web/wire.py`)."""
    with pytest.MonkeyPatch.context() as patch, running("gunicorn", **OPTIONS) as wired:
        patch.setenv("GUNICORN_CMD_ARGS", "--access-logfile=-")
        with running("gunicorn", **OPTIONS) as plain:
            yield wired, plain
            assert "POST /generate" in "".join(plain.output), "the second server has an access log"
        assert "POST /generate" not in "".join(wired.output)


def request(method: str = "POST", version: str = "1.1", *headers: str) -> bytes:
    length = f"Content-Length: {len(BODY)}" if method == "POST" else "Accept: */*"
    head = "\r\n".join(
        [f"{method} /generate HTTP/{version}", "Host: test", "X-Request-Id: raw", length, *headers, "", ""]
    )
    return head.encode() + (BODY if method == "POST" else b"")


def answer(server: Server, sent: bytes) -> bytes:
    """All that comes until the server hangs up, without dates and without what says where a chunk begins."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(sent)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    lines = [line for line in received.split(b"\r\n") if not line.startswith(b"Date:")]
    return b"".join(line for line in lines if not re.fullmatch(rb"[0-9a-f]*", line))


CLOSE = "Connection: close"
EXCHANGES = {
    "HTTP/1.1": (request("POST", "1.1", CLOSE), 1),
    "HTTP/1.0": (request("POST", "1.0"), 1),
    # Nothing but the connection's end can end such a body, so it is not kept.
    "HTTP/1.0 keep-alive": (request("POST", "1.0", "Connection: keep-alive") + request("POST", "1.0"), 1),
    "HEAD": (request("HEAD", "1.1", CLOSE), 0),
    "HEAD, then POST": (request("HEAD") + request("POST", "1.1", CLOSE), 1),
    "pipelined": (request() + request() + request("POST", "1.1", CLOSE), 3),
    "nonsense behind it": (request() + b"\0\r\n\r\n", 1),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_same_answer_with_and_without_the_wire(servers: tuple[Server, Server], name: str) -> None:
    sent, streams = EXCHANGES[name]
    wired, plain = (answer(server, sent) for server in servers)
    assert wired == plain
    assert wired.count(plain_body(TOKENS)) == streams
