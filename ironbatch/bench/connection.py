"""A connection that carries one request at a time: opened when it must be, kept while it can be."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final, Protocol, Self, cast
from urllib.parse import urlsplit

from ironbatch.errors import IronbatchError

CONNECTION_REFUSED: Final = "connection refused"
CONNECT_FAILED: Final = "connect failed"
CONNECT_TIMED_OUT: Final = "connect timed out"
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class ConnectError(IronbatchError):
    """Not even a connection came about. `name` is the kind, `detail` says more."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


class ConnectionLost(IronbatchError):
    """The connection is closed before the answer's head was complete."""


class NoProgress(IronbatchError):
    """The time-out is over, and nothing more has come."""


class Receiver(Protocol):
    """What takes an answer. Whatever it raises ends the exchange, and the connection with it."""

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection is good for another request after a complete answer."""
        ...

    def receive(self, data: bytes) -> bool:
        """Take the next bytes; returns whether the answer is complete."""
        ...

    def receive_end(self, reason: str) -> None:
        """The connection is closed before the answer was complete; returning says that it is, with that."""
        ...


class Target:
    """Where a URL leads: resolved once, and not for each connection.

    `was_reached` says whether a connection to it has ever come about.
    """

    def __init__(self, url: str, addresses: Sequence[Any], *, timeout_s: float) -> None:
        parts = urlsplit(url)
        self.url = url
        self.path = parts.path
        self.host_header = parts.netloc
        self.timeout_s = timeout_s
        self.was_reached = False
        self._addresses = list(addresses)
        self._tls = (ssl.create_default_context(), parts.hostname) if parts.scheme == "https" else (None, None)

    @classmethod
    async def resolve(cls, url: str, *, timeout_s: float) -> Self:
        """Look up the URL's host. Raises ConnectError."""
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORTS[parts.scheme]
        try:
            async with asyncio.timeout(timeout_s):
                found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise ConnectError(CONNECT_TIMED_OUT, f"no address for {parts.hostname} within {timeout_s:g} s") from None
        except (OSError, UnicodeError) as error:  # a name with an empty or too long label can't be encoded
            detail = getattr(error, "strerror", None) or str(error)
            raise ConnectError(CONNECT_FAILED, f"{parts.hostname}: {detail}") from None
        return cls(url, [address[:2] for *_, address in found], timeout_s=timeout_s)

    async def connect(self) -> "_Wire":
        """Connect to the first address that answers. Raises ConnectError."""
        loop = asyncio.get_running_loop()
        context, server_name = self._tls
        problem: OSError | None = None
        for address in tuple(self._addresses):
            try:
                async with asyncio.timeout(self.timeout_s):
                    _, wire = await loop.create_connection(
                        lambda: _Wire(loop), *address, ssl=context, server_hostname=server_name
                    )
            except TimeoutError:
                problem = TimeoutError(errno.ETIMEDOUT, f"no connection within {self.timeout_s:g} s")
            except OSError as error:
                problem = error
            else:
                self.was_reached = True
                self._addresses = [address]  # such as 127.0.0.1, for a localhost that is ::1 too
                return wire
        assert problem is not None, "getaddrinfo gives one address at least"
        raise _connect_error(problem) from None


def _connect_error(problem: OSError) -> ConnectError:
    if isinstance(problem, ConnectionRefusedError):
        return ConnectError(CONNECTION_REFUSED, "nothing listens there")
    name = CONNECT_TIMED_OUT if isinstance(problem, TimeoutError) else CONNECT_FAILED
    return ConnectError(name, problem.strerror or str(problem) or type(problem).__name__)


class Connection:
    """A connection to the target: opened when it must be, kept while it can be. Leaving it closes it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._wire: _Wire | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._wire is not None:
            self._wire.close()

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send `request`, and hand its answer to `receiver` until that is complete.

        Raises ConnectError, NoProgress, and what the receiver raises. Nothing is sent twice.
        """
        if self._wire is None or not self._wire.is_open:
            self._wire = await self._target.connect()
        wire = self._wire
        is_kept = False
        try:
            await wire.exchange(request, receiver, timeout_s=self._target.timeout_s)
            is_kept = receiver.keeps_alive
        finally:
            if not is_kept:
                wire.close()


class _Wire(asyncio.Protocol):
    """One open connection, as the event loop sees it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_open = False
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._over: asyncio.Future[None] = loop.create_future()
        self._progress_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def exchange(self, request: bytes, receiver: Receiver, *, timeout_s: float) -> None:
        assert self._transport is not None
        assert self._receiver is None, "one request at a time"
        if not self.is_open:
            raise ConnectionLost("the connection was closed as soon as it was open")
        self._receiver = receiver
        self._over = self._loop.create_future()
        self._progress_s = self._loop.time()
        self._timer = self._loop.call_later(timeout_s, self._look, timeout_s)
        self._transport.write(request)
        try:
            await self._over
        finally:
            self._timer.cancel()  # the last one set

    def close(self) -> None:
        self.is_open = False
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.close()  # nobody has asked: what follows could not be told from an answer
            return
        self._progress_s = self._loop.time()
        try:
            is_complete = self._receiver.receive(data)
        except Exception as problem:
            self._finish(problem)
        else:
            if is_complete:
                self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._receiver is None:
            return
        try:
            self._receiver.receive_end(str(exc or "the connection was closed"))
        except Exception as problem:
            self._finish(problem)
        else:
            self._finish()

    def _look(self, timeout_s: float) -> None:
        """One timer a request, set again for what is left, instead of one for each read."""
        left_s = self._progress_s + timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look, timeout_s)
        else:
            self._finish(NoProgress(f"nothing for {timeout_s:g} s"))

    def _finish(self, problem: Exception | None = None) -> None:
        self._receiver = None
        if self._over.done():  # cancelled
            return
        if problem is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(problem)
