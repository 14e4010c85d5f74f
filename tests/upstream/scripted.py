"""A model server that behaves as a test says: well, badly, or not at all.

In a test it runs in a thread of its own:

    with ScriptedServer(dialect="openai", slots=8) as server:
        server.script(Script(pieces=3, ending=Ending.RESET), refusal(429, "busy", Retry_After="1"))
        ... ask server.url; request n meets the n-th script, and those after the last one are served well ...
        assert server.most_open <= 8

As a process, for measurements: `python -m tests.upstream.scripted --port 0 --slots 8 --token-us 15000`; it prints a
line with its address, and ends with SIGTERM. Tokens come in steps, those of all streams together, as from a model
server that batches. What they are, `tokens.expected_pieces` tells.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import msgspec
import uvloop
from aiohttp import web

from tests.upstream.script import LLAMA_CPP, OPENAI, Ending, LlamaCppWire, OpenAIWire, Recorded, Script, refusal
from tests.upstream.streaming import before_head, send_stream

__all__ = ["LLAMA_CPP", "OPENAI", "Ending", "Recorded", "Script", "ScriptedServer", "refusal"]

HOST = "127.0.0.1"
START_S = 10.0
SHUTDOWN_S = 0.01  # for aiohttp 0 would be for ever
N_CTX = 4096


class ScriptedServer:
    """`dialect` llama.cpp serves /completion, /props and /health beside the OpenAI-compatible paths.

    `decide`, if given, chooses the script of each request. `gets` replaces the answer of a GET: path -> Script.
    All counts may be read from any thread at any time.
    """

    def __init__(
        self,
        dialect: str = OPENAI,
        slots: int = 8,
        token_us: int = 0,
        *,
        port: int = 0,
        api_key: str = "",
        tls: ssl.SSLContext | None = None,
        decide: Callable[[Recorded], Script] | None = None,
    ) -> None:
        self.dialect, self.slots, self.token_us, self.port, self.api_key = dialect, slots, token_us, port, api_key
        self.decide = decide
        self.gets: dict[str, Script] = {}
        self.requests: list[Recorded] = []
        self.asked: list[str] = []  # the paths of GETs
        self.connections: set[tuple[str, int]] = set()  # the clients' addresses: a kept connection counts once
        self.open_now = self.most_open = 0  # requests that are being served
        self.waiting_now = self.most_waiting = 0  # requests that wait for one of the slots
        self._tls = tls
        self._scripts: deque[Script] = deque()
        self._transports: set[asyncio.Transport] = set()
        self._tick = asyncio.Event()

    @property
    def url(self) -> str:
        """What --backend-url is given."""
        return f"{'https' if self._tls else 'http'}://{HOST}:{self.port}/v1"

    @property
    def left(self) -> list[Recorded]:
        """The requests whose client has left early."""
        return [request for request in self.requests if request.left_at is not None]

    def script(self, *scripts: Script) -> None:
        """The fates of the completions that come next."""
        self._scripts.extend(scripts)

    def __enter__(self) -> Self:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted model server", daemon=True)
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    def start(self) -> None:
        """Serve; after `kill` on the same port as before."""
        self._in_thread(self.serve())

    def kill(self) -> None:
        """Go away as a process that is killed: nobody listens, and every connection is closed. Twice is fine."""
        self._in_thread(self.stop())

    def _in_thread(self, work: Awaitable[None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)  # type: ignore[arg-type]

    async def serve(self) -> None:
        app = web.Application(client_max_size=64 * 2**20)
        for path in (OpenAIWire.path, LlamaCppWire.path):
            if path == OpenAIWire.path or self.dialect == LLAMA_CPP:
                app.router.add_post(path, self._complete)
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self.port, ssl_context=self._tls, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._slots = asyncio.Semaphore(self.slots)
        self._ticker = asyncio.create_task(self._tick_for_ever())

    async def stop(self) -> None:
        self._ticker.cancel()
        for site in list(self._runner.sites):
            await site.stop()
        transports, self._transports = self._transports, set()
        for transport in transports:
            transport.abort()
        await self._runner.cleanup()

    async def _tick_for_ever(self) -> None:
        """Steps: each wakes all streams that wait for their next token."""
        next_at = time.monotonic()
        while self.token_us:
            next_at = max(next_at + self.token_us / 1e6, time.monotonic())
            await asyncio.sleep(next_at - time.monotonic())
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()

    # ------------------------------------------------------------------------------------------- about the server

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.path in self.gets:
            return await self._plain(request, self.gets[request.path])
        if self._is_unauthorized(request):
            return await self._plain(request, refusal(401, f"Invalid API Key {request.headers.get('Authorization')}"))
        pages: dict[str, Any] = {"/v1/models": {"object": "list", "data": [{"id": "scripted", "object": "model"}]}}
        if self.dialect == LLAMA_CPP:
            pages["/props"] = {"total_slots": self.slots, "default_generation_settings": {"n_ctx": N_CTX}}
            pages["/health"] = {"status": "ok"}
        if request.path not in pages:
            return await self._plain(request, refusal(404, "File Not Found"))
        return web.json_response(pages[request.path])

    def _is_unauthorized(self, request: web.Request) -> bool:
        return bool(self.api_key) and request.headers.get("Authorization") != f"Bearer {self.api_key}"

    async def _plain(self, request: web.Request, script: Script) -> web.StreamResponse:
        await before_head(request, script)
        headers = {"Content-Type": script.content_type or "application/json"} | dict(script.headers)
        return web.Response(status=script.status, headers=headers, body=script.plain_body())

    # ------------------------------------------------------------------------------------------------ completions

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        fields = msgspec.json.decode(await request.read())
        recorded = Recorded(request.path, dict(request.headers), fields, time.monotonic())
        script = self._scripts.popleft() if self._scripts else self.decide(recorded) if self.decide else Script()
        self.requests.append(recorded)
        self.connections.add(transport.get_extra_info("peername"))
        self._transports.add(transport)
        try:
            if self._is_unauthorized(request):
                return await self._plain(request, refusal(401, "Invalid API Key"))
            if script.is_plain:
                return await self._plain(request, script)
            async with self._slot():
                return await send_stream(request, recorded, script, self._pace)
        except (asyncio.CancelledError, ConnectionError):
            if transport in self._transports and not script.breaks_off:  # else it was us
                recorded.left_at = time.monotonic()
            raise
        finally:
            recorded.ended_at = time.monotonic()
            self._transports.discard(transport)

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """One of the slots: who finds none waits, and nobody tells the client."""
        if self._slots.locked():
            self.waiting_now += 1
            self.most_waiting = max(self.most_waiting, self.waiting_now)
            try:
                await self._slots.acquire()
            finally:
                self.waiting_now -= 1
        else:
            await self._slots.acquire()
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            yield
        finally:
            self.open_now -= 1
            self._slots.release()

    async def _pace(self) -> None:
        if self.token_us:
            await self._tick.wait()


async def _serve_until_signal(server: ScriptedServer) -> None:
    """As a process."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await server.serve()
    print(f"scripted model server at {server.url}", flush=True)
    await ended.wait()
    await server.stop()


def main() -> None:
    """The command line; see this module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream.scripted", description=main.__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--dialect", choices=(OPENAI, LLAMA_CPP), default=OPENAI)
    parser.add_argument("--token-us", type=int, default=0, help="between two steps; a step gives each stream a token")
    parser.add_argument("--api-key", default="")
    options = parser.parse_args()
    server = ScriptedServer(
        options.dialect, options.slots, options.token_us, port=options.port, api_key=options.api_key
    )
    uvloop.run(_serve_until_signal(server))


if __name__ == "__main__":
    main()
