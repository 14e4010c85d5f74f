"""One stream of a completion: its events read as they come, with deadlines that no ping prolongs."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import aiohttp

from ironbatch.upstream.events import EventReader
from ironbatch.upstream.faults import NETWORK_FAULTS, problem_in_stream
from ironbatch.upstream.problems import UpstreamBroken, UpstreamProblem
from ironbatch.upstream.types import UNKNOWN_USAGE, DeltaReader, Enough, Finish, Piece

FINISH_WAIT_S: Final = 1.0
"""For usage and [DONE] after the finish reason. The answer is complete by then, so what comes late is done without."""

END_WAIT_S: Final = 0.05
"""For the end of the body after [DONE], which lets the connection be used again; a new one costs less than waiting."""


class CompletionStream:
    """Reads one stream, and hands each piece to `deliver` as it comes.

    `silence_s` is how long no piece may come, counted from the making of this object or from the last piece.
    """

    def __init__(self, reader: DeltaReader, deliver: Callable[[Piece], None], silence_s: float) -> None:
        self._reader = reader
        self._deliver = deliver
        self._silence_s = silence_s
        self._events = EventReader()
        self._now = asyncio.get_running_loop().time
        self._last_piece_at = self._now()
        self._finish_reason: str | None = None
        self._usage = UNKNOWN_USAGE
        self._is_done = False

    @property
    def silent_at(self) -> float:
        """When the silence becomes too long, as the loop's time."""
        return self._last_piece_at + self._silence_s

    def silence(self) -> UpstreamBroken:
        """The problem that there is at `silent_at`."""
        return UpstreamBroken(f"the model server was silent for {self._silence_s:g} s (--backend-timeout-s)")

    async def read(self, content: aiohttp.StreamReader) -> Finish:
        """Read to the end. Raises a problem if there is no finish reason, and what `deliver` raises, save Enough."""
        try:
            await self._read_to_finish(content)
        except Enough:
            return Finish("length", self._usage, is_cut=True)
        await self._read_to_end(content)
        assert self._finish_reason is not None, "a stream was read to its finish reason"
        return Finish(self._finish_reason, self._usage, is_cut=not content.at_eof())

    async def _read_to_finish(self, content: aiohttp.StreamReader) -> None:
        """The timer runs across chunks, since one for each would cost more than reading it.

        So it may end early, because a piece has come since it was set; then it is set anew. A read that it interrupts
        loses no byte: what has come stays in `content`.
        """
        while self._finish_reason is None:
            if self._now() >= self.silent_at:
                raise self.silence()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self.silent_at):
                    await self._take_chunks(content)

    async def _take_chunks(self, content: aiohttp.StreamReader) -> None:
        while True:
            try:
                chunk = await content.readany()
            except NETWORK_FAULTS as error:
                raise problem_in_stream(error) from None
            if self._take(chunk):
                return
            if self._is_done or not chunk:
                raise UpstreamBroken("the model server ended the stream without a finish reason")

    async def _read_to_end(self, content: aiohttp.StreamReader) -> None:
        """Take usage and [DONE]; whatever goes wrong from here on is no fault of the answer."""
        with contextlib.suppress(UpstreamProblem, *NETWORK_FAULTS):  # TimeoutError is among them
            async with asyncio.timeout(FINISH_WAIT_S):
                while not self._is_done and (chunk := await content.readany()):
                    self._take(chunk)
            async with asyncio.timeout(END_WAIT_S):
                while await content.readany():
                    pass

    def _take(self, chunk: bytes) -> bool:
        """Deliver the pieces of the chunk, and tell whether the answer is complete.

        None that comes after the finish reason is the answer's.
        """
        for data in self._events.feed(chunk):
            try:
                delta = self._reader.read(data)
            except UpstreamProblem:
                if self._finish_reason is None:
                    raise
                self._is_done = True  # the answer is complete, and what follows it can't be read
                break
            if delta.usage is not None:
                self._usage = delta.usage
            if self._finish_reason is None:
                self._deliver_all(delta.pieces)
                self._finish_reason = delta.finish_reason
            if delta.is_done:
                self._is_done = True
                break
        return self._finish_reason is not None

    def _deliver_all(self, pieces: list[Piece]) -> None:
        if pieces:
            self._last_piece_at = self._now()
            for piece in pieces:
                self._deliver(piece)
