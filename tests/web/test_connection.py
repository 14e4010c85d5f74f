"""The guard of each connection, on gunicorn's protocol and real sockets; the time is the test's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ironbatch.clock import FakeClock
from ironbatch.limits import MAX_HEAD_BYTES
from ironbatch.web import connection_book as book_module
from ironbatch.web.connection import FRESH_NS, Connection
from ironbatch.web.connection_book import NS_PER_S, ConnectionBook, HttpTimes, allowed_connections
from ironbatch.web.wire import Wire
from tests.web.fakes import gunicorn_worker, in_loop, turn, until

TIMES = HttpTimes(header_ns=10 * NS_PER_S, body_ns=30 * NS_PER_S, write_ns=60 * NS_PER_S)
CHUNK = b"x" * 1000
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Call:
    """One request that the application has been called with."""

    def __init__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.body = b""
        self.is_read = False
        self.was_cancelled = False
        self.problem: Exception | None = None
        self.end = asyncio.Event()

    async def start(self, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def chunk(self, body: bytes, *, is_last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def answer(self, body: bytes = b"fine") -> None:
        await self.start(200, (b"content-length", b"%d" % len(body)))
        await self.chunk(body, is_last=True)
        self.end.set()


class Guarded:
    """Guarded connections on a port. The test answers the requests, tells the time and looks at the connections."""

    def __init__(self, *, most: int = 100, surplus: int = 2, reads_body: bool = True) -> None:
        self.lines: list[str] = []
        self.problems: list[object] = []
        self.clock = FakeClock(5)
        self.calls: list[Call] = []
        self._surplus = surplus
        self._reads_body = reads_body
        self.worker = gunicorn_worker(self._serve, self.problems, self._note, keepalive_s=1000)
        self.book = self.worker.connections = ConnectionBook(TIMES, most, self.clock, self.worker.log)

    def _note(self, text: str, *words: object) -> None:
        self.lines.append(text % words)

    async def _serve(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        call = Call(scope, receive, send)
        self.calls.append(call)
        try:
            more = self._reads_body
            while more:
                message = await receive()
                call.body += message.get("body", b"")
                more = message.get("more_body", False)
            call.is_read = True
            await call.end.wait()
        except asyncio.CancelledError:
            call.was_cancelled = True
            raise
        except Exception as problem:
            call.problem = problem
            await call.start(418, (b"content-length", b"0"))
            await call.chunk(b"", is_last=True)

    async def call(self, index: int = 0) -> Call:
        """The request that came as the `index`-th, once its body is read."""
        await until(lambda: len(self.calls) > index and self.calls[index].is_read, f"request {index}")
        return self.calls[index]

    @property
    def connections(self) -> list[Connection]:
        return list(self.book._connections)

    async def after(self, seconds: float) -> None:
        """Let this time pass, and look at all connections."""
        await turn(20)
        self.clock.advance_ns(round(seconds * NS_PER_S))
        self.book.sweep()
        await turn()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Callable[..., Awaitable[Client]]]:
        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(book_module, "allowed_connections", lambda most, log: (most, self._surplus))
            self.book.start(loop)
        assert self.book._timer is not None
        self.book._timer.cancel()  # the test looks instead
        made: list[Connection] = []

        def make() -> Connection:
            made.append(Connection(self.worker))
            return made[-1]

        server = await loop.create_server(make, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        async with server:
            with contextlib.ExitStack() as stack:

                async def connect(sent: bytes = b"", receive_buffer_bytes: int | None = None) -> Client:
                    client = Client(receive_buffer_bytes)
                    stack.callback(client.socket.close)
                    count = len(made)
                    await loop.sock_connect(client.socket, address)
                    await until(lambda: len(made) > count and made[count].transport is not None, "the connection")
                    if sent:
                        await client.send(sent)
                    return client

                yield connect
        await until(lambda: self.worker.nr_conns == 0, "the end of all connections")
        assert not self.connections
        self.book.stop()
        assert self.problems == []


class Client:
    """A raw connection."""

    def __init__(self, receive_buffer_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(0)
        self.received = b""

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read_some(self, size: int = 1 << 20) -> bytes:
        data = await asyncio.get_running_loop().sock_recv(self.socket, size)
        self.received += data
        return data

    async def read_until(self, end: bytes) -> bytes:
        while end not in self.received:
            assert await self.read_some(), f"hung up after {self.received!r}"
        return self.received

    async def read_all(self) -> bytes:
        """Until the server hangs up; a reset fails."""
        while await self.read_some():
            pass
        return self.received

    def shut(self) -> None:
        """Send no more, and read on."""
        self.socket.shutdown(socket.SHUT_WR)


def get(path: str = "/", version: str = "1.1", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "Host: test", *headers, "", ""]).encode()


def post(length: int, body: bytes = b"") -> bytes:
    return f"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n".encode() + body


def status_of(received: bytes) -> int:
    return int(received.split(b" ", 2)[1])


def error_of(received: bytes) -> tuple[int, str]:
    """Status and type of an error, which says that the connection ends."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"\r\nConnection: close" in head
    return status_of(received), json.loads(body)["error"]["type"]


# --------------------------------------------------------------------------------------------------------- the head


@in_loop
async def test_a_silent_connection_is_closed_without_a_word() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect()
        await server.after(9.9)
        assert len(server.connections) == 1
        await server.after(0.1)
        assert await client.read_all() == b""


@pytest.mark.parametrize("begun", [b"G", b"\r", b"GET / HTTP/1.1\r\nHost: te", b"GET / HTTP/1.1\r\nHost: test\r\n"])
@in_loop
async def test_a_head_that_is_not_complete_in_time_is_408_however_it_trickles(begun: bytes) -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(begun[:1])
        for byte in begun[1:]:
            await client.send(bytes([byte]))
        for _ in range(9):
            await server.after(1)
        assert len(server.connections) == 1
        await server.after(1)
        assert error_of(await client.read_all()) == (408, "request_timeout")
        assert "1 by header time-out" in server.lines[-1]


@in_loop
async def test_a_head_that_comes_just_in_time_is_served() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get()[:-1])
        await server.after(9.9)
        await client.send(get()[-1:])
        call = await server.call()
        await server.after(1000)
        await call.answer()
        assert status_of(await client.read_until(b"fine")) == 200


@in_loop
async def test_an_idle_connection_is_gunicorns_and_a_second_head_has_its_own_time() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get())
        await (await server.call()).answer()
        await client.read_until(b"fine")
        (connection,) = server.connections
        await until(lambda: connection._keepalive_handle is not None, "gunicorn's timer")
        await server.after(500)
        assert server.connections == [connection], "idle"
        client.received = b""
        await client.send(get()[:20])
        await until(lambda: connection._head_since_ns is not None, "the beginning")
        assert connection._keepalive_handle is None, "no longer idle"
        await server.after(9.9)
        assert server.connections == [connection]
        await server.after(0.2)
        assert error_of(await client.read_all()) == (408, "request_timeout")


@in_loop
async def test_the_rest_of_a_pipelined_head_has_its_time_from_the_answer_before() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get() + get()[:20])
        call = await server.call()
        await server.after(100)
        await call.answer()
        await client.read_until(b"fine")
        (connection,) = server.connections
        await until(lambda: connection.is_waiting, "the second head")
        assert connection._keepalive_handle is None
        await server.after(9.9)
        client.received = b""
        await server.after(0.2)
        assert error_of(await client.read_all()) == (408, "request_timeout")


@in_loop
async def test_a_head_over_the_limit_is_431_whatever_its_lines() -> None:
    server = Guarded()
    async with server.listening() as connect:
        lines = [f"X-{number}: {'y' * 3000}" for number in range(MAX_HEAD_BYTES // 3000 + 3)]
        client = await connect(get("/", "1.1", *lines)[:-2])
        assert error_of(await client.read_all()) == (431, "head_too_large")


# --------------------------------------------------------------------------------------------------------- the body


@pytest.mark.parametrize("is_chunked", [False, True])
@in_loop
async def test_a_body_that_stalls_is_told_to_the_application(*, is_chunked: bool) -> None:
    head = b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n" if is_chunked else post(50_000)
    part = b"1388\r\n%b\r\n" % (b"p" * 5000) if is_chunked else b"p" * 5000
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(head)
        for _ in range(5):
            await client.send(part)
            await server.after(29)
        assert not server.calls[0].problem
        await server.after(1)
        assert not server.calls[0].problem, "the last part was seen a second ago"
        await server.after(29)
        received = await client.read_all()
        assert status_of(received) == 418
        assert b"Connection: close" in received
    assert server.calls[0].body == b"p" * 25_000
    assert getattr(server.calls[0].problem, "status", None) == 408


@in_loop
async def test_a_body_in_drops_is_told_in_the_end() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(post(10_000))
        for _ in range(33):
            await client.send(b"p")
            await server.after(1)
        await client.read_all()
    assert getattr(server.calls[0].problem, "status", None) == 408


@in_loop
async def test_a_body_that_ends_with_the_clients_side_is_told() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(post(100, b"p" * 50))
        await until(lambda: server.calls, "the request")
        client.shut()
        await client.read_all()
    assert getattr(server.calls[0].problem, "status", None) == 400


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[k : k + size] for k in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
@in_loop
async def test_chunks_of_any_size_cost_their_bytes_and_leave_others_their_turn(size: int) -> None:
    body = bytes(range(256)) * 800
    sent = b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(body, size)
    server = Guarded()
    async with server.listening() as connect:
        client = await connect()
        sending = asyncio.ensure_future(client.send(sent + get("/second")))
        calls = 0
        while not (server.calls and server.calls[0].is_read):
            calls += 1
            await asyncio.sleep(0)
        await sending
        assert calls > 50 or size > 1, "a millisecond a turn"
        assert server.calls[0].body == body
        await server.calls[0].answer()
        await (await server.call(1)).answer(b"second")
        assert (await client.read_until(b"second")).count(b"200 OK") == 2


@pytest.mark.parametrize("shuts", [False, True])
@in_loop
async def test_requests_pipelined_in_one_read_are_served_in_order_whatever_their_bodies(*, shuts: bool) -> None:
    bodies = [bytes([65 + number]) * (number * 700) for number in range(12)]
    sent = b""
    for number, body in enumerate(bodies):
        if number % 2:
            filler = f"X: {'y' * 400 * number}\r\n".encode()  # so that some heads are longer than a slice
            sent += post(len(body))[:-2] + filler + b"\r\n" + body
        else:
            sent += b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(body, 3)
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(sent)
        if shuts:
            client.shut()
        for number, body in enumerate(bodies):
            call = await server.call(number)
            assert call.body == body
            await call.answer(b"<%d>" % number)
        await client.read_until(b"<11>")
        assert client.received.count(b"200 OK") == len(bodies)
        if shuts:
            await client.read_all()


@in_loop
async def test_a_client_that_shuts_its_side_in_a_long_pipelined_head_is_closed_after_its_answer() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get() + get("/", "1.1", f"X: {'y' * 5000}")[:-2])
        client.shut()
        await until(lambda: server.connections[0]._has_eof, "the end of its side")
        await (await server.call()).answer()
        assert (await client.read_all()).endswith(b"fine")


@in_loop
async def test_small_parts_that_nobody_takes_are_held_as_their_bytes() -> None:
    server = Guarded(reads_body=False)
    async with server.listening() as connect:
        client = await connect(b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
        call = await server.call()
        gc.collect()
        tracemalloc.start()
        try:
            (connection,) = server.connections
            connection._max_buffer_size = 50_000
            sending = asyncio.ensure_future(client.send(b"1\r\nx\r\n" * 1_000_000))
            await until(lambda: connection._reading_paused and connection._unfed is None, "enough of them")
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 14 << 20, "of which this test's own bytes are 6 MB, twice"
        assert 25_000 < connection._body_receiver.buffered < 60_000
        await call.answer()
        await sending
        assert (await client.read_all()).endswith(b"fine")


# --------------------------------------------------------------------------------------------------- slow readers


async def write_until_full(server: Guarded, call: Call) -> asyncio.Task[None]:
    """Write until the client's socket takes no more; returns the write that waits."""
    (connection,) = server.connections
    await call.start()
    while True:
        writing = asyncio.ensure_future(call.chunk(CHUNK * 50))
        await turn()
        if not writing.done():
            break
    assert connection.transport.get_write_buffer_size() > 0
    return writing


@in_loop
async def test_a_reader_that_takes_nothing_is_cut() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get(), 4096)
        call = await server.call()
        writing = await write_until_full(server, call)
        await server.after(1)
        for _ in range(58):
            await server.after(1)
        assert len(server.connections) == 1
        await server.after(2)
        await until(lambda: call.was_cancelled, "the cancel")
        assert "1 by write time-out" in server.lines[-1]
        with pytest.raises(ConnectionResetError):
            await client.read_all()
        writing.cancel()


@in_loop
async def test_a_reader_that_takes_a_little_now_and_then_is_not_cut() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get(), 4096)
        call = await server.call()
        writing = await write_until_full(server, call)
        (connection,) = server.connections
        for _ in range(20):
            await server.after(50)
            before = connection._progress._acked  # type: ignore[union-attr]
            while connection._progress._acked == before:  # type: ignore[union-attr]
                await client.read_some(1000)
                server.book.sweep()
        assert not call.was_cancelled
        reading = asyncio.ensure_future(client.read_until(b"\r\n0\r\n\r\n"))
        await writing
        await call.chunk(b"the end", is_last=True)
        call.end.set()
        assert (await reading).endswith(b"7\r\nthe end\r\n0\r\n\r\n")


@in_loop
async def test_what_is_left_to_a_reader_when_the_answer_is_complete_is_cut_too() -> None:
    server = Guarded()
    async with server.listening() as connect:
        await connect(get("/", "1.1", "Connection: close"), 4096)
        call = await server.call()
        (connection,) = server.connections
        connection.transport.set_write_buffer_limits(high=1 << 30)
        await call.answer(b"x" * (20 << 20))
        await until(lambda: connection._closed, "the end of the request")
        assert not call.was_cancelled
        await server.after(1)
        assert server.connections == [connection]
        await server.after(61)
        await until(lambda: not server.connections, "the cut")


# ----------------------------------------------------------------------------------------------- half-closed clients


@in_loop
async def test_a_client_that_has_shut_its_side_gets_all_its_answers() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get() + get("/second"))
        client.shut()
        await until(lambda: server.connections[0]._has_eof, "the end of its side")
        await (await server.call()).answer(b"one")
        await (await server.call(1)).answer(b"two")
        received = await client.read_all()
        assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        assert b"\r\n\r\none" in received
        assert received.endswith(b"\r\n\r\ntwo")


@in_loop
async def test_one_of_http_1_0_gets_its_answer_and_no_interim_one() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get("/", "1.0"))
        client.shut()
        call = await server.call()
        await until(lambda: server.connections[0]._has_eof, "the end of its side")
        await call.answer()
        assert (await client.read_all()).startswith(b"HTTP/1.0 200 OK\r\n")


@in_loop
async def test_one_that_shuts_its_side_between_two_chunks_gets_the_rest() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get())
        call = await server.call()
        await call.start()
        await call.chunk(b"first")
        await client.read_until(b"5\r\nfirst\r\n")
        client.received = b""
        client.shut()
        await client.read_until(b"0")
        await call.chunk(b"second")
        await call.chunk(b"third", is_last=True)
        call.end.set()
        assert await client.read_all() == b"06\r\nsecond\r\n5\r\nthird\r\n0\r\n\r\n", "a size with a leading zero"


@pytest.mark.parametrize("has_begun", [False, True])
@in_loop
async def test_one_that_has_closed_is_noticed_though_nothing_is_written(*, has_begun: bool) -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get())
        call = await server.call()
        if has_begun:
            await call.start()
            await call.chunk(b"first")
            await client.read_until(b"first\r\n")
        client.socket.close()
        await until(lambda: call.was_cancelled, "the cancel")


@in_loop
async def test_one_that_shuts_its_side_in_an_unfinished_head_is_closed() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get()[:20])
        client.shut()
        assert await client.read_all() == b""


@in_loop
async def test_a_leading_zero_goes_before_what_skips_send_as_well() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get())
        call = await server.call()
        wire = Wire.of(call.scope, call.receive)
        assert wire is not None
        await call.start()
        await call.chunk(b"first")
        client.shut()
        await client.read_until(b"first\r\n0")
        client.received = b""
        assert wire.try_write(b"second")
        await client.read_until(b"second\r\n")
        await call.chunk(b"third", is_last=True)
        call.end.set()
        assert await client.read_all() == b"6\r\nsecond\r\n5\r\nthird\r\n0\r\n\r\n"


# ------------------------------------------------------------------------------------------------------------ limits


@in_loop
async def test_a_connection_too_many_is_503_and_may_ask_for_the_servers_health() -> None:
    server = Guarded(most=2, surplus=2)
    async with server.listening() as connect:
        kept = [await connect(), await connect(get())]
        third, fourth, fifth = await connect(), await connect(), await connect()
        await third.send(get("/generate"))
        await fourth.send(get("/health"))
        received = await third.read_all()
        assert error_of(received) == (503, "too_many_connections")
        assert b"retry-after: 1" in received
        assert error_of(await fifth.read_all()) == (503, "too_many_connections"), "without having asked anything"
        health = await server.call(1)
        assert health.scope["path"] == "/health"
        await health.answer(b"healthy")
        received = await fourth.read_all()
        assert received.endswith(b"healthy")
        assert b"Connection: close" in received
        assert not [call for call in server.calls if call.scope["path"] == "/generate"]
        await (await server.call()).answer()
        await kept[1].read_until(b"fine")
        for client in kept:
            client.socket.close()
        await until(lambda: not server.connections, "room")
        again = await connect(get())
        await (await server.call(2)).answer()
        await again.read_until(b"fine")
        await server.after(1)
        assert "3 by connection limit" in server.lines[-1]


@pytest.mark.parametrize(
    ("limits", "already", "wanted", "expected", "raised"),
    [
        ((1024, 4096), 30, 100, (100, 32), 30 + 16 + 32 + 100 + 2048),
        ((1024, 1024), 30, 100, (100, 32), None),
        ((64, 64), 30, 4096, (16, 2), None),
        ((40, 40), 30, 4096, (1, 1), None),
    ],
)
def test_no_more_connections_than_descriptors(
    limits: tuple[int, int],
    already: int,
    wanted: int,
    expected: tuple[int, int],
    raised: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_to: list[tuple[int, int]] = []
    lines: list[str] = []
    monkeypatch.setattr(book_module.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(book_module.resource, "setrlimit", lambda _, pair: set_to.append(pair))
    log = SimpleNamespace(warning=lambda text, *words: lines.append(text % words))
    assert allowed_connections(wanted, log, lambda: already) == expected
    assert set_to == ([(raised, limits[1])] if raised else [])
    assert len(lines) == (expected[0] < wanted)
    assert all(f"ulimit -n) allow {expected[0]} connections" in line for line in lines)


# ---------------------------------------------------------------------------------------------------------- the end


@in_loop
async def test_at_the_workers_end_what_waits_is_closed_and_what_runs_is_not() -> None:
    server = Guarded()
    async with server.listening() as connect:
        silent, partial = await connect(), await connect(get()[:20])
        idle = await connect(get())
        await (await server.call()).answer()
        await idle.read_until(b"fine")
        running = await connect(get())
        call = await server.call(1)
        server.clock.advance_ns(FRESH_NS)
        fresh = await connect()
        await turn(20)
        server.worker.alive = False
        server.book.end()
        server.book.sweep()
        assert await silent.read_all() == b""
        assert await partial.read_all() == b""
        assert await idle.read_some() == b""
        assert len(server.connections) == 2
        await fresh.send(get())
        late = await server.call(2)
        server.clock.advance_ns(FRESH_NS)
        server.book.sweep()
        for one, client in ((call, running), (late, fresh)):
            await one.answer()
            assert b"Connection: close" in await client.read_all()


@in_loop
async def test_while_the_worker_drains_each_answer_is_the_last_of_its_connection_unless_its_head_was_sent() -> None:
    guarded = Guarded()
    async with guarded.listening() as connect:
        begun, waiting, idle = await connect(get("/begun")), await connect(get("/waiting")), await connect()
        first = await guarded.call(0)
        await first.start(200, (b"content-length", b"4"))
        guarded.book.must_close = lambda: True
        await (await guarded.call(1)).answer()
        assert b"connection: close" in (await waiting.read_all()).lower()
        await first.chunk(b"fine", is_last=True)
        first.end.set()
        assert b"connection: close" not in (await begun.read_until(b"fine")).lower()
        await begun.send(get("/next"))
        await (await guarded.call(2)).answer()
        assert b"connection: close" in (await begun.read_all()).lower()
        await idle.send(get("/new"))
        await (await guarded.call(3)).answer()
        assert b"connection: close" in (await idle.read_all()).lower()


@in_loop
async def test_the_book_knows_whether_a_client_has_still_to_take_something() -> None:
    guarded = Guarded()
    async with guarded.listening() as connect:
        client = await connect(get(), receive_buffer_bytes=4096)
        call = await guarded.call()
        assert not guarded.book.is_sending
        sending = asyncio.ensure_future(call.answer(bytes(8 << 20)))
        await until(lambda: guarded.book.is_sending, "a full socket")
        await client.read_until(b"\r\n\r\n")
        while len(client.received) < 8 << 20:
            await client.read_some()
        await sending
        await until(lambda: not guarded.book.is_sending, "an empty buffer")


@in_loop
async def test_at_the_workers_end_a_new_connection_has_a_moment_only() -> None:
    server = Guarded()
    async with server.listening() as connect:
        fresh = await connect()
        server.book.end()
        server.book.sweep()
        assert len(server.connections) == 1
        server.clock.advance_ns(FRESH_NS)
        server.book.sweep()
        assert await fresh.read_all() == b""


# ------------------------------------------------------------------------------------------------- answers, to anything


def with_headers(*lines: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: test\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


REFUSALS = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(20), 400),
    "HTTP/0.9": (b"GET /\r\n", 400),
    "NUL first": (b"\0" * 20, 400),
    "no line": (b"\r\n\r\n\r\n", 400),
    "bare LF": (b"GET / HTTP/1.1\nHost: test\n\n", 400),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: test\r\n\r\n", 400),
    "lower-case method": (b"get / HTTP/1.1\r\nHost: test\r\n\r\n", 400),
    "control in the target": (b"GET /\x01 HTTP/1.1\r\nHost: test\r\n\r\n", 400),
    "star for GET": (b"GET * HTTP/1.1\r\nHost: test\r\n\r\n", 400),
    "long URL": (b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: test\r\n\r\n", 414),
    "URL without an end": (b"GET /" + b"a" * 10_000, 414),
    "long field": (with_headers(b"X: " + b"y" * 9000), 431),
    "many fields": (with_headers(*[b"X: y"] * 200), 431),
    "NUL in a field": (with_headers(b"X: a\0b"), 400),
    "obs-fold": (with_headers(b"X: a", b" b"), 400),
    "space before the colon": (with_headers(b"Content-Length : 3"), 400),
    "no colon": (with_headers(b"nonsense"), 400),
    "two hosts": (with_headers(b"Host: other"), 400),
    "two lengths": (with_headers(b"Content-Length: 3", b"Content-Length: 4"), 400),
    "two equal lengths": (with_headers(b"Content-Length: 3", b"Content-Length: 3"), 400),
    "list of lengths": (with_headers(b"Content-Length: 3, 3"), 400),
    "negative length": (with_headers(b"Content-Length: -1"), 400),
    "signed length": (with_headers(b"Content-Length: +1"), 400),
    "length of thousands of digits": (with_headers(b"Content-Length: " + b"9" * 5000), 400),
    "length and chunks": (with_headers(b"Content-Length: 3", b"Transfer-Encoding: chunked"), 400),
    "chunks twice": (with_headers(b"Transfer-Encoding: chunked, chunked"), 400),
    "chunks not last": (with_headers(b"Transfer-Encoding: chunked, gzip"), 400),
    "unknown coding": (with_headers(b"Transfer-Encoding: xchunked"), 501),
    "chunks in HTTP/1.0": (with_headers(b"Transfer-Encoding: chunked").replace(b"/1.1", b"/1.0"), 400),
}
BAD_CHUNKS = [
    b"x\r\n",
    b"-1\r\n",
    b"0x1\r\n",
    b" 1\r\n",
    b"1 \r\n",
    b"\r\n",
    b"1\r\nabc",
    b"1;\r\n",
    b"f" * 9000,
    b"1\n",
]


@pytest.mark.parametrize("name", REFUSALS)
@in_loop
async def test_what_is_no_request_is_refused_in_the_shape_of_all_errors(name: str) -> None:
    sent, status = REFUSALS[name]
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(sent)
        assert error_of(await client.read_all())[0] == status
        assert server.calls == []


@pytest.mark.parametrize("chunk", BAD_CHUNKS)
@in_loop
async def test_what_is_no_chunk_ends_the_request(chunk: bytes) -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(with_headers(b"Transfer-Encoding: chunked") + chunk)
        assert error_of(await client.read_all()) == (400, "bad_request")
        client.socket.close()
        await until(lambda: all(call.was_cancelled for call in server.calls), "the cancel")


@in_loop
async def test_nonsense_after_an_answer_is_refused_too() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get())
        await (await server.call()).answer()
        await client.read_until(b"fine")
        client.received = b""
        await client.send(b"nonsense\r\n\r\n")
        assert error_of(await client.read_all()) == (400, "bad_request")


@in_loop
async def test_an_answer_reaches_a_client_that_is_still_sending() -> None:
    server = Guarded(reads_body=False)
    async with server.listening() as connect:
        client = await connect(post(50 << 20, b"p" * 1000))
        await (await server.call()).answer()
        for _ in range(50):
            await client.send(b"p" * (1 << 20))
        received = await client.read_all()
        assert b"Connection: close" in received
        assert received.endswith(b"fine")
        assert len(server.connections) == 1
        await server.after(1.9)
        assert len(server.connections) == 1
        await server.after(0.2)
        await until(lambda: not server.connections, "the end of its patience")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://some.host/health", "/health"),
        ("http://some.host:80/a//b?q=/x", "/a//b"),
        ("http://some.host", "/"),
        ("http://some.host?q", "/"),
        ("//twice", "//twice"),
    ],
)
@in_loop
async def test_a_whole_url_is_taken_for_its_path(target: str, path: str) -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get(target))
        call = await server.call()
        assert call.scope["path"] == path
        await call.answer()
        await client.read_until(b"fine")


@in_loop
async def test_a_wish_for_another_protocol_is_not_granted() -> None:
    upgrade = (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {'A' * 22}==",
    )
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get("/", "1.1", *upgrade))
        call = await server.call()
        assert call.scope["type"] == "http"
        await call.answer()
        await client.read_until(b"fine")


@in_loop
async def test_expect_100_continue() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(post(3)[:-2] + b"Expect: 100-continue\r\n\r\n")
        await client.read_until(b"HTTP/1.1 100 Continue\r\n\r\n")
        await client.send(b"abc")
        call = await server.call()
        assert call.body == b"abc"
        await call.answer()
        await client.read_until(b"fine")


@in_loop
async def test_a_connection_of_http_1_0_is_not_kept() -> None:
    server = Guarded()
    async with server.listening() as connect:
        client = await connect(get("/", "1.0", "Connection: keep-alive"))
        call = await server.call()
        await call.start()
        await call.chunk(b"a body without a length", is_last=True)
        call.end.set()
        assert (await client.read_all()).endswith(b"a body without a length")
