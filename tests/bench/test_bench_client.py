"""The client and the closed loop, against a real server that behaves well or badly."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from ironbatch.bench import client as client_module
from ironbatch.bench import stream as stream_module
from ironbatch.bench.client import GenerateClient, _MeasuredStream
from ironbatch.bench.load import Unreachable, closed_loop
from ironbatch.bench.measure import Measurements
from ironbatch.bench.stream import ExpectedStream
from ironbatch.clock import FakeClock
from tests.bench.server import (
    DEADLINE_S,
    Behaviour,
    Exchange,
    answers,
    closes_after,
    good,
    hang,
    hang_in_stream,
    line,
    make_client,
    sends,
    serving,
    stream,
    until,
)

ERROR_BODY = json.dumps({"error": {"type": "queue_full", "message": "768 slots are taken", "param": None}})
CLOSING_HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def load(behaviour: Behaviour, *, requests: int = 3, concurrency: int = 2, **more: Any) -> Measurements:
    async with serving(behaviour) as (url, _), make_client(url, **more) as client:
        await closed_loop(client, concurrency=concurrency, total_requests=requests)
    return client.measurements


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections: it is bound, so nobody else can take it, but not listened on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize("tokens", [0, 1, 2, 300])
def test_good_server(tokens: int) -> None:
    measured = asyncio.run(load(good, tokens=tokens, requests=7))
    assert (measured.succeeded, measured.failed, measured.failures) == (7, 0, {})
    assert (measured.tokens, measured.tokens_of_failed, measured.ended_early) == (7 * tokens, 0, 0)
    assert (measured.ttft.count, measured.end_to_end.count) == (7, 7)
    assert measured.inter_token.count == 7 * max(tokens - 1, 0)


@pytest.mark.parametrize(
    "behaviour",
    [
        answers("200 OK", stream(4).decode()),
        closes_after(b"HTTP/1.0 200 OK\r\n\r\n" + stream(4)),
        closes_after(CLOSING_HEAD + b"content-length: 123\r\n\r\n" + stream(4)),
        closes_after(CLOSING_HEAD + b"transfer-encoding: chunked\r\n\r\n7b\r\n" + stream(4) + b"\r\n0\r\n\r\n"),
    ],
)
def test_every_way_to_end_a_body_is_good(behaviour: Behaviour) -> None:
    assert len(stream(4)) == 123
    measured = asyncio.run(load(behaviour, concurrency=1))
    assert (measured.succeeded, measured.failures, measured.tokens) == (3, {}, 12)


def test_what_is_sent() -> None:
    heads, bodies = [], []

    async def behaviour(exchange: Exchange) -> None:
        heads.append(exchange.head.lower())
        bodies.append(exchange.fields)
        await exchange.send(CHUNKED_HEAD.replace(b"\r\n", b"\r\nset-cookie: a=b\r\n", 1))
        await exchange.write(stream(4))
        await exchange.end_stream()

    async def scenario() -> None:
        async with serving(behaviour) as (url, server), make_client(url) as client:
            await closed_loop(client, concurrency=3, total_requests=30)
            assert (server.requests, server.connections) == (30, 3), "connections are kept"
            assert client.measurements.succeeded == 30
            assert all(f"host: {url.removeprefix('http://')}\r\n" in head for head in heads)

    asyncio.run(scenario())
    assert bodies == [{"prompt_tokens": 8, "max_new_tokens": 4}] * 30
    for text in ("content-type: application/json", "accept-encoding: identity", "user-agent: ironbatch-bench"):
        assert all(f"{text}\r\n" in head for head in heads)
    assert not any("cookie" in head for head in heads)


def test_line_counts_when_it_is_complete() -> None:
    clock, measured = FakeClock(), Measurements()
    receiver = _MeasuredStream(ExpectedStream(4), clock, measured)
    text = stream(4)
    for at_ns, part in ((30, text[:30]), (40, text[30:31]), (91, text[31:])):
        clock.set_ns(at_ns)
        receiver.receive(part)
    receiver.end()
    assert (measured.ttft.max_ns, measured.ttft.count) == (40, 1)
    assert (measured.inter_token.count, measured.inter_token.sum_ns, measured.tokens) == (3, 51, 4)


def test_early_end_is_no_failure_but_told() -> None:
    measured = asyncio.run(load(sends(line(0), line(1, done=True))))
    assert (measured.succeeded, measured.ended_early, measured.tokens) == (3, 3, 6)


@pytest.mark.parametrize(
    ("behaviour", "name", "detail", "tokens"),
    [
        (
            answers("503 Service Unavailable", ERROR_BODY, "Retry-After: 1"),
            "HTTP 503: queue_full, Retry-After",
            "768 slots",
            0,
        ),
        (answers("400 Bad Request", ERROR_BODY), "HTTP 400: queue_full", "768 slots", 0),
        (answers("502 Bad Gateway", "<b>\x1b[2J"), "HTTP 502", "<b>?[2J", 0),
        (answers("500 Internal Server Error", ""), "HTTP 500", "Internal Server Error", 0),
        (answers("500 Internal Server Error", '{"error": "' + "x" * 200_000), "HTTP 500", "xxx...", 0),
        (answers("302 Found", "", "Location: /elsewhere"), "HTTP 302", "Found", 0),
        (closes_after(b"HTTP/1.1 500 Oh\r\ncontent-length: 99\r\n\r\nhalf an answ"), "HTTP 500", "half an answ", 0),
        (sends(), stream_module.TRUNCATED, "after 0 of 4", 0),
        (sends(line(0), line(1)), stream_module.TRUNCATED, "after 2 of 4", 2),
        (closes_after(CHUNKED_HEAD + b"%x\r\n%b" % (99, line(0))), stream_module.TRUNCATED, "1 tokens, then", 1),
        (closes_after(b"HTTP/1.1 200 OK\r\n\r\n" + line(0)), stream_module.TRUNCATED, "after 1 of 4", 1),
        (closes_after(CHUNKED_HEAD + b"%x\r\n%b" % (99, line(0)), resets=True), stream_module.TRUNCATED, "1 tokens", 1),
        (closes_after(b""), client_module.CONNECTION_LOST, "closed", 0),
        (closes_after(b"HTTP/1.1 200"), client_module.CONNECTION_LOST, "closed", 0),
        (closes_after(b"", resets=True), client_module.CONNECTION_LOST, "", 0),
        (closes_after(b"220 mail.example ESMTP\r\n\r\n"), client_module.BAD_HTTP, "220 mail", 0),
        (closes_after(CHUNKED_HEAD + b"what?\r\n"), client_module.BAD_HTTP, "chunk size", 0),
        (
            closes_after(CHUNKED_HEAD + b"7b\r\n" + stream(4) + b"\r\n0\r\n\r\nmore"),
            client_module.BAD_HTTP,
            "Bad status line",
            0,
        ),
        (
            closes_after(b"HTTP/1.1 200 OK\r\ncontent-length: 121\r\n\r\n" + stream(4)),
            client_module.BAD_HTTP,
            "Bad status line",
            0,
        ),
        (closes_after(b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000), client_module.BAD_HTTP, "8190 bytes", 0),
        (answers("200 OK", stream(4).decode() + "}", "content-encoding: gzip"), stream_module.DATA_AFTER_DONE, "}", 4),
        (
            sends(line(0) + line(1, done=True, error={"type": "engine_lost", "message": "gone"})),
            f"{stream_module.STREAM_ERROR}: engine_lost",
            "gone",
            1,
        ),
        (sends(line(0) + line(2)), stream_module.OUT_OF_ORDER, "token_index 2", 1),
        (sends(b"hello\n"), stream_module.MALFORMED_LINE, "hello", 0),
        (sends(line(0, done=True), line(1, done=True)), stream_module.DATA_AFTER_DONE, '"token_index":1', 1),
    ],
)
def test_bad_server_fails_by_name(behaviour: Behaviour, name: str, detail: str, tokens: int) -> None:
    measured = asyncio.run(load(behaviour))
    assert (measured.succeeded, measured.failed, measured.end_to_end.count) == (0, 3, 0)
    assert list(measured.failures) == [name]
    assert measured.failures[name].count == 3
    assert detail in measured.failures[name].example
    assert measured.tokens == measured.tokens_of_failed == 3 * tokens


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
            generating = asyncio.ensure_future(client.generate())
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
        clients: list[GenerateClient] = []

        async def slow(exchange: Exchange) -> None:
            await exchange.open_stream()
            for index, text in enumerate(stream(4).splitlines(keepends=True)):
                advance(9.0)
                await exchange.write(text)
                await until(lambda: clients[0].measurements.tokens == index + 1)  # noqa: B023 - awaited here
            await exchange.end_stream()

        async with serving(slow) as (url, _), make_client(url, timeout_s=10.0) as client:
            clients.append(client)
            assert await client.generate() is None

    run_in_stopped_time(scenario())


def test_chunk_that_is_malformed_later_does_not_hang() -> None:
    """The reader is not told by aiohttp, which only closes the connection."""

    async def scenario() -> None:
        clients: list[GenerateClient] = []
        closed = asyncio.Event()

        async def malformed(exchange: Exchange) -> None:
            await exchange.open_stream()
            await exchange.write(line(0))
            await until(lambda: clients[0].measurements.tokens == 1)
            await exchange.send(b"what?\r\n")
            await exchange.until_closed()
            closed.set()

        async with serving(malformed) as (url, _), make_client(url, timeout_s=10.0) as client:
            clients.append(client)
            generating = asyncio.ensure_future(client.generate())
            await closed.wait()
            advance(10.0)
            failure = await generating
        assert failure is not None
        assert client.measurements.tokens_of_failed == 1

    run_in_stopped_time(scenario())


def test_latencies_are_those_of_the_arrivals() -> None:
    clock = FakeClock()
    clients: list[GenerateClient] = []

    async def timed(exchange: Exchange) -> None:
        await exchange.open_stream()
        received = 0
        for at_ns, count in ((1000, 2), (1400, 1), (2000, 3)):
            clock.set_ns(at_ns)
            last = received + count == 6
            await exchange.write(b"".join(line(received + k, done=last and k == count - 1) for k in range(count)))
            received += count
            await until(lambda: clients[0].measurements.tokens == received)  # noqa: B023 - awaited here
        clock.set_ns(2040)
        await exchange.end_stream()

    async def scenario() -> None:
        async with serving(timed) as (url, _), make_client(url, clock=clock, tokens=6) as client:
            clients.append(client)
            assert await client.generate() is None

    asyncio.run(scenario())
    measured = clients[0].measurements
    gaps_ns = [measured.inter_token.percentile_ns(percent) for percent in (20, 40, 60, 80, 100)]
    assert gaps_ns == [0, 200, 200, 200, 400]
    assert measured.inter_token.sum_ns == 2000 - 1000, "from the first token to the last"
    assert measured.ttft.percentile_ns(50) == 1000
    assert measured.end_to_end.percentile_ns(50) == 2040


def test_concurrency_is_reached_and_never_exceeded() -> None:
    in_flight, most, arrived = 0, 0, asyncio.Event()

    async def counting(exchange: Exchange) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 5:
            arrived.set()
        async with asyncio.timeout(DEADLINE_S):
            await arrived.wait()
        in_flight -= 1
        await good(exchange)

    measured = asyncio.run(load(counting, requests=40, concurrency=5))
    assert (measured.succeeded, most) == (40, 5)


def test_connection_closed_while_idle_is_opened_again() -> None:
    async def closing(exchange: Exchange) -> None:
        await good(exchange)
        exchange.send_end()
        await exchange.until_closed()

    async def scenario() -> None:
        async with serving(closing) as (url, server), make_client(url) as client:
            for _ in range(3):
                assert await client.generate() is None
                await until(lambda: all(task.done() for task in server.tasks))
            assert server.connections == 3

    asyncio.run(scenario())


def test_nothing_is_sent_twice() -> None:
    async def scenario() -> None:
        async def once(exchange: Exchange) -> None:
            await (good(exchange) if server.requests == 1 else exchange.close())

        async with serving(once) as (url, server), make_client(url) as client:
            assert await client.generate() is None
            failure = await client.generate()
            assert failure is not None
            assert failure.name == client_module.CONNECTION_LOST
            assert (server.requests, server.connections) == (2, 1)

    asyncio.run(scenario())


def test_connection_with_an_answer_too_many_is_not_kept() -> None:
    async def twice(exchange: Exchange) -> None:
        await exchange.send(2 * (CHUNKED_HEAD + b"7b\r\n" + stream(4) + b"\r\n0\r\n\r\n"))

    async def scenario() -> None:
        async with serving(twice) as (url, server), make_client(url) as client:
            assert await client.generate() is None
            assert await client.generate() is None
            assert server.connections == 2

    asyncio.run(scenario())


def test_unreachable_server_ends_the_load_at_once() -> None:
    async def scenario(url: str) -> int:
        async with make_client(url) as client:
            with pytest.raises(Unreachable, match=f"can't reach {url}: {client_module.CONNECTION_REFUSED}: nothing"):
                await closed_loop(client, concurrency=4, total_requests=2000)
            return client.measurements.requests

    with refusing_port() as port:
        assert asyncio.run(scenario(f"http://127.0.0.1:{port}")) <= 4


def test_server_that_goes_away_later_is_counted_like_any_failure() -> None:
    last = closes_after(CLOSING_HEAD + b"content-length: 123\r\n\r\n" + stream(4))

    async def scenario() -> Measurements:
        async with contextlib.AsyncExitStack() as stack:
            async with serving(last) as (url, _):
                client = await stack.enter_async_context(make_client(url))
                await closed_loop(client, concurrency=1, total_requests=1)
            await closed_loop(client, concurrency=4, total_requests=20)
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
            failure = await client.generate()
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
            generating = asyncio.ensure_future(client.generate())
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
