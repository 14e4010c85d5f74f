"""The client and the closed loop, against a real server that behaves well or badly."""

import asyncio
import json
from typing import Any

import pytest

from ironbatch.bench import client as client_module
from ironbatch.bench import stream as stream_module
from ironbatch.bench.measure import Measurements
from ironbatch.bench.measured_stream import MeasuredStream
from ironbatch.bench.stream import ExpectedStreams
from ironbatch.clock import FakeClock
from tests.bench.server import (
    CHUNKED_HEAD,
    CLOSING_HEAD,
    DEADLINE_S,
    Behaviour,
    Exchange,
    OneShapeClient,
    answers,
    closes_after,
    good,
    line,
    make_client,
    sends,
    serving,
    stream,
    until,
)

ERROR_BODY = json.dumps({"error": {"type": "queue_full", "message": "768 slots are taken", "param": None}})


async def load(behaviour: Behaviour, *, requests: int = 3, concurrency: int = 2, **more: Any) -> Measurements:
    async with serving(behaviour) as (url, _), make_client(url, **more) as client:
        await client.closed_loop(concurrency=concurrency, total_requests=requests)
    return client.measurements


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
            await client.closed_loop(concurrency=3, total_requests=30)
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
    receiver = MeasuredStream(ExpectedStreams().of(4), clock, measured)
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


def test_latencies_are_those_of_the_arrivals() -> None:
    clock = FakeClock()
    clients: list[OneShapeClient] = []

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
            assert await client.once() is None

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
