"""Connections and time-outs of the client: opened, kept, lost, refused; and nothing comes."""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from ironbatch.bench import client as client_module
from ironbatch.bench.load import Unreachable
from ironbatch.bench.measure import Measurements
from tests.bench.server import (
    CHUNKED_HEAD,
    CLOSING_HEAD,
    Behaviour,
    Exchange,
    closes_after,
    good,
    hang,
    hang_in_stream,
    line,
    make_client,
    serving,
    stream,
    until,
)


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections: it is bound, so nobody else can take it, but not listened on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


async def hang_after_last_line(exchange: Exchange) -> None:
    await exchange.open_stream()
    await exchange.write(stream(4))
    await hang(exchange)


class StoppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until the test moves it."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def run_in_stopped_time(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=StoppedLoop) as runner:
        runner.run(scenario)


def advance(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StoppedLoop)
    loop.now_s += seconds


@pytest.mark.parametrize(("behaviour", "tokens"), [(hang, 0), (hang_in_stream, 1), (hang_after_last_line, 4)])
def test_no_progress_is_a_time_out(behaviour: Behaviour, tokens: int) -> None:
    async def scenario() -> None:
        async with serving(behaviour) as (url, server), make_client(url, timeout_s=10.0) as client:
            generating = asyncio.ensure_future(client.once())
            await until(lambda: (server.requests, client.measurements.tokens) == (1, tokens))
            advance(9.99)
            for _ in range(10):
                await asyncio.sleep(0)
            assert not generating.done()
            advance(0.01)
            failure = await generating
        assert failure is not None
        assert (failure.name, failure.detail) == (client_module.TIMED_OUT, f"{tokens} tokens, then nothing for 10 s")

    run_in_stopped_time(scenario())


def test_progress_puts_the_time_out_off() -> None:
    async def scenario() -> None:
        async def slow(exchange: Exchange) -> None:
            await exchange.open_stream()
            for index, text in enumerate(stream(4).splitlines(keepends=True)):
                advance(9.0)
                await exchange.write(text)
                await until(lambda: client.measurements.tokens == index + 1)  # noqa: B023 - awaited here
            await exchange.end_stream()

        async with serving(slow) as (url, _), make_client(url, timeout_s=10.0) as client:
            assert await client.once() is None

    run_in_stopped_time(scenario())


@pytest.mark.parametrize(
    ("head", "name", "tokens"),
    [
        (CHUNKED_HEAD, client_module.BAD_HTTP, 1),
        (CHUNKED_HEAD.replace(b"200 OK", b"500 Oh"), "HTTP 500", 0),
    ],
)
def test_chunk_that_is_malformed_later_does_not_hang(head: bytes, name: str, tokens: int) -> None:
    """The reader is not told by aiohttp, which only closes the connection."""

    async def scenario() -> None:
        closed = asyncio.Event()

        async def malformed(exchange: Exchange) -> None:
            await exchange.send(head)
            await exchange.write(line(0))
            await until(lambda: len(client._reading) == 1 and client.measurements.tokens == tokens)
            await exchange.send(b"what?\r\n")
            await exchange.until_closed()
            closed.set()

        async with serving(malformed) as (url, _), make_client(url, timeout_s=10.0) as client:
            generating = asyncio.ensure_future(client.once())
            await closed.wait()
            advance(10.0)
            failure = await generating
        assert failure is not None
        assert (failure.name, client.measurements.tokens_of_failed) == (name, tokens)

    run_in_stopped_time(scenario())


def test_connection_closed_while_idle_is_opened_again() -> None:
    async def closing(exchange: Exchange) -> None:
        await good(exchange)
        exchange.send_end()
        await exchange.until_closed()

    async def scenario() -> None:
        async with serving(closing) as (url, server), make_client(url) as client:
            for _ in range(3):
                assert await client.once() is None
                await until(lambda: all(task.done() for task in server.tasks))
            assert server.connections == 3

    asyncio.run(scenario())


def test_nothing_is_sent_twice() -> None:
    async def scenario() -> None:
        async def once(exchange: Exchange) -> None:
            await (good(exchange) if server.requests == 1 else exchange.close())

        async with serving(once) as (url, server), make_client(url) as client:
            assert await client.once() is None
            failure = await client.once()
            assert failure is not None
            assert failure.name == client_module.CONNECTION_LOST
            assert (server.requests, server.connections) == (2, 1)

    asyncio.run(scenario())


def test_connection_with_an_answer_too_many_is_not_kept() -> None:
    async def twice(exchange: Exchange) -> None:
        await exchange.send(2 * (CHUNKED_HEAD + b"7b\r\n" + stream(4) + b"\r\n0\r\n\r\n"))

    async def scenario() -> None:
        async with serving(twice) as (url, server), make_client(url) as client:
            assert await client.once() is None
            assert await client.once() is None
            assert server.connections == 2

    asyncio.run(scenario())


def test_unreachable_server_ends_the_load_at_once() -> None:
    async def scenario(url: str) -> int:
        async with make_client(url) as client:
            with pytest.raises(Unreachable, match=f"can't reach {url}: {client_module.CONNECTION_REFUSED}: nothing"):
                await client.closed_loop(concurrency=4, total_requests=2000)
            return client.measurements.requests

    with refusing_port() as port:
        assert asyncio.run(scenario(f"http://127.0.0.1:{port}")) <= 4


def test_server_that_goes_away_later_is_counted_like_any_failure() -> None:
    last = closes_after(CLOSING_HEAD + b"content-length: 123\r\n\r\n" + stream(4))

    async def scenario() -> Measurements:
        async with contextlib.AsyncExitStack() as stack:
            async with serving(last) as (url, _):
                client = await stack.enter_async_context(make_client(url))
                await client.closed_loop(concurrency=1, total_requests=1)
            await client.closed_loop(concurrency=4, total_requests=20)
            return client.measurements

    measured = asyncio.run(scenario())
    assert (measured.succeeded, measured.failed) == (1, 20)
    assert measured.failures[client_module.CONNECTION_REFUSED].count == 20


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "127.1", "nosuch.invalid"])
def test_host_that_is_none(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    def unknown(name: str | bytes, *_: object, **__: object) -> None:
        str(name).encode("idna")  # as the real one
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def scenario() -> None:
        async with make_client(f"http://{host}") as client:
            failure = await client.once()
            assert failure is not None
            assert (failure.name, failure.unreachable) == (client_module.CONNECT_FAILED, True)
            assert failure.detail.isprintable()

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("greeting", "name", "detail"),
    [
        (b"220 no TLS here\r\n", client_module.CONNECT_FAILED, "127.0.0.1: "),
        (b"", client_module.CONNECT_TIMED_OUT, "no connection within 10 s"),
    ],
)
def test_server_that_speaks_no_tls(greeting: bytes, name: str, detail: str) -> None:
    async def scenario() -> None:
        accepted, over = asyncio.Event(), asyncio.Event()

        async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(greeting)
            accepted.set()
            await over.wait()
            writer.close()

        listener = await asyncio.start_server(plain, "127.0.0.1", 0)
        async with make_client(f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}", timeout_s=10.0) as client:
            generating = asyncio.ensure_future(client.once())
            await accepted.wait()
            if not greeting:
                advance(11.0)  # aiohttp rounds up
            failure = await generating
        assert failure is not None
        assert (failure.name, failure.unreachable) == (name, True)
        assert detail in failure.detail
        over.set()
        listener.close()
        await listener.wait_closed()

    run_in_stopped_time(scenario())
