"""The client and the closed loop, against a real server that behaves well or badly."""

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ironbatch.bench import client as client_module
from ironbatch.bench import connection as connection_module
from ironbatch.bench import stream as stream_module
from ironbatch.bench.client import GenerateClient, _MeasuredStream
from ironbatch.bench.connection import ConnectError, ConnectionLost, NoProgress, Target, _Wire
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

SHORT_S = 0.4  # long enough for a first line to come, on a busy machine too
ERROR_BODY = json.dumps({"error": {"type": "queue_full", "message": "768 slots are taken", "param": None}})
CLOSING_HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def load(behaviour: Behaviour, *, requests: int = 3, concurrency: int = 2, **more: Any) -> Measurements:
    async with serving(behaviour) as (url, _):
        client = await make_client(url, **more)
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
        await good(exchange)

    async def scenario() -> None:
        async with serving(behaviour) as (url, server):
            client = await make_client(url)
            await closed_loop(client, concurrency=3, total_requests=30)
            assert (server.requests, server.connections) == (30, 3), "connections are kept"
            assert all(f"host: {url.removeprefix('http://')}\r\n" in head for head in heads)

    asyncio.run(scenario())
    assert bodies == [{"prompt_tokens": 8, "max_new_tokens": 4}] * 30
    assert all("content-type: application/json\r\n" in head for head in heads)


def test_line_counts_when_it_is_complete() -> None:
    clock, measured = FakeClock(), Measurements()
    receiver = _MeasuredStream(ExpectedStream(4), clock, measured)
    text = b"HTTP/1.1 200 OK\r\ncontent-length: 123\r\n\r\n" + stream(4)
    body = text.index(b"{")
    places = [0, 5, body, body + 30, body + 31, len(text)]
    for at_ns, (start, end) in zip((10, 20, 30, 40, 91), itertools.pairwise(places), strict=True):
        clock.set_ns(at_ns)
        assert receiver.receive(text[start:end]) == (at_ns == 91)
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
        (closes_after(b""), client_module.CONNECTION_LOST, "closed", 0),
        (closes_after(b"HTTP/1.1 200"), client_module.CONNECTION_LOST, "closed", 0),
        (closes_after(b"", resets=True), client_module.CONNECTION_LOST, "", 0),
        (closes_after(b"220 mail.example ESMTP\r\n\r\n"), client_module.BAD_HTTP, "220 mail", 0),
        (closes_after(CHUNKED_HEAD + b"what?\r\n"), client_module.BAD_HTTP, "no chunk size", 0),
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


@pytest.mark.parametrize(("behaviour", "tokens"), [(hang, 0), (hang_in_stream, 1), (hang_after_last_line, 4)])
def test_no_progress_is_a_time_out(behaviour: Behaviour, tokens: int) -> None:
    measured = asyncio.run(load(behaviour, requests=2, timeout_s=SHORT_S))
    assert measured.failures[client_module.TIMED_OUT].count == 2
    assert f"{tokens} tokens, then nothing for 0.4 s" in measured.failures[client_module.TIMED_OUT].example


class StubLoop:
    """An event loop whose time stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Any:
        self.timers.append((self.now_s + delay_s, callback, args))
        return SimpleNamespace(cancel=lambda: None)

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def fire(self) -> None:
        """Go to when the only timer is due."""
        ((self.now_s, callback, args),) = self.timers
        self.timers.clear()
        callback(*args)


def test_progress_puts_the_time_out_off() -> None:
    async def scenario() -> None:
        loop = StubLoop()
        wire = _Wire(cast(Any, loop))
        wire.connection_made(cast(Any, SimpleNamespace(write=lambda data: None)))
        receiver = SimpleNamespace(receive=lambda data: False)
        exchange = asyncio.ensure_future(wire.exchange(b"", cast(Any, receiver), timeout_s=10.0))
        await until(lambda: bool(loop.timers))
        for arrival_s in (4.0, 13.0, 22.0):
            loop.now_s = arrival_s
            wire.data_received(b"x")
            loop.fire()
        assert not exchange.done()
        loop.fire()
        assert loop.now_s == 32.0
        with pytest.raises(NoProgress, match="nothing for 10 s"):
            await exchange

    asyncio.run(scenario())


def test_wire_that_is_lost_at_once_and_news_after_a_cancel() -> None:
    async def scenario() -> None:
        wire = _Wire(asyncio.get_running_loop())
        wire.connection_made(cast(Any, SimpleNamespace(write=lambda data: None, abort=lambda: None)))
        receiver = cast(Any, SimpleNamespace(receive=lambda data: True))
        exchange = asyncio.ensure_future(wire.exchange(b"", receiver, timeout_s=DEADLINE_S))
        await until(lambda: wire._receiver is not None)
        exchange.cancel()
        wire.data_received(b"x")
        with pytest.raises(asyncio.CancelledError):
            await exchange
        wire.connection_lost(None)
        with pytest.raises(ConnectionLost):
            await wire.exchange(b"", receiver, timeout_s=DEADLINE_S)

    asyncio.run(scenario())


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
            await until(lambda: clients[0].measurements.tokens == received)  # noqa: B023 - awaited in the iteration
        clock.set_ns(2040)
        await exchange.end_stream()

    async def scenario() -> None:
        async with serving(timed) as (url, _):
            clients.append(await make_client(url, clock=clock, tokens=6))
            with clients[0].connection() as connection:
                assert await clients[0].generate(connection) is None

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
    async def scenario() -> None:
        async with serving(good) as (url, server):
            client = await make_client(url)
            with client.connection() as connection:
                assert await client.generate(connection) is None
                assert connection._wire is not None
                server.tasks[0].cancel()
                await until(lambda: not connection._wire.is_open)  # type: ignore[union-attr]
                assert await client.generate(connection) is None
            assert server.connections == 2

    asyncio.run(scenario())


def test_data_that_nobody_asked_for_closes_the_connection() -> None:
    async def scenario() -> None:
        exchanges = []

        async def keeping(exchange: Exchange) -> None:
            exchanges.append(exchange)
            await good(exchange)

        async with serving(keeping) as (url, server):
            client = await make_client(url)
            with client.connection() as connection:
                assert await client.generate(connection) is None
                await exchanges[0].send(b"HTTP/1.1 200 OK\r\n\r\n")
                await until(lambda: not connection._wire.is_open)  # type: ignore[union-attr]
                assert await client.generate(connection) is None
            assert server.connections == 2

    asyncio.run(scenario())


def test_unreachable_server_ends_the_load_at_once() -> None:
    async def scenario(url: str) -> int:
        client = await make_client(url)
        with pytest.raises(Unreachable, match=f"can't reach {url}: {connection_module.CONNECTION_REFUSED}"):
            await closed_loop(client, concurrency=4, total_requests=2000)
        return client.measurements.requests

    with refusing_port() as port:
        assert asyncio.run(scenario(f"http://127.0.0.1:{port}")) <= 4


def test_server_that_goes_away_later_is_counted_like_any_failure() -> None:
    async def scenario() -> Measurements:
        async with serving(good) as (url, _):
            client = await make_client(url)
            await closed_loop(client, concurrency=1, total_requests=1)
        await closed_loop(client, concurrency=4, total_requests=20)
        return client.measurements

    measured = asyncio.run(scenario())
    assert measured.failures[connection_module.CONNECTION_REFUSED].count == 20


def test_first_address_that_answers_is_used() -> None:
    async def scenario(dead_port: int) -> None:
        async with serving(good) as (url, server):
            live_port = int(url.rpartition(":")[2])
            target = Target(url, [("127.0.0.1", dead_port), ("127.0.0.1", live_port)], timeout_s=DEADLINE_S)
            for _ in range(2):
                (await target.connect()).close()
            await until(lambda: server.connections == 2)
            assert target._addresses == [("127.0.0.1", live_port)]

    with refusing_port() as port:
        asyncio.run(scenario(port))


@pytest.mark.parametrize("url", ["http://a..b", f"http://{'x' * 64}/"])
def test_name_that_cannot_be_looked_up(url: str) -> None:
    with pytest.raises(ConnectError, match=f"^{connection_module.CONNECT_FAILED}: [ax]") as caught:
        asyncio.run(Target.resolve(url, timeout_s=DEADLINE_S))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("behaviour", "name"), [(b"220 no TLS here\r\n", "CONNECT_FAILED"), (b"", "CONNECT_TIMED_OUT")]
)
def test_server_that_speaks_no_tls(behaviour: bytes, name: str) -> None:
    over = asyncio.Event()

    async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(behaviour)
        await over.wait()
        writer.close()

    async def scenario() -> None:
        listener = await asyncio.start_server(plain, "127.0.0.1", 0)
        url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        target = await Target.resolve(url, timeout_s=DEADLINE_S if behaviour else SHORT_S)
        with pytest.raises(ConnectError) as caught:
            await target.connect()
        assert caught.value.name == getattr(connection_module, name)
        assert not target.was_reached
        over.set()
        listener.close()
        await listener.wait_closed()

    asyncio.run(scenario())
