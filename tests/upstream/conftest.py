"""Scripted servers of both dialects, and a client that asks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from ironbatch.upstream.client import UpstreamClient
from ironbatch.upstream.types import CompletionRequest, Finish, Found, Piece, Prompt
from tests.upstream.scripted import LLAMA_CPP, OPENAI, ScriptedServer

DEADLINE_S = 20.0
PROMPT = "once upon a time "


def run(work: Any) -> Any:
    """Run in the loop that the backend uses, too."""
    return uvloop.run(asyncio.wait_for(work, DEADLINE_S))


def request(prompt: str | list[int] = PROMPT, max_tokens: int = 5) -> CompletionRequest:
    parts = Prompt(prompt, None) if isinstance(prompt, str) else Prompt(None, prompt)
    return CompletionRequest(parts, max_tokens, 0.0, 1.0, 0, 7, ignore_eos=True)


@asynccontextmanager
async def client_of(
    url: str, api_key: str = "", silence_s: float = 10.0, connections: int = 8
) -> AsyncIterator[UpstreamClient]:
    client = UpstreamClient(url, api_key, silence_s=silence_s, connections=connections)
    await client.open()
    try:
        yield client
    finally:
        await client.close()


class Asked:
    """One completion, asked for and waited for: its pieces, and its finish or the problem raised."""

    def __init__(self, pieces: list[Piece], finish: Finish) -> None:
        self.pieces = pieces
        self.finish = finish
        self.text = "".join(piece.text for piece in pieces)


def ask(
    server: ScriptedServer,
    what: CompletionRequest | None = None,
    pieces: list[Piece] | None = None,
    **options: Any,
) -> Asked:
    """Ask once with a client of its own; what is delivered goes into `pieces`, also if a problem is raised."""
    delivered = [] if pieces is None else pieces

    async def once() -> Asked:
        async with client_of(server.url, **options) as client:
            found = await client.find("")
            return Asked(delivered, await client.complete(found, what or request(), delivered.append))

    asked: Asked = run(once())
    return asked


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for the condition in an event loop."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)
    assert condition(), what


@pytest.fixture(params=[OPENAI, LLAMA_CPP])
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    with ScriptedServer(request.param) as scripted:
        yield scripted


@pytest.fixture
def openai() -> Iterator[ScriptedServer]:
    with ScriptedServer(OPENAI) as scripted:
        yield scripted


def found_at(server: ScriptedServer) -> Found:
    async def once() -> Found:
        async with client_of(server.url) as client:
            return await client.find("")

    found: Found = run(once())
    return found
