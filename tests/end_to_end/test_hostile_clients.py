"""Clients that stall, trickle, flood, leave, or do not speak HTTP, against a whole server."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end import server as server_module
from tests.end_to_end.raw_http import connect, exchange, get, post, read_to_end
from tests.end_to_end.server import FORMS, RawStream, Server, generate_all, plain_body, running, wait_until

pytestmark = pytest.mark.end_to_end

MIB = 1 << 20
BODY = b'{"prompt_tokens": 3, "max_new_tokens": 5}'
CLOSE = "Connection: close"


def assert_serves(server: Server) -> None:
    """It is healthy, serves, holds nothing, and has logged no traceback."""
    assert server.is_healthy()
    assert generate_all(server.port, [{"prompt_tokens": 3, "max_new_tokens": 5}] * 4) == [plain_body(5)] * 4
    server.wait_idle()
    output = "".join(server.output)
    assert "Traceback" not in output
    assert "Error in ASGI application" not in output


def peak_rss(server: Server) -> int:
    """The most memory that the only web worker has ever had, in bytes."""
    (worker,) = server.processes("web worker")
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status).group(1)) * 1024  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------------------------- slow readers

LONG = {"max_model_len": 400_000, "total_kv_blocks": 32_768, "mock_token_latency_us": 0}
LONG_TOKENS = 300_000


def stalled_stream(server: Server) -> RawStream:
    """A stream whose client reads its beginning, and no more, so that the time-out runs from here on."""
    stalled = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": LONG_TOKENS}, receive_buffer_bytes=4096)
    stalled.read_chunk()
    return stalled


@pytest.mark.parametrize("form", FORMS)
def test_a_reader_that_stalls_is_cut_and_counted_as_cancelled_and_costs_little(form: str) -> None:
    with running(form, workers=1, write_timeout_s=2, **LONG) as server:
        generate_all(server.port, [{"prompt_tokens": 1, "max_new_tokens": 2000}] * 4)
        before = peak_rss(server)
        stalled = stalled_stream(server)
        while server.metrics()["requests_cancelled"] == 0:  # others are served meanwhile
            assert generate_all(server.port, [{"prompt_tokens": 3, "max_new_tokens": 200}] * 4) == [plain_body(200)] * 4
        assert peak_rss(server) - before < 16 * MIB
        with pytest.raises((ConnectionError, AssertionError)):
            stalled.read_all()
        stalled.close()
        wait_until(lambda: "by write time-out" in "".join(server.output), "the log to say so")
        assert_serves(server)


def test_a_reader_that_stalls_for_less_gets_every_byte_and_the_end() -> None:
    with running(workers=1, write_timeout_s=100, **LONG) as server:
        stalled = stalled_stream(server)
        wait_until(lambda: server.metrics()["tokens_generated"] >= LONG_TOKENS, "all tokens to be generated", 60)
        first = time.monotonic()
        wait_until(lambda: time.monotonic() - first > 3, "three looks at the connection")
        assert stalled.read_all().endswith(b'{"token_index":%d,"done":true}\n' % (LONG_TOKENS - 1))
        stalled.close()
        assert server.wait_idle()["requests_cancelled"] == 0


def test_a_slow_reader_is_not_cut() -> None:
    """Its socket's buffers hold more than it reads in the write time-out, so only the kernel knows that it reads."""
    with running(workers=1, write_timeout_s=2, **LONG) as server:
        stalled = stalled_stream(server)
        deadline = time.monotonic() + 7
        received = b""
        while time.monotonic() < deadline:
            received += stalled._socket.recv(20_000)
            time.sleep(0.1)
        stalled._pending += received
        rest = stalled.read_all()
        stalled.close()
        assert rest.endswith(b'{"token_index":%d,"done":true}\n' % (LONG_TOKENS - 1))
        assert server.wait_idle()["requests_cancelled"] == 0


# ------------------------------------------------------------------------------------------------- silent connections


@contextlib.contextmanager
def many_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + 200:
        pytest.skip(f"{hard} descriptors (ulimit -Hn) are too few for {count} connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(port)) for _ in range(count)]


@pytest.mark.parametrize("form", FORMS)
def test_a_thousand_silent_connections_hold_up_neither_the_service_nor_its_end(form: str) -> None:
    with running(form, header_timeout_s=600) as server:
        with many_connections(server.port, 1000) as connections:
            for number, connection in enumerate(connections):
                connection.sendall((b"", b"P", b"POST /generate HTTP/1.1\r\nHost: te", post(b"")[:-4])[number % 4])
            assert_serves(server)
            running_stream = RawStream(server.port, {"prompt_tokens": 3, "max_new_tokens": 5000})
            body = running_stream.read_chunk()
            server.remember_family()
            before = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert body + running_stream.read_all() == plain_body(5000)
            running_stream.close()
            assert server.process.wait(60) == 0
            assert time.monotonic() - before < 20, "the graceful time-out alone is 30 s"
            server.assert_nothing_left()
        assert "Traceback" not in "".join(server.output)


@pytest.mark.parametrize("form", FORMS)
def test_heads_and_bodies_that_do_not_come_end_in_time(form: str) -> None:
    with running(form, header_timeout_s=1, body_timeout_s=1, keepalive_timeout_s=1) as server:
        assert exchange(server.port, b"").received == b"", "silent"
        for sent in (b"G", get("/health")[:-2], b"\r"):
            reply = exchange(server.port, sent)
            assert (reply.status, reply.error) == (408, "request_timeout")
        assert exchange(server.port, get("/health")).status == 200, "and then idle"
        assert exchange(server.port, get("/health") + get("/health")[:9]).statuses == [200, 408]
        chunked = b"POST /generate HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
        for sent in (post(BODY)[:-3], post(BODY)[: -len(BODY)], chunked, chunked + b"5\r\nab", chunked + b"1\r\na\r\n"):
            reply = exchange(server.port, sent)
            assert (reply.status, reply.error) == (408, "request_timeout"), sent
            assert b"connection: close" in reply.head
        assert_serves(server)


# ---------------------------------------------------------------------------------------------------- large bodies


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_bytes", [0, 1 * MIB, 100], ids=["length", "chunks", "small-chunks"])
def test_a_body_over_the_limit_is_413_with_flat_memory(form: str, chunk_bytes: int) -> None:
    total = 300 * MIB if chunk_bytes != 100 else 30 * MIB
    with running(form, workers=1) as server, connect(server.port) as connection:
        generate_all(server.port, [{"prompt_tokens": 1, "max_new_tokens": 100}] * 4)
        before = peak_rss(server)
        framing = f"Content-Length: {total}" if chunk_bytes == 0 else "Transfer-Encoding: chunked"
        part = b" " * MIB
        if chunk_bytes:
            part = (b"%x\r\n%b\r\n" % (chunk_bytes, b" " * chunk_bytes)) * (MIB // chunk_bytes)
        connection.sendall(f"POST /generate HTTP/1.1\r\nHost: test\r\n{framing}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):  # a server may stop to listen; its answer must come all the same
            for _ in range(total // MIB):
                connection.sendall(part)
        reply = read_to_end(connection)
        assert (reply.status, reply.error) == (413, "body_too_large")
        assert b"connection: close" in reply.head
        assert peak_rss(server) - before < 40 * MIB, "the limit is 1 MiB"
        assert_serves(server)


# --------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("form", FORMS)
def test_connections_beyond_the_limit_are_503_and_may_ask_for_health(form: str) -> None:
    with running(form, workers=1, max_connections=5, header_timeout_s=600) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(connect(server.port)).sendall(b"G")

            def is_full() -> bool:
                return exchange(server.port, post(BODY, CLOSE)).status == 503

            wait_until(is_full, "the limit")
            reply = exchange(server.port, post(BODY))
            assert (reply.status, reply.error) == (503, "too_many_connections")
            assert b"retry-after: 1" in reply.head
            assert b"connection: close" in reply.head
            assert exchange(server.port, get("/health")).status == 200
            assert exchange(server.port, get("/metrics")).status == 200
        wait_until(lambda: exchange(server.port, post(BODY, CLOSE)).status == 200, "room again")
        wait_until(lambda: "by connection limit" in "".join(server.output), "the log to say so")
        assert_serves(server)


@pytest.mark.parametrize("form", FORMS)
def test_few_descriptors_are_fewer_connections_and_never_no_service(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_command = server_module.command

    def with_few(form: str, options: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        words, environ = plain_command(form, options)
        return ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *words], environ

    monkeypatch.setattr(server_module, "command", with_few)
    with running(form, workers=1) as server:
        assert "64 descriptors (ulimit -n) allow" in "".join(server.output)
        with many_connections(server.port, 200) as connections:
            for connection in connections:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(get("/health", CLOSE))
            replies = [read_to_end(connection) for connection in connections]
        assert {status for reply in replies for status in reply.statuses} <= {200, 503}
        assert any(reply.statuses == [200] for reply in replies)
        wait_until(lambda: exchange(server.port, post(BODY, CLOSE)).statuses == [200], "room")
        assert_serves(server)


@pytest.mark.parametrize("form", FORMS)
def test_a_gunicorn_that_is_not_known_serves_without_the_guard_and_says_so(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import gunicorn\ngunicorn.version_info = (28, 0, 0)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running(form, workers=2) as server:
        stream = RawStream(server.port, {"prompt_tokens": 3, "max_new_tokens": 200})
        assert stream.read_all() == plain_body(200)
        stream.close()
        assert "".join(server.output).count("is not the release that Ironbatch knows (27.0)") == 1
        assert "Using worker: asgi" in "".join(server.output)
        assert_serves(server)


# ---------------------------------------------------------------------------------------------------- shapes of HTTP


@pytest.fixture(scope="module", params=FORMS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param, header_timeout_s=2, body_timeout_s=2, keepalive_timeout_s=1) as found:
        yield found
        assert_serves(found)


def test_http_1_0_pipelining_and_half_close_are_answered_in_full(server: Server) -> None:
    plain = exchange(server.port, post(BODY, version="1.0"))
    assert plain.received.endswith(b"\r\n\r\n" + plain_body(5))
    pipelined = exchange(server.port, post(BODY) + get("/health") + post(BODY, CLOSE))
    assert pipelined.statuses == [200, 200, 200]
    assert pipelined.received.count(b'"done":true') == 2
    for version in ("1.0", "1.1"):
        shut = exchange(server.port, post(BODY, version=version), shuts=True)
        assert shut.status == 200
        assert shut.received.count(b'"done":true') == 1
        assert not shut.was_reset
    both = exchange(server.port, post(BODY) + post(BODY), shuts=True)
    assert both.statuses == [200, 200]


def test_a_client_that_shuts_its_side_in_the_middle_of_its_stream_gets_the_rest(server: Server) -> None:
    body = {"prompt_tokens": 3, "max_new_tokens": 3000}
    stream = RawStream(server.port, body)
    first = stream.read_chunk()
    stream._socket.shutdown(socket.SHUT_WR)
    assert first + stream.read_all() == plain_body(3000)
    stream.close()


def test_expect_100_continue(server: Server) -> None:
    head = post(BODY, "Expect: 100-continue", CLOSE)[: -len(BODY)]
    with connect(server.port) as connection:
        connection.sendall(head)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert read_to_end(connection).status == 200
    too_large = f"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Length: {10**9}\r\nExpect: 100-continue\r\n\r\n"
    reply = exchange(server.port, too_large.encode())
    assert reply.received.startswith(b"HTTP/1.1 413 "), "refused without asking for it"


def chunked(*lines: bytes) -> bytes:
    return b"POST /generate HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(lines)


SHAPES: dict[str, tuple[bytes, set[int]]] = {
    "absolute-form": (get("http://some.host/health", CLOSE), {200}),
    "absolute-form without a path": (get("http://some.host", CLOSE), {404}),
    "star": (b"OPTIONS * HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n", {200, 204, 404}),
    "authority": (b"CONNECT some.host:443 HTTP/1.1\r\nHost: some.host:443\r\n\r\n", {400, 404, 405}),
    "unknown method": (b"BREW /generate HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n", {400, 405, 501}),
    "WEBSOCKET as a method": (b"WEBSOCKET /generate HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n", {400}),
    "HEAD": (b"HEAD /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n", {200}),
    "HEAD with a large body": (b"HEAD /generate HTTP/1.1\r\nHost: test\r\nContent-Length: 999999999\r\n\r\n", {413}),
    "no host": (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", {200, 400}),
    "NUL in the path": (get("/%00", CLOSE), {404}),
    "not UTF-8 in the path": (get("/%ff%fe", CLOSE), {404}),
    "dots in the path": (get("/../../etc/passwd", CLOSE), {404}),
    "huge URL": (get("/" + "a" * 100_000), {414}),
    "huge query": (get("/health?" + "a" * 3000, CLOSE), {200}),
    "huge header": (get("/health", "X: " + "a" * 100_000), {431}),
    "many headers": (get("/health", *(f"X-{number}: y" for number in range(5000))), {431}),
    "obs-fold": (get("/health", "X: a", " b"), {400}),
    "control in a header": (get("/health", "X: a\x07b"), {400}),
    "TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2, {400}),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", {400}),
    "h2c upgrade": (
        get("/health", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk"),
        {200},
    ),
    "two lengths": (b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", {400}),
    "length of 5000 digits": (get("/health", "Content-Length: " + "9" * 5000), {400}),
    "length of 18 digits": (get("/health", "Content-Length: " + "9" * 18), {413}),
    "CL.TE": (post(b"0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n", "Transfer-Encoding: chunked"), {400}),
    "TE.TE": (chunked().replace(b"chunked", b"chunked\r\nTransfer-Encoding: x"), {400, 501}),
    "TE with a tab": (chunked().replace(b" chunked", b"\tchunked\t") + b"0\r\n\r\n", {400}),
    "TE in capitals": (chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)).replace(b"chunked", b"CHUNKED"), {200}),
    "bad chunk size": (chunked(b"zz\r\n"), {400}),
    "negative chunk size": (chunked(b"-5\r\nabcde\r\n"), {400}),
    "chunk longer than said": (chunked(b"2\r\nabcd\r\n0\r\n\r\n"), {400}),
    "huge chunk size": (chunked(b"f" * 5000 + b"\r\nabc"), {408}),
    "forbidden trailer": (chunked(b"%x\r\n%b\r\n0\r\nContent-Length: 5\r\n\r\n" % (len(BODY), BODY)), {400}),
    "trailer": (chunked(b"%x\r\n%b\r\n0\r\nX-Trailer: 5\r\n\r\n" % (len(BODY), BODY)), {200}),
    "endless trailers": (chunked(b"0\r\n", b"X: y\r\n" * 1000), {431}),
    "body that is no JSON": (post(b"\0\xff" * 100, CLOSE), {400}),
    "proxy protocol": (b"PROXY TCP4 1.2.3.4 5.6.7.8 9 10\r\n" + get("/health"), {400}),
    "WebSocket": (get("/generate", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"), {405}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_an_answer(server: Server, name: str) -> None:
    sent, statuses = SHAPES[name]
    reply = exchange(server.port, sent)
    assert reply.status in statuses, reply
    if reply.status >= 400 and not name.startswith("HEAD"):
        assert reply.error


def test_one_byte_at_a_time(server: Server) -> None:
    with connect(server.port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in chunked(*(b"1\r\n%c\r\n" % byte for byte in BODY), b"0\r\n\r\n"):
            connection.sendall(bytes([byte]))
        connection.shutdown(socket.SHUT_WR)
        assert b'"done":true' in read_to_end(connection).received


# ------------------------------------------------------------------------------------------------------ disconnects


def test_a_client_that_closes_is_noticed_while_nothing_is_written_to_it() -> None:
    """Queued, and between two tokens that are seconds apart. It closes in good order, without a reset."""
    with running(workers=1, max_running_seqs=1, mock_token_latency_us=3_000_000) as server:
        decoding = RawStream(server.port, {"prompt_tokens": 3, "max_new_tokens": 100})
        queued = RawStream(server.port, {"prompt_tokens": 3, "max_new_tokens": 100})
        decoding.read_chunk()
        for count, stream in enumerate((queued, decoding), 1):
            before = time.monotonic()
            stream.close()
            wait_until(lambda count=count: server.metrics()["requests_cancelled"] == count, "the cancel")
            assert time.monotonic() - before < 1.5, "long before the next token"
        server.wait_idle()
        assert json.loads(json.dumps(server.metrics()))["requests_completed"] == 0
