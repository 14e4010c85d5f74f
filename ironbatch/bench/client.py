"""One request over HTTP: sent, its stream checked and timed, its failure named."""

import errno
from typing import Final, Self

import aiohttp
import msgspec

from ironbatch.bench.measure import Failure, Measurements
from ironbatch.bench.stream import (
    MAX_LABEL_CHARS,
    TRUNCATED,
    ErrorObject,
    ExpectedStream,
    StreamChecker,
    StreamFault,
    shown,
)
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
    """Sends POST {url}/generate of one shape over keep-alive connections, `max_connections` at most.

    `timeout_s` is how long a request may go without progress. Proxies, cookies and redirects play no part.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        prompt_tokens: int,
        max_new_tokens: int,
        timeout_s: float,
        max_connections: int,
    ) -> None:
        self._url = f"{url}/generate"
        self._clock = clock
        self._timeout_s = timeout_s
        self._expected = ExpectedStream(max_new_tokens)
        self._body = b'{"prompt_tokens":%d,"max_new_tokens":%d}' % (prompt_tokens, max_new_tokens)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"content-type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def generate(self, measurements: Measurements) -> Failure | None:
        """Do one request, add it to `measurements`, and return why it failed, if it did."""
        checker = StreamChecker(self._expected)
        try:
            failure = await self._send(checker, measurements)
        except StreamFault as fault:
            failure = Failure(fault.name, fault.detail)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = self._network_failure(error, checker.tokens)
        if failure is None:
            measurements.succeeded += 1
            measurements.ended_early += checker.ended_early
        else:
            measurements.tokens_of_failed += checker.tokens
            measurements.record_failure(failure)
        return failure

    async def _send(self, checker: StreamChecker, measurements: Measurements) -> Failure | None:
        sent_ns = self._clock.now_ns()
        async with self._session.post(self._url, data=self._body, allow_redirects=False) as response:
            measurements.server_answered = True
            if response.status != STATUS_OK:
                return await _status_failure(response)
            await self._read_stream(response.content, checker, measurements, sent_ns)
        measurements.end_to_end.record(self._clock.now_ns() - sent_ns)
        return None

    async def _read_stream(
        self, content: aiohttp.StreamReader, checker: StreamChecker, measurements: Measurements, sent_ns: int
    ) -> None:
        """Read to the end of the stream.

        k lines that come together, g nanoseconds after those before, count as k gaps of g / k. Those that
        come together with the first line were not waited for: gaps of 0.
        """
        last_ns = sent_ns
        while chunk := await content.readany():
            arrived_ns = self._clock.now_ns()
            tokens_before = checker.tokens
            try:
                lines = checker.feed(chunk)
            finally:  # those before a fault have arrived, too
                measurements.tokens += checker.tokens - tokens_before
            if lines == 0:
                continue
            if checker.lines == lines:
                measurements.ttft.record(arrived_ns - sent_ns)
                measurements.inter_token.record(0, lines - 1)
            else:
                measurements.inter_token.record((arrived_ns - last_ns) // lines, lines)
            last_ns = arrived_ns
        checker.finish()

    def _network_failure(self, error: Exception, tokens: int) -> Failure:
        detail = f"{tokens} tokens, then {shown(str(error)) or type(error).__name__}"
        match error:
            case aiohttp.ConnectionTimeoutError():
                detail = f"no connection within {self._timeout_s:g} s"
                return Failure(CONNECT_TIMED_OUT, detail, unreachable=True)
            case aiohttp.ClientConnectorError():
                refused = error.os_error.errno == errno.ECONNREFUSED
                name = CONNECTION_REFUSED if refused else CONNECT_FAILED
                return Failure(name, shown(str(error)), unreachable=True)
            case TimeoutError():
                return Failure(TIMED_OUT, f"{tokens} tokens, then nothing for {self._timeout_s:g} s")
            case aiohttp.ClientPayloadError():
                name = TRUNCATED
            case aiohttp.ClientConnectionError() | OSError():
                name = CONNECTION_LOST
            case _:
                name = BAD_HTTP
        return Failure(name, detail)


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
        while len(body) < MAX_ERROR_BODY_BYTES and (chunk := await content.readany()):
            body += chunk
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass
    return body
