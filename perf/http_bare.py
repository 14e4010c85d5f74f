"""The least that a Python server can do for a stream: a uvloop protocol that writes framed lines, and who wakes it.

    python http_bare.py serve EVENTFD HEAD     prints its port; HEAD is the response head that it sends
    python http_bare.py pace EVENTFD           reads "INTERVAL_NS LINES" on its standard input, 0 0 for a pause

The pacer stands for the scheduler: once an interval it adds to an eventfd the number of lines that every stream is now
owed, and so wakes the server as the engine wakes a worker. The server parses no more of a request than its end and
whether it asks for one token, keeps no slots, no metrics and no time-outs, and minds no full socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import time
from typing import Any

import uvloop

MOST_LINES = 131_072
SPIN_NS = 100_000  # a sleep ends late, by more than the shortest interval
ONE_TOKEN = b'"max_new_tokens":1}'
ANSWER = b'1e\r\n{"token_index":0,"done":true}\n\r\n0\r\n\r\n'

LINES = [b'{"token_index":%d,"done":false}\n' % index for index in range(MOST_LINES)]
CHUNKS = [b"%x\r\n%b\r\n" % (len(line), line) for line in LINES]


def chunk(before: int, after: int) -> bytes:
    """The lines before <= index < after as one chunk of HTTP/1.1."""
    if after == before + 1:
        return CHUNKS[before]
    body = b"".join(LINES[before:after])
    return b"%x\r\n%b\r\n" % (len(body), body)


class Bare(asyncio.Protocol):
    """One connection. A request for one token is answered at once; any other joins `streams`."""

    def __init__(self, streams: set[Bare], head: bytes) -> None:
        self._streams = streams
        self._head = head
        self._received = b""
        self._sent = 0

    def connection_made(self, transport: Any) -> None:  # uvloop's are no asyncio.Transport
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._received.endswith(b"}"):
            return
        if self._received.endswith(ONE_TOKEN):
            self._transport.write(self._head + ANSWER)
        else:
            self._sent = 0
            self._streams.add(self)
        self._received = b""

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.discard(self)

    def advance(self, lines: int) -> None:
        """Write the next `lines`, with the head before the first."""
        before, self._sent = self._sent, self._sent + lines
        framed = chunk(before, self._sent)
        self._transport.write(framed if before else self._head + framed)


async def serve(bell: int, head: bytes) -> None:
    """Serve until killed."""
    streams: set[Bare] = set()

    def collect() -> None:
        lines = os.eventfd_read(bell)
        for stream in streams:
            stream.advance(lines)

    loop = asyncio.get_running_loop()
    loop.add_reader(bell, collect)
    server = await loop.create_server(lambda: Bare(streams, head), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def pace(bell: int) -> None:
    """Ring until the standard input ends."""
    interval_ns = lines = due_ns = 0
    orders = select.poll()
    orders.register(0, select.POLLIN)
    while True:
        if interval_ns == 0 or orders.poll(0):
            order = sys.stdin.readline()
            if not order:
                return
            interval_ns, lines = map(int, order.split())
            due_ns = time.monotonic_ns()
            continue
        due_ns += interval_ns
        if (sleep_ns := due_ns - time.monotonic_ns() - SPIN_NS) > 0:
            time.sleep(sleep_ns / 1e9)
        while time.monotonic_ns() < due_ns:
            pass
        os.eventfd_write(bell, lines)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        if sys.argv[1] == "serve":
            uvloop.run(serve(int(sys.argv[2]), sys.argv[3].encode("latin-1")))
        else:
            pace(int(sys.argv[2]))
