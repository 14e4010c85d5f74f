"""How the scripted model server sends one stream, and breaks it off."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from tests.upstream.script import PING, Ending, LlamaCppWire, OpenAIWire, Recorded, Script
from tests.upstream.tokens import Answer, prompt_tokens, word

PING_S = 0.02

_FINISHES = {Ending.FINISH, Ending.FINISH_AND_HANG, Ending.FINISH_AND_PINGS}
_BREAKS = {Ending.CLOSE, Ending.RESET}
_PINGS = {Ending.PINGS, Ending.FINISH_AND_PINGS}
_HANGS = {Ending.HANG, Ending.FINISH_AND_HANG}

Pace = Callable[[], Awaitable[None]]


async def before_head(request: web.Request, script: Script) -> None:
    """What happens before a byte of the answer is sent."""
    await asyncio.sleep(script.head_delay_s)
    if script.before_head in _BREAKS:
        break_connection(request, script.before_head)
    if script.before_head is not None:
        await until_cancelled()


async def send_stream(request: web.Request, recorded: Recorded, script: Script, pace: Pace) -> web.StreamResponse:
    """The whole stream. `pace` waits for the server's next step."""
    await before_head(request, script)
    wire: LlamaCppWire | OpenAIWire = LlamaCppWire() if request.path == LlamaCppWire.path else OpenAIWire()
    response = web.StreamResponse(headers={"Content-Type": script.content_type or "text/event-stream"})
    response.headers.update(script.headers)
    if isinstance(wire, LlamaCppWire):
        response.force_close()  # as llama.cpp does after each stream
    response.enable_chunked_encoding()
    await response.prepare(request)
    async for data in _pieces(recorded, script, wire, pace):
        await _write(response, data, script)
    await _write(response, _last_events(recorded, script, wire), script)
    while script.ending in _PINGS:
        await response.write(PING)
        await asyncio.sleep(PING_S)
    if script.ending in _HANGS:
        await until_cancelled()
    if script.ending in _BREAKS:
        break_connection(request, script.ending)
        await until_cancelled()
    await response.write_eof()
    return response


async def _pieces(
    recorded: Recorded, script: Script, wire: LlamaCppWire | OpenAIWire, pace: Pace
) -> AsyncIterator[bytes]:
    answer = Answer(recorded.prompt, recorded.seed)
    count = recorded.max_tokens if script.pieces is None else min(script.pieces, recorded.max_tokens)
    written = b""
    for index in range(count):
        token_id = answer.next_token()
        written += script.raw.get(index, b"") + wire.piece(word(token_id), token_id, index)
        if (index + 1) % script.pieces_per_write == 0 or index == count - 1:
            await (pace() if script.token_us is None else asyncio.sleep(script.token_us / 1e6))
            recorded.pieces = index + 1
            yield written
            written = b""
    yield script.raw.get(count, b"")


def _last_events(recorded: Recorded, script: Script, wire: LlamaCppWire | OpenAIWire) -> bytes:
    if script.ending is Ending.NO_REASON:
        return b"data: [DONE]\n\n"
    if script.ending not in _FINISHES:
        return b""
    reason = script.finish_reason or ("length" if recorded.pieces == recorded.max_tokens else "stop")
    usage = (prompt_tokens(recorded.prompt), recorded.pieces)
    if script.ending is not Ending.FINISH:
        return wire.finish(reason, None, script)
    return wire.finish(reason, usage, script) + wire.last(script)


async def _write(response: web.StreamResponse, data: bytes, script: Script) -> None:
    """Whole or cut; an empty write would end the body."""
    step = script.bytes_per_write or len(data) or 1
    for start in range(0, len(data), step):
        await response.write(data[start : start + step])
        if script.bytes_per_write:
            await asyncio.sleep(0)


def break_connection(request: web.Request, how: Ending) -> None:
    """Close the connection in order (FIN), or reset it (RST)."""
    transport = request.transport
    assert transport is not None
    if how is Ending.CLOSE:
        transport.close()
        return
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def until_cancelled() -> None:
    """Aiohttp cancels a handler whose connection is gone."""
    await asyncio.Event().wait()
