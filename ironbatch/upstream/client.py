"""The client of one model server: its connections, and a typed problem for every fault."""

import asyncio
import contextlib
import io
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from ironbatch.limits import KIB, MIB
from ironbatch.upstream.answers import Answer, problem_of, shown
from ironbatch.upstream.dialects import root_of
from ironbatch.upstream.faults import CONNECTION_LOST, NETWORK_FAULTS, problem_before_head
from ironbatch.upstream.find import NO_SUCH_PATH, find
from ironbatch.upstream.problems import UpstreamAway, UpstreamProblem
from ironbatch.upstream.stream import CompletionStream
from ironbatch.upstream.types import CompletionRequest, Finish, Found, Piece

CONNECT_S: Final = 5.0
ASK_S: Final = 5.0
"""For a whole answer about the model server itself, and for the body of an error."""

KEPT_ALIVE_S: Final = 2.0
"""A connection idle for longer is closed by us: servers close theirs after 5 s and more, and must not be first."""

MAX_ANSWER_BYTES: Final = 4 * MIB  # a list of models
MAX_ERROR_BYTES: Final = 64 * KIB
READ_BUFFER_BYTES: Final = 64 * KIB  # of each stream; at twice as many, its socket is not read
ASKING_CONNECTIONS: Final = 1  # beside the streams, so that a probe never waits for one of them to end

_EVENT_STREAM: Final = "text/event-stream"
_HEADERS: Final = {"Accept-Encoding": "identity", "Content-Type": "application/json", "User-Agent": "ironbatch"}


@dataclass(slots=True)
class _Attempt:
    """What aiohttp's tracing notes about one request."""

    is_reused: bool = False  # its connection has served another request before


async def _note_reuse(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
    if isinstance(context.trace_request_ctx, _Attempt):
        context.trace_request_ctx.is_reused = True


class UpstreamClient:
    """Asks one model server, over kept connections, from the event loop that has called `open`.

    `silence_s` bounds how long a stream may give no piece; `connections` is how many streams there are at once.
    """

    def __init__(self, base_url: str, api_key: str, *, silence_s: float, connections: int) -> None:
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._headers = _HEADERS | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._silence_s = silence_s
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._streaming: set[aiohttp.ClientResponse] = set()

    async def open(self) -> None:
        """Make the pool of connections; none is opened yet. No proxy of the environment, no cookie, no redirect."""
        assert self._session is None, "a client is opened once"
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._connections + ASKING_CONNECTIONS,
                keepalive_timeout=KEPT_ALIVE_S,
                # Made here and not by aiohttp at import, so that SSL_CERT_FILE holds that is set when serving starts.
                ssl=ssl.create_default_context() if self.base_url.startswith("https:") else True,
            ),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=READ_BUFFER_BYTES,
            trust_env=False,
            trace_configs=[tracing],
        )

    async def close(self) -> None:
        """Close all connections; a stream that is open ends with a problem. A second call does nothing."""
        for response in self._streaming:
            _drop(response)  # aiohttp would not wake who reads it
        if self._session is not None:
            await self._session.close()

    async def probe(self) -> None:
        """See `_probe`."""
        with self._key_kept_secret():
            await self._probe()

    async def _probe(self) -> None:
        """Ask whether it serves, within 2 * ASK_S; raises a problem if it does not.

        llama.cpp lists its model while it loads it, and tells by /health that it does. Elsewhere /health may mean
        anything, so nothing else that it says counts.
        """
        models = await self.get(f"{self.base_url}/models")
        if models.status != 200 and models.status not in NO_SUCH_PATH:
            raise problem_of(models)
        health = await self.get(f"{root_of(self.base_url)}/health")
        problem = None if health.status == 200 else problem_of(health)
        if isinstance(problem, UpstreamAway):
            raise problem

    async def find(self, wanted_model: str) -> Found:
        """What the model server tells about itself; as `find.find`."""
        with self._key_kept_secret():
            return await find(self, wanted_model)

    async def get(self, url: str) -> Answer:
        """The answer to a GET, whatever its status, within ASK_S. Raises a problem if there is none."""
        try:
            async with asyncio.timeout(ASK_S):
                response = await self._opened().get(url, allow_redirects=False)
                try:
                    body = bytearray()
                    await _read_into(body, response.content, MAX_ANSWER_BYTES)
                    return self._answer(response, body)
                finally:
                    _drop(response)
        except aiohttp.ServerTimeoutError as error:
            raise problem_before_head(error, url) from None
        except TimeoutError:
            raise UpstreamAway(f"the model server at {shown(url)} did not answer within {ASK_S:g} s") from None
        except NETWORK_FAULTS as error:
            raise problem_before_head(error, url) from None

    async def complete(self, found: Found, request: CompletionRequest, deliver: Callable[[Piece], None]) -> Finish:
        """Stream one completion: `deliver(piece)` for each piece, as it comes. Raises a problem.

        If `deliver` raises Enough, the stream has finished for its length; any other exception of its goes through.
        Whichever way this ends before the stream does, by cancellation too, the connection is closed at once.
        """
        with self._key_kept_secret():
            return await self._complete(found, request, deliver)

    @contextlib.contextmanager
    def _key_kept_secret(self) -> Iterator[None]:
        """Some servers repeat a key that they refuse, and messages go to logs and to clients."""
        try:
            yield
        except UpstreamProblem as problem:
            if self._api_key:
                problem.message = problem.message.replace(self._api_key, "***")
                problem.args = (problem.message,)
            raise

    async def _complete(self, found: Found, request: CompletionRequest, deliver: Callable[[Piece], None]) -> Finish:
        stream = CompletionStream(found.dialect.reader(), deliver, self._silence_s)
        url = found.dialect.path_of(self.base_url)
        response = await self._head(url, found.dialect.body(request, found.model), stream)
        self._streaming.add(response)
        try:
            if response.status != 200 or response.content_type != _EVENT_STREAM:
                raise problem_of(await self._error(response))
            return await stream.read(response.content)
        finally:
            self._streaming.discard(response)
            _drop(response)

    async def _head(self, url: str, body: bytes, stream: CompletionStream) -> aiohttp.ClientResponse:
        """Post, and wait for the head of the answer until the stream would be silent for too long.

        A kept connection may be closed by the server just as it is used: then the request goes out again. Each time
        uses up such a connection, so a new one ends it. The body goes as a file, which aiohttp sends in parts: of bytes
        it would copy all into the transport's buffer.
        """
        try:
            async with asyncio.timeout_at(stream.silent_at):
                while True:
                    attempt = _Attempt()
                    try:
                        return await self._opened().post(
                            url, data=io.BytesIO(body), allow_redirects=False, trace_request_ctx=attempt
                        )
                    except CONNECTION_LOST as error:
                        if not attempt.is_reused or self._opened().closed:
                            raise problem_before_head(error, url) from None
        except aiohttp.ServerTimeoutError as error:
            raise problem_before_head(error, url) from None
        except TimeoutError:
            raise stream.silence() from None
        except NETWORK_FAULTS as error:
            raise problem_before_head(error, url) from None

    async def _error(self, response: aiohttp.ClientResponse) -> Answer:
        """An error's answer, with as much of its body as comes in time: status and head say enough without it."""
        body = bytearray()
        with contextlib.suppress(*NETWORK_FAULTS):  # TimeoutError is among them
            async with asyncio.timeout(ASK_S):
                await _read_into(body, response.content, MAX_ERROR_BYTES)
        return self._answer(response, body)

    def _answer(self, response: aiohttp.ClientResponse, body: bytearray) -> Answer:
        return Answer(
            str(response.url),
            response.status,
            response.content_type if "Content-Type" in response.headers else "",
            bytes(body),
            response.headers.get("Retry-After", ""),
            response.headers.get("Location", ""),
        )

    def _opened(self) -> aiohttp.ClientSession:
        assert self._session is not None, "a client is opened before it asks"
        return self._session


async def _read_into(body: bytearray, content: aiohttp.StreamReader, max_bytes: int) -> None:
    while len(body) < max_bytes and (chunk := await content.readany()):
        body += chunk[: max_bytes - len(body)]


def _drop(response: aiohttp.ClientResponse) -> None:
    """Give up an answer. Its connection is closed at once, unless it was read to its end and is kept already."""
    connection = response.connection
    transport = None if connection is None else connection.transport
    if transport is not None and transport.get_write_buffer_size():
        transport.abort()  # close() would first send the rest of the prompt, which a server that hangs does not take
    response.close()
