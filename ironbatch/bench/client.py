"""One request over HTTP: sent, its stream checked and timed, its failure named."""

import asyncio
from typing import Final, Self

import aiohttp
import msgspec

from ironbatch.bench.measure import Failure, Measurements
from ironbatch.bench.measured_stream import MeasuredStream
from ironbatch.bench.stream import MAX_LABEL_CHARS, TRUNCATED, ErrorObject, ExpectedStreams, StreamFault, shown
from ironbatch.bench.workload import Shape
from ironbatch.clock import Clock

CONNECTION_REFUSED: Final = "connection refused"
CONNECT_FAILED: Final = "connect failed"
CONNECT_TIMED_OUT: Final = "connect timed out"
CONNECTION_LOST: Final = "connection lost"
TIMED_OUT: Final = "timed out"
BAD_HTTP: Final = "bad HTTP answer"

MAX_ERROR_BODY_BYTES: Final = 65_536
STATUS_OK: Final = 200


class _ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


_ERROR_DECODER: Final = msgspec.json.Decoder(_ErrorBody)


class GenerateClient:
    """Sends POST {url}/generate over connections that are kept. Needs a running event loop.

    `timeout_s` is how long a request may go without progress: until it is connected, and from then on until the
    answer's next bytes. Proxies, cookies and redirects play no part, and nothing is sent twice (aiohttp repeats
    idempotent requests only). To be left with `async with`.
    """

    def __init__(self, url: str, clock: Clock, *, timeout_s: float) -> None:
        self.url = url
        self._endpoint = f"{url}/generate"
        self._clock = clock
        self._timeout_s = timeout_s
        self._was_reached = False
        self._expected = ExpectedStreams()
        self._reading: set[aiohttp.ClientResponse] = set()
        self._end_abandoned_bodies()  # none yet, but it sets the timer
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),  # the loops limit what is in flight
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                "accept-encoding": "identity",
                "content-type": "application/json",
                "user-agent": "ironbatch-bench",
            },
            timeout=aiohttp.ClientTimeout(total=None, connect=timeout_s, sock_read=timeout_s),
            auto_decompress=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        await self._session.close()

    async def generate(
        self, shape: Shape, measurements: Measurements, *, intended_ns: int | None = None
    ) -> Failure | None:
        """Do one request, record it in `measurements`, and return why it failed, if it did.

        Its latencies run from `intended_ns` on, which is not in the future; from now on without it.
        """
        stream = MeasuredStream(
            self._expected.of(shape.max_new_tokens), self._clock, measurements, intended_ns=intended_ns
        )
        try:
            failure = await self._exchange(shape, stream)
        except StreamFault as fault:
            failure = Failure(fault.name, fault.detail)
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            failure = self._connect_failure(error) or self._network_failure(error, stream.tokens)
        finally:
            stream.close()
        if failure is None:
            stream.succeed()
        else:
            stream.fail(failure)
        return failure

    async def _exchange(self, shape: Shape, stream: MeasuredStream) -> Failure | None:
        """Send the request and read its answer."""
        body = b'{"prompt_tokens":%d,"max_new_tokens":%d}' % shape
        async with self._session.post(self._endpoint, data=body, allow_redirects=False) as response:
            self._was_reached = True
            self._reading.add(response)
            try:
                if response.status != STATUS_OK:
                    return await _status_failure(response)
                while data := await response.content.readany():
                    stream.receive(data)
            finally:
                self._reading.discard(response)
            stream.end()
        return None

    def _end_abandoned_bodies(self) -> None:
        """Wake those who read a body that aiohttp has given up, every `timeout_s`.

        At a malformed chunk, aiohttp 3.14 closes the connection, which ends `sock_read` too, and tells no reader.
        """
        for response in self._reading:
            connection, content = response.connection, response.content
            if connection is not None and connection.transport is None and content.exception() is None:
                content.set_exception(StreamFault(BAD_HTTP, "a chunk of the body is malformed"))
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end_abandoned_bodies)

    def _connect_failure(self, error: Exception) -> Failure | None:
        """Name `error`, if it says that no connection came about."""
        match error:
            case aiohttp.ConnectionTimeoutError():
                name, detail = CONNECT_TIMED_OUT, f"no connection within {self._timeout_s:g} s"
            case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
                name, detail = CONNECTION_REFUSED, "nothing listens there"
            case aiohttp.ClientConnectorError(os_error=problem):
                name = CONNECT_TIMED_OUT if isinstance(problem, TimeoutError) else CONNECT_FAILED
                detail = f"{error.host}: {problem.strerror or str(problem) or type(problem).__name__}"
            case aiohttp.InvalidURL() | UnicodeError():  # a host that can't be one, such as a..b
                name, detail = CONNECT_FAILED, str(error)
            case _:
                return None
        return Failure(name, shown(detail), unreachable=not self._was_reached)

    def _network_failure(self, error: Exception, tokens: int) -> Failure:
        """Name what went wrong on a connection."""
        self._was_reached = True  # though there was no answer
        match error:
            case TimeoutError():
                return Failure(TIMED_OUT, f"{tokens} tokens, then nothing for {self._timeout_s:g} s")
            case aiohttp.ClientPayloadError():
                return Failure(TRUNCATED, f"{tokens} tokens, then the connection was closed: {shown(str(error))}")
            case aiohttp.ClientResponseError():
                return Failure(BAD_HTTP, shown(error.message))
            case aiohttp.ServerDisconnectedError():  # its text shows what there was of a head, as Python objects
                return Failure(CONNECTION_LOST, "the server closed the connection")
            case _:
                return Failure(CONNECTION_LOST, shown(str(error)) or type(error).__name__)


async def _status_failure(response: aiohttp.ClientResponse) -> Failure:
    """Name an answer by its status, the error type in its body, and whether it asks to come back later."""
    name, detail = f"HTTP {response.status}", response.reason or ""
    body = await _read_error_body(response.content)
    try:
        error = _ERROR_DECODER.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        detail = body.decode("utf-8", "replace") or detail  # some proxy's answer, not Ironbatch's
    else:
        name, detail = f"{name}: {shown(error.type, MAX_LABEL_CHARS)}", error.message or detail
    retry_after = response.headers.get("Retry-After")
    if retry_after is not None:
        name, detail = f"{name}, Retry-After", f"{detail} (Retry-After: {retry_after})"
    return Failure(name, shown(detail))


async def _read_error_body(content: aiohttp.StreamReader) -> bytes:
    """The body, or what came of it: the status names the failure even if the body breaks off."""
    body = b""
    try:
        while len(body) <= MAX_ERROR_BODY_BYTES and (data := await content.readany()):
            body += data
    except (aiohttp.ClientError, OSError, StreamFault):
        pass
    return body
