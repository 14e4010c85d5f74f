"""Streams over gunicorn's own protocol and real sockets: the same bytes with the wire and without, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from gunicorn.asgi.protocol import ASGIProtocol

from ironbatch.layout import FINISH_LENGTH, FINISH_NONE
from ironbatch.web import wire as wire_module
from ironbatch.web.choice import Choice
from ironbatch.web.connection import Connection
from ironbatch.web.lines import plain_lines
from ironbatch.web.stream import MAX_CHUNK_LINES, Exit, TokenStream
from ironbatch.web.wire import KNOWN_GUNICORN, Wire, known_protocols
from tests.web.fakes import expected_lines, gunicorn_worker, in_loop, turn, until

HIGH_WATER_BYTES = 65_536
BODY_BYTES_MAX = len(plain_lines(MAX_CHUNK_LINES, 2 * MAX_CHUNK_LINES)) + 64
both_framings = pytest.mark.parametrize("version", ["1.0", "1.1"])
Connect = Callable[[bytes], Coroutine[Any, Any, "Client"]]
with_and_without = pytest.mark.parametrize("has_wire", [True, False])


class Served:
    """One request that has come in: its stream, and how many messages `send` was given."""

    def __init__(self, scope: dict[str, Any], receive: Any, send: Any, *, has_wire: bool) -> None:
        self.sends = 0
        self.produced = 0
        self.scope, self.receive = scope, receive
        self.wire = Wire.of(scope, receive) if has_wire else None

        def counting(message: dict[str, Any]) -> Any:
            self.sends += 1
            return send(message)

        self.stream = TokenStream(Exit(counting, 0, self.wire), [Choice(0)])

    def more(self, count: int, *, is_last: bool = False) -> None:
        self.produced += count
        self.stream.choices[0].advance(self.produced, FINISH_LENGTH if is_last else FINISH_NONE, 0)
        self.stream.write()

    @property
    def transport(self) -> Any:
        return self.receive.__self__.protocol.transport


class Server:
    """gunicorn's protocol on a port; the test brings each request's stream its tokens."""

    def __init__(self, *, has_wire: bool = True, has_access_log: bool = False) -> None:
        self.problems: list[object] = []
        self.requests: list[Served] = []
        self._has_wire = has_wire
        self._worker = gunicorn_worker(self._serve, self.problems, has_access_log=has_access_log)

    async def _serve(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        served = Served(scope, receive, send, has_wire=self._has_wire)
        self.requests.append(served)
        try:
            await served.stream.ended
        except asyncio.CancelledError:
            served.stream.abandon()
            raise

    async def request(self, index: int = 0) -> Served:
        """The request that came as the `index`-th, once it is there."""
        await until(lambda: len(self.requests) > index, f"request {index}")
        return self.requests[index]

    @contextlib.asynccontextmanager
    async def listening(self, protocol: type = ASGIProtocol) -> AsyncIterator[Connect]:
        """Serve; yields what makes a client that has sent something."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol(self._worker), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        async with server:
            with contextlib.ExitStack() as stack:

                async def connect(sent: bytes) -> Client:
                    client = Client()
                    stack.callback(client.socket.close)
                    await loop.sock_connect(client.socket, address)
                    await loop.sock_sendall(client.socket, sent)
                    return client

                yield connect
        await until(lambda: self._worker.nr_conns == 0, "the end of all connections")


class Client:
    """A raw connection whose receive buffer is small, so that it is soon full."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.socket.settimeout(0)
        self.received = b""

    async def read_until(self, condition: Callable[[bytes], bool]) -> None:
        while not condition(self.received):
            data = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 20)
            assert data, f"hung up after {self.received[-200:]!r}"
            self.received += data

    async def read_all(self) -> bytes:
        """Until the server hangs up."""
        while data := await asyncio.get_running_loop().sock_recv(self.socket, 1 << 20):
            self.received += data
        self.socket.close()
        return re.sub(rb"Date: [^\r]*", b"Date: some day", self.received)


def post(version: str = "1.1", *headers: str) -> bytes:
    lines = [f"POST /generate HTTP/{version}", "Host: test", "Content-Length: 2", *headers]
    return "\r\n".join([*lines, "", "{}"]).encode()


def body_of(received: bytes) -> bytes:
    """The body of one whole response in chunks."""
    framed = received.partition(b"\r\n\r\n")[2]
    parts = []
    while True:
        size, _, framed = framed.partition(b"\r\n")
        if size == b"0":
            assert framed == b"\r\n"
            return b"".join(parts)
        parts.append(framed[: int(size, 16)])
        assert framed[int(size, 16) :][:2] == b"\r\n"
        framed = framed[int(size, 16) + 2 :]


# ------------------------------------------------------------------------------------------------------ same bytes


async def exchange(sent: bytes, scripts: list[list[int]], *, has_wire: bool) -> tuple[bytes, list[int]]:
    """What a client reads whose k-th stream is brought these numbers of tokens; and each stream's calls of `send`."""
    server = Server(has_wire=has_wire)
    async with server.listening() as connect:
        client = await connect(sent)
        reading = asyncio.ensure_future(client.read_all())
        for index, script in enumerate(scripts):
            request = await server.request(index)
            for k, count in enumerate(script, 1):
                request.more(count, is_last=k == len(script))
                await until(lambda request=request: request.transport.get_write_buffer_size() == 0)
        received = await reading
    assert server.problems == []
    return received, [request.sends for request in server.requests]


LONG = [1, 1, 3, 8, 64, MAX_CHUNK_LINES, 1, 2 * MAX_CHUNK_LINES + 7, 1, 5]


@both_framings
@pytest.mark.parametrize("script", [[1], [5], [1, 1], [1, 1, 1], LONG])
@in_loop
async def test_the_same_bytes_in_the_same_chunks(version: str, script: list[int]) -> None:
    sent = post(version, "Connection: close")
    wired, wired_sends = await exchange(sent, [script], has_wire=True)
    plain, plain_sends = await exchange(sent, [script], has_wire=False)
    assert wired == plain
    body = body_of(wired) if version == "1.1" else wired.partition(b"\r\n\r\n")[2]
    assert body == expected_lines(sum(script))
    if len(script) > 2:
        assert wired_sends[0] < plain_sends[0], "the chunks in between need no `send`"


@in_loop
async def test_only_the_first_and_the_last_chunk_need_send() -> None:
    _, sends = await exchange(post("1.1", "Connection: close"), [[1] * 20], has_wire=True)
    assert sends == [3], "the start, the first chunk and the last"


@in_loop
async def test_pipelined_requests_are_answered_one_after_the_other() -> None:
    sent = post() + post() + post("1.1", "Connection: close")
    scripts = [[1, 2, 3], [4], [1, 1, 1, 1]]
    wired, _ = await exchange(sent, scripts, has_wire=True)
    plain, _ = await exchange(sent, scripts, has_wire=False)
    assert wired == plain
    assert wired.count(b"HTTP/1.1 200 OK") == 3


@in_loop
async def test_nonsense_behind_a_request_is_refused_after_its_stream() -> None:
    sent = post() + b"\0 no request\r\n\r\n"
    wired, _ = await exchange(sent, [[1, 2, 3]], has_wire=True)
    plain, _ = await exchange(sent, [[1, 2, 3]], has_wire=False)
    assert wired == plain
    assert b"HTTP/1.1 400" in wired


@with_and_without
@in_loop
async def test_a_second_request_on_the_connection(*, has_wire: bool) -> None:
    server = Server(has_wire=has_wire)
    async with server.listening() as connect:
        client = await connect(post())
        for index, tokens in enumerate((5, 3)):
            request = await server.request(index)
            for k in range(1, tokens + 1):
                request.more(1, is_last=k == tokens)
            await client.read_until(lambda received: received.endswith(b"\r\n0\r\n\r\n"))
            assert body_of(client.received) == expected_lines(tokens)
            client.received = b""
            if index == 0:
                await asyncio.get_running_loop().sock_sendall(client.socket, post())


# ---------------------------------------------------------------------------------------------------- slow readers


async def fill(request: Served) -> None:
    """Bring tokens until the stream waits for its reader."""
    while request.stream._blocked is None:
        request.more(500)
        await asyncio.sleep(0)


@with_and_without
@both_framings
@in_loop
async def test_a_stalled_reader_costs_bounded_memory_and_later_gets_every_byte(version: str, *, has_wire: bool) -> None:
    server = Server(has_wire=has_wire)
    async with server.listening() as connect:
        stalled = await connect(post(version, "Connection: close"))
        request = await server.request()
        await fill(request)
        for _ in range(20):
            request.more(2 * MAX_CHUNK_LINES)
            await turn()
        assert HIGH_WATER_BYTES < request.transport.get_write_buffer_size() < HIGH_WATER_BYTES + 2 * BODY_BYTES_MAX
        await a_stream_of_another_client(server, connect)
        request.more(1, is_last=True)
        received = await stalled.read_all()
        await request.stream.ended
    body = body_of(received) if version == "1.1" else received.partition(b"\r\n\r\n")[2]
    assert body == expected_lines(request.produced)


async def a_stream_of_another_client(server: Server, connect: Connect) -> None:
    other = await connect(post("1.1", "Connection: close"))
    request = await server.request(1)
    for count in range(1, 11):
        request.more(1, is_last=count == 10)
    assert body_of(await other.read_all()) == expected_lines(10)


@in_loop
async def test_one_stall_after_another() -> None:
    server = Server()
    async with server.listening() as connect:
        client = await connect(post("1.1", "Connection: close"))
        request = await server.request()
        for _ in range(3):
            await fill(request)
            last = plain_lines(request.produced - 1, request.produced) + b"\r\n"
            await client.read_until(lambda received, last=last: received.endswith(last))
            await until(lambda: request.stream._blocked is None, "the end of the stall")
            sends = request.sends
            request.more(1)
            assert request.sends == sends, "a reader that has caught up is written to directly again"
        request.more(1, is_last=True)
        assert body_of(await client.read_all()) == expected_lines(request.produced)


# ---------------------------------------------------------------------------------------------------- disconnects


@with_and_without
@pytest.mark.parametrize("is_stalled", [False, True])
@in_loop
async def test_a_client_that_goes_in_the_middle_ends_the_request(*, has_wire: bool, is_stalled: bool) -> None:
    server = Server(has_wire=has_wire)
    async with server.listening() as connect:
        client = await connect(post())
        request = await server.request()
        request.more(1)
        request.more(1)
        await client.read_until(lambda received: b'"token_index":1,' in received)
        if is_stalled:
            await fill(request)
        client.socket.close()

        def is_cancelled() -> bool:
            request.more(1)  # as the scheduler, which does not know yet
            return request.stream.was_cancelled

        await until(is_cancelled, "the request's cancellation")
        request.more(1, is_last=True)
        if request.wire is not None:
            assert not request.wire.try_write(b"late")
    assert server.problems == []


# ------------------------------------------------------------------------------------------------- which wires exist


async def wire_of(server: Server, protocol: type = ASGIProtocol, **scope: Any) -> Wire | None:
    async with server.listening(protocol) as connect:
        client = await connect(post("1.1", "Connection: close"))
        request = await server.request()
        found = Wire.of(request.scope | scope, request.receive)
        request.more(1, is_last=True)
        assert body_of(await client.read_all()) == expected_lines(1)
    return found


@in_loop
async def test_the_known_gunicorn_has_a_wire() -> None:
    assert await wire_of(Server()) is not None


@in_loop
async def test_a_protocol_that_we_do_not_know_has_none() -> None:
    class Another(ASGIProtocol):  # type: ignore[misc]
        pass

    assert await wire_of(Server(), Another) is None


@pytest.mark.parametrize("version", ["2", "3", "1.2", ""])
@in_loop
async def test_another_http_has_none(version: str) -> None:
    assert await wire_of(Server(), http_version=version) is None


@in_loop
async def test_an_access_log_counts_what_send_was_given() -> None:
    assert await wire_of(Server(has_access_log=True)) is None


@in_loop
async def test_another_gunicorn_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "KNOWN_PROTOCOLS", known_protocols((28, 0, 0)))
    assert await wire_of(Server()) is None


@pytest.mark.parametrize("receive", [lambda: None, [].append, SimpleNamespace(protocol=None).__repr__])
def test_a_receive_of_another_server_has_none(receive: Any) -> None:
    assert Wire.of({"http_version": "1.1"}, receive) is None


def test_the_pinned_gunicorn_is_the_known_one() -> None:
    assert known_protocols((*KNOWN_GUNICORN, 1)) == (ASGIProtocol, Connection)
    assert (ASGIProtocol, Connection) == wire_module.KNOWN_PROTOCOLS
