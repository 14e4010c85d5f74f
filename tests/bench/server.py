"""A server for one test, which behaves as the test says: well, badly, or not at all."""

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ironbatch.bench.client import GenerateClient
from ironbatch.bench.load import closed_loop
from ironbatch.bench.measure import Failure, Measurements
from ironbatch.bench.window import Window
from ironbatch.bench.workload import Shape
from ironbatch.clock import Clock, MonotonicClock

DEADLINE_S = 30.0
CLOSING_HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Exchange:
    """One request that has come, and the writing of its answer."""

    def __init__(self, head: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = head
        self.fields: dict[str, Any] = json.loads(body)
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """These bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def open_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n")

    async def write(self, text: bytes) -> None:
        """One chunk of the body."""
        await self.send(b"%x\r\n%b\r\n" % (len(text), text))

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def close(self) -> None:
        """The connection, in order and after what has been sent."""
        self._writer.close()
        await self._writer.wait_closed()

    def send_end(self) -> None:
        """What the client reads as the end of the connection."""
        self._writer.write_eof()

    async def until_closed(self) -> None:
        """Returns when the client has closed the connection."""
        async with asyncio.timeout(DEADLINE_S):
            assert await self._reader.read() == b""

    def reset(self) -> None:
        """The connection, at once: the client sees a reset if it has sent anything that is not read."""
        self._writer.transport.abort()


Behaviour = Callable[[Exchange], Awaitable[None]]


class Server:
    """Counts what comes."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.connections = 0
        self.requests = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._behaviour = behaviour

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.append(asyncio.ensure_future(self._converse(reader, writer)))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                assert head.startswith("POST /generate HTTP/1.1\r\n"), head
                length = re.search(r"content-length: ([0-9]+)\r\n", head.lower())
                assert length is not None, head
                body = await reader.readexactly(int(length[1]))
                self.requests += 1
                await self._behaviour(Exchange(head, body, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[tuple[str, Server]]:
    """Serve on a free port. Yields the URL and the server."""
    server = Server(behaviour)
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", server
    finally:
        listener.close()
        for task in server.tasks:
            task.cancel()
        for outcome in await asyncio.gather(*server.tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome


async def until(condition: Callable[[], bool]) -> None:
    """Let everyone else run until the condition holds, with a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


class OneShapeClient(GenerateClient):
    """A client whose requests are all alike, and recorded in one place."""

    def __init__(self, url: str, clock: Clock, shape: Shape, *, timeout_s: float) -> None:
        super().__init__(url, clock, timeout_s=timeout_s)
        self.measurements = Measurements()
        self.shape = shape
        self.clock = clock

    async def once(self) -> Failure | None:
        """One request."""
        return await self.generate(self.shape, self.measurements)

    async def closed_loop(self, *, concurrency: int, total_requests: int) -> None:
        """So many requests, so many at a time."""
        await self.closed_loop_in(Window(self.measurements, total_requests=total_requests), concurrency=concurrency)

    async def closed_loop_in(self, window: Window, *, concurrency: int) -> None:
        """As many requests as the window admits."""
        await closed_loop(self, itertools.repeat(self.shape), window, self.clock, concurrency=concurrency)


def make_client(
    url: str, *, clock: Clock | None = None, tokens: int = 4, timeout_s: float = DEADLINE_S
) -> OneShapeClient:
    """Needs a running event loop."""
    return OneShapeClient(url, clock or MonotonicClock(), Shape(8, tokens), timeout_s=timeout_s)


def line(index: int, *, done: bool = False, **more: object) -> bytes:
    """One line as the server writes it."""
    return json.dumps({"token_index": index, "done": done, **more}, separators=(",", ":")).encode() + b"\n"


def stream(tokens: int) -> bytes:
    """A good stream of that many tokens."""
    return b"".join(line(index, done=index == max(tokens, 1) - 1) for index in range(max(tokens, 1)))


async def good(exchange: Exchange) -> None:
    """One chunk a token."""
    await exchange.open_stream()
    for text in stream(exchange.fields["max_new_tokens"]).splitlines(keepends=True):
        await exchange.write(text)
    await exchange.end_stream()


async def hang(_: Exchange) -> None:
    await asyncio.Event().wait()


async def hang_in_stream(exchange: Exchange) -> None:
    await exchange.open_stream()
    await exchange.write(line(0))
    await hang(exchange)


def sends(*parts: bytes) -> Behaviour:
    """A stream of these chunks."""

    async def behaviour(exchange: Exchange) -> None:
        await exchange.open_stream()
        for part in parts:
            await exchange.write(part)
        await exchange.end_stream()

    return behaviour


def answers(status: str, body: str, *headers: str) -> Behaviour:
    """A whole answer, such as `answers("503 Service Unavailable", "...", "Retry-After: 1")`."""
    head = [f"HTTP/1.1 {status}", f"content-length: {len(body.encode())}", *headers]
    answer = ("\r\n".join(head) + "\r\n\r\n" + body).encode()

    async def behaviour(exchange: Exchange) -> None:
        await exchange.send(answer)

    return behaviour


def closes_after(answer: bytes, *, resets: bool = False) -> Behaviour:
    """These bytes, and the end of the connection."""

    async def behaviour(exchange: Exchange) -> None:
        await exchange.send(answer)
        if resets:
            exchange.reset()
        else:
            await exchange.close()

    return behaviour
