"""The client of perf/http_stream.py: raw sockets, one epoll, and the CPU clock of the process that serves them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from http_bare import ANSWER, LINES, MOST_LINES

READ_BYTES = 1 << 18
TIMEOUT_S = 20.0
CONNECT_AT_ONCE = 50
ENDLESS = MOST_LINES - 64  # tokens; no stream lives to see its end
ALL_LINES = b"".join(LINES)


@dataclass(frozen=True)
class Window:
    """What happened while it was open."""

    cpu_s: float  # of the serving process
    wall_s: float
    items: int  # lines, or requests
    sends: int

    @property
    def cpu_s_per_item(self) -> float:
        return self.cpu_s / self.items

    @property
    def items_per_send(self) -> float:
        return self.items / self.sends


@dataclass(frozen=True)
class Timing:
    """How long one measurement takes."""

    warm_s: float  # before the window opens
    window_s: float


class CpuClock:
    """The CPU time of another process, all its threads, in ns: clock_getcpuclockid(3)."""

    def __init__(self, pid: int) -> None:
        clock = ctypes.c_int()
        if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
            raise ProcessLookupError(f"process {pid} has no CPU clock")
        self._clock = clock.value

    def now_ns(self) -> int:
        return time.clock_gettime_ns(self._clock)


def post(max_new_tokens: int) -> bytes:
    """A request."""
    body = json.dumps({"prompt_tokens": 1, "max_new_tokens": max_new_tokens}, separators=(",", ":")).encode()
    return b"POST /generate HTTP/1.1\r\nHost: perf\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@contextlib.contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """So many of them, closed at the end. They come in groups: one that finds a listener's backlog full loses 1 s."""
    with contextlib.ExitStack() as stack:
        opened = []
        for index in range(1, count + 1):
            opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S)))
            if index % CONNECT_AT_ONCE == 0:
                time.sleep(0.01)
        yield opened


def response_head(port: int) -> bytes:
    """The head of a stream's response, up to its empty line."""
    with connections(port, 1) as (connection,):
        connection.sendall(post(1))
        received = b""
        while not received.endswith(ANSWER):
            received += connection.recv(READ_BYTES)
        return received.removesuffix(ANSWER)


def undated(head: bytes) -> list[bytes]:
    """A response's head without what may differ between two servers, or two of their answers."""
    differ = (b"date:", b"server:", b"x-request-id:")
    return [line for line in head.lower().split(b"\r\n") if not line.startswith(differ)]


def check_stream(received: bytearray, head: bytes) -> None:
    """Whether a stream that was cut off anywhere began with `head` and then had line after line, without a gap."""
    found, _, framed = received.partition(b"\r\n\r\n")
    assert undated(bytes(found)) == undated(head.removesuffix(b"\r\n\r\n")), found
    lines = bytearray()
    at = 0
    while (end := framed.find(b"\r\n", at)) > 0:
        size = int(framed[at:end], 16)
        lines += framed[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    assert not lines.endswith(b"true}\n"), "the stream has ended; it was meant to go on"
    assert ALL_LINES.startswith(lines), "a line is missing, twice there, or wrong"


class Client(ABC):
    """Connections to one server, each with a request under way, read as fast as they fill. Measures once."""

    request: bytes

    def __init__(self, port: int, count: int, clock: CpuClock, head: bytes) -> None:
        self._port = port
        self._count = count
        self._clock = clock
        self._head = head
        self._received: dict[socket.socket, bytearray] = {}
        self._items = 0
        self._carriage_returns = 0

    def measure(self, timing: Timing) -> Window:
        """Send the requests, wait until there are answers and the server is warm; then keep the window open."""
        with connections(self._port, self._count) as sockets, select.epoll(self._count) as poller:
            self._received = {connection: bytearray() for connection in sockets}
            for connection in sockets:
                poller.register(connection, select.EPOLLIN)
                connection.sendall(self.request)
            by_descriptor = {connection.fileno(): connection for connection in sockets}
            deadline = time.monotonic() + TIMEOUT_S
            while not self._has_begun():
                assert time.monotonic() < deadline, "the answers have not begun"
                self._read(poller, by_descriptor, 0.05)
            self._read(poller, by_descriptor, timing.warm_s)
            self._items = self._carriage_returns = 0
            began, cpu_ns = time.monotonic(), self._clock.now_ns()
            self._read(poller, by_descriptor, timing.window_s)
            cpu_ns = self._clock.now_ns() - cpu_ns
            wall_s = time.monotonic() - began
        self._check()
        return Window(cpu_ns / 1e9, wall_s, self._items, self._sends())

    def _read(self, poller: select.epoll, by_descriptor: dict[int, socket.socket], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (remaining_s := deadline - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(remaining_s):
                connection = by_descriptor[descriptor]
                data = connection.recv(READ_BYTES)
                assert data, "the server has hung up"
                self._received[connection] += data
                self._take(connection, data)

    @abstractmethod
    def _has_begun(self) -> bool:
        """Whether there are answers on all connections, or as many as those."""

    @abstractmethod
    def _take(self, connection: socket.socket, data: bytes) -> None:
        """Count what has come."""

    @abstractmethod
    def _sends(self) -> int:
        """Writes of the server to which what was counted belongs."""

    @abstractmethod
    def _check(self) -> None:
        """Raise an AssertionError if a byte was wrong."""


class Streams(Client):
    """Endless streams."""

    request = post(ENDLESS)

    def _has_begun(self) -> bool:
        return all(self._received.values())

    def _take(self, connection: socket.socket, data: bytes) -> None:
        self._items += data.count(b"}")  # one ends each line
        self._carriage_returns += data.count(b"\r")  # a chunk has two

    def _sends(self) -> int:
        return max(self._carriage_returns // 2, 1)

    def _check(self) -> None:
        for received in self._received.values():
            check_stream(received, self._head)


class Requests(Client):
    """Requests for one token, one after the other on each connection."""

    request = post(1)

    def _has_begun(self) -> bool:
        return self._items >= self._count

    def _take(self, connection: socket.socket, data: bytes) -> None:
        received = self._received[connection]
        if received.endswith(ANSWER):
            assert undated(bytes(received)) == undated(self._head + ANSWER), received
            received.clear()
            connection.sendall(self.request)
            self._items += 1

    def _sends(self) -> int:
        return self._items

    def _check(self) -> None:
        pass  # each was checked when it was complete
