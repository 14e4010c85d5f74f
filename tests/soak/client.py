"""One client: sends what its plan says, reads, stalls or leaves, and notes what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.soak.plans import LEAVE, STALL, Plan

LONGEST_S = 90.0
"""No request takes longer, however it ends; one that does hangs."""

STALL_LIMIT_BYTES = 16 * 1024  # what a stalled reader's own buffers hold; a head must fit too
STALL_RECEIVE_BYTES = 4096
STALL_SEGMENT_BYTES = 536  # small segments keep the kernel's buffer at the server small

# How a request ended, as its client saw it.
ENDED = "ended"  # the answer is whole, as HTTP goes
LEFT = "left"  # the client went
CUT = "cut"  # the connection ended before the answer did
HUNG = "hung"


@dataclass
class Outcome:
    """What a client has seen. Times are of the monotonic clock."""

    plan: Plan
    port: int = 0  # the client's own
    is_reused: bool = False
    opened_s: float = 0.0  # its connection
    started_s: float = 0.0
    ended_s: float = 0.0
    ending: str = HUNG
    status: int = 0  # 0: no answer began
    headers: bytes = b""
    body: bytes = b""
    detail: str = ""


class Connection:
    """A connection to the server, for one plan or several."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.port: int = writer.get_extra_info("sockname")[1]
        self.opened_s = time.monotonic()

    @classmethod
    async def open(cls, server_port: int, *, stalls: bool = False) -> Connection:
        """Connect; a client that stalls has small buffers."""
        plug = socket.socket()
        plug.settimeout(0)
        if stalls:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STALL_RECEIVE_BYTES)
            plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, STALL_SEGMENT_BYTES)
        try:
            await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", server_port))
            limit = STALL_LIMIT_BYTES if stalls else 1 << 20
            return cls(*await asyncio.open_connection(sock=plug, limit=limit))
        except BaseException:
            plug.close()
            raise

    async def follow(self, outcome: Outcome) -> None:
        """Do what the plan says."""
        plan = outcome.plan
        outcome.port, outcome.opened_s = self.port, self.opened_s
        limit_s = LONGEST_S if plan.after_s is None else plan.after_s
        try:
            async with asyncio.timeout(limit_s):
                self._writer.write(plan.payload)
                await self._writer.drain()
                outcome.ending = await self._read(outcome)
        except TimeoutError:
            outcome.ending = HUNG if plan.after_s is None else LEFT
        except (OSError, EOFError) as problem:  # asyncio.IncompleteReadError is an EOFError
            outcome.ending, outcome.detail = CUT, f"{type(problem).__name__}: {problem}"
        except (ValueError, IndexError, asyncio.LimitOverrunError) as problem:
            outcome.ending, outcome.detail = HUNG, f"no HTTP: {type(problem).__name__}: {problem}"
        outcome.ended_s = time.monotonic()

    async def _read(self, outcome: Outcome) -> str:
        plan = outcome.plan
        if await self._is_enough(outcome, 0):
            return LEFT
        head = await self._reader.readuntil(b"\r\n\r\n")
        outcome.headers = head.lower()
        outcome.status = int(head.split(b" ", 2)[1])
        body = bytearray()
        try:
            async for part in self._parts(outcome.headers):
                body += part
                if await self._is_enough(outcome, len(body)):
                    return LEFT
        finally:
            outcome.body = bytes(body)
        assert plan.conduct != LEAVE or plan.after_bytes is None or len(body) < plan.after_bytes
        return ENDED

    async def _is_enough(self, outcome: Outcome, received: int) -> bool:
        """Stall if it is time to; whether it is time to leave."""
        plan = outcome.plan
        if plan.after_bytes is None or received < plan.after_bytes:
            return False
        if plan.conduct == LEAVE:
            return True
        if plan.conduct == STALL and not outcome.detail:
            outcome.detail = "stalled"
            await asyncio.sleep(plan.stall_s)
            return not plan.resumes
        return False

    async def _parts(self, headers: bytes) -> AsyncIterator[bytes]:
        """The body as it comes."""
        read = self._reader
        if b"transfer-encoding: chunked" in headers:
            while size := int(await read.readuntil(b"\r\n"), 16):
                yield (await read.readexactly(size + 2))[:size]
            await read.readexactly(2)
        elif b"content-length:" in headers:
            length = int(headers.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            yield await read.readexactly(length)
        else:
            yield await read.read()

    async def leave(self, way: str) -> None:
        """Hang up."""
        writer = self._writer
        plug = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            if way == "reset":
                plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            elif way == "half-close":
                writer.write_eof()
                await asyncio.sleep(0.02)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
