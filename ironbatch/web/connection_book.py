"""All connections of a web worker: how many there may be, and how long each may take.

One timer looks at all of them once a second, which is cheaper than a timer for each wait and exact enough.
"""

from __future__ import annotations

import asyncio
import collections
import resource
import select
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ironbatch.clock import Clock, MonotonicClock
from ironbatch.config import Config
from ironbatch.errors import RETRY_AFTER_S
from ironbatch.listener import LISTEN_BACKLOG
from ironbatch.web.connection import Connection
from ironbatch.web.feeder import Feeder
from ironbatch.web.json_body import error_body
from ironbatch.web.plain_error import TOO_MANY_CONNECTIONS

NS_PER_S = 1_000_000_000
SWEEP_S = 1.0
ENDING_SWEEP_S = 0.05
LINGER_NS = 2 * NS_PER_S
SURPLUS_CONNECTIONS = 32
SPARE_DESCRIPTORS = 16
STATUS_PATHS = frozenset({"/health", "/metrics"})


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """How long a client may take, in nanoseconds."""

    header_ns: int
    body_ns: int
    write_ns: int
    linger_ns: int = LINGER_NS

    @classmethod
    def of(cls, config: Config) -> HttpTimes:
        """The configured ones."""
        return cls(
            config.header_timeout_s * NS_PER_S, config.body_timeout_s * NS_PER_S, config.write_timeout_s * NS_PER_S
        )


class ConnectionBook:
    """See the module. `start` it on the loop before the first connection.

    `must_close` says whether an answer that begins now is to be the last on its connection.

    Args:
        times: what the connections are allowed.
        most: connections at a time.
        clock: where "now" comes from.
        log: gunicorn's.
    """

    def __init__(self, times: HttpTimes, most: int, clock: Clock, log: Any) -> None:
        self.times = times
        self.clock = clock
        self.loop: asyncio.AbstractEventLoop
        self.feeder: Feeder
        self.must_close: Callable[[], bool] = lambda: False
        self._most = most
        self._surplus = SURPLUS_CONNECTIONS
        self._log = log
        self._connections: set[Connection] = set()
        self._events: collections.Counter[str] = collections.Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._is_ending = False
        self._resets: ResetWatch | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look at the connections; find out how many the process may have."""
        self.loop = loop
        self.feeder = Feeder(loop, MonotonicClock())  # a cost is real, whatever the time
        self._resets = ResetWatch(loop)
        self._most, self._surplus = allowed_connections(self._most, self._log)
        self._timer = loop.call_later(SWEEP_S, self._tick)

    def stop(self) -> None:
        """Let go of the loop."""
        if self._timer is not None:
            self._timer.cancel()
        if self._resets is not None:
            self._resets.close()
            self._resets = None

    def admit(self, connection: Connection) -> None:
        """Take in a new connection. One too many is told so; it may still ask for the server's health."""
        count = len(self._connections)
        self._connections.add(connection)
        if count < self._most:
            return
        self._events["connection limit"] += 1
        if count < self._most + self._surplus:
            connection.make_surplus(self._answer_surplus(connection.app))
        else:
            connection.refuse(self._too_many)

    def discard(self, connection: Connection) -> None:
        """It is lost; its descriptor is still open."""
        self._connections.discard(connection)
        if self._resets is not None:
            self._resets.discard(connection)

    def watch_for_reset(self, connection: Connection) -> None:
        """The client has shut its sending side: cut the connection as soon as it turns out to be closed."""
        if self._resets is not None:
            self._resets.add(connection)

    @property
    def is_sending(self) -> bool:
        """Whether a client has still to take something that was written to it."""
        return any(connection.is_sending for connection in self._connections)

    def end(self) -> None:
        """The worker ends: from now on connections without a request are closed, new ones after a moment."""
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self.loop.call_later(ENDING_SWEEP_S, self._tick)

    def sweep(self) -> None:
        """Look at every connection once."""
        now_ns = self.clock.now_ns()
        for connection in list(self._connections):
            if self._is_ending:
                connection.end_lingering()
                if connection.is_waiting and not connection.is_fresh(now_ns):
                    connection.close_waiting()
                    continue
            reason = connection.check(now_ns)
            if reason is not None:
                self._events[reason] += 1
        if self._events:
            told = ", ".join(f"{count} by {reason}" for reason, count in sorted(self._events.items()))
            self._log.info("connections closed or refused in the last second: %s", told)
            self._events.clear()

    def _tick(self) -> None:
        self._timer = self.loop.call_later(ENDING_SWEEP_S if self._is_ending else SWEEP_S, self._tick)
        self.sweep()

    @property
    def _too_many(self) -> str:
        return f"this web worker has {self._most} connections, its limit (--max-connections); try again later"

    def _answer_surplus(self, app: Any) -> Any:
        """An application for a connection too many: the server's state, or 503."""

        async def answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if scope["path"] in STATUS_PATHS:
                await app(scope, receive, send)
                return
            body = msgspec.json.encode(error_body(TOO_MANY_CONNECTIONS, self._too_many))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"retry-after", b"%d" % RETRY_AFTER_S),
            ]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": body if scope["method"] != "HEAD" else b""})

        return answer


class ResetWatch:
    """Cuts connections whose client has shut its sending side, when a reset comes.

    The transport no longer reads from such a socket, so it does not notice. Asked for no events, epoll still tells of
    a reset.

    Args:
        loop: which waits for the events.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        loop.add_reader(self._epoll.fileno(), self._cut)

    def add(self, connection: Connection) -> None:
        """Watch it until it is lost."""
        descriptor = connection.fileno
        self._connections[descriptor] = connection
        self._epoll.register(descriptor, 0)

    def discard(self, connection: Connection) -> None:
        """Its descriptor is about to be closed."""
        if self._connections and self._connections.get(connection.fileno) is connection:
            self._forget(connection.fileno)

    def close(self) -> None:
        """Watch nothing any more."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _cut(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            connection = self._connections[descriptor]
            self._forget(descriptor)
            connection.abort()

    def _forget(self, descriptor: int) -> None:
        del self._connections[descriptor]
        self._epoll.unregister(descriptor)


def allowed_connections(wanted: int, log: Any, count_open: Callable[[], int] | None = None) -> tuple[int, int]:
    """How many connections the process's descriptors allow: those served, and those that are told "too many".

    The limit of descriptors is raised as far as need be and as far as may be. A socket that is accepted without a
    descriptor to spare would end all accepting, so some are kept back.
    """
    already = (count_open or _count_open)()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = already + SPARE_DESCRIPTORS + SURPLUS_CONNECTIONS + wanted + LISTEN_BACKLOG
    limit = max(soft, min(needed, hard))
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = max(limit - already - SPARE_DESCRIPTORS, 2)
    surplus = min(SURPLUS_CONNECTIONS, max(room // 8, 1))
    if room - surplus >= wanted:
        return wanted, surplus
    log.warning(
        "%d descriptors (ulimit -n) allow %d connections, fewer than --max-connections %d: raise the one or lower the"
        " other",
        *(limit, room - surplus, wanted),
    )
    return room - surplus, surplus


def _count_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
