"""Whether there is a model server to ask: who waits for it, who looks for it, and who is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from ironbatch import layout
from ironbatch.upstream.problems import UpstreamAway, UpstreamBroken, UpstreamBusy, UpstreamProblem
from ironbatch.upstream.types import Found

_log = logging.getLogger("ironbatch.scheduler")

LOOK_FIRST_S = 0.1
LOOK_MOST_S = 1.0
"""Before each look for a server that is away; the first ones come sooner."""

STEADY_S = 10.0
"""One that goes again within this time of its coming back is looked for at the pace of before."""

LOOK_EVERY_S = 5.0
"""Between two looks at a server that is there: it may go, or become another, without anybody's having asked it."""


class Asked(Protocol):
    """Of `UpstreamClient` what is needed here."""

    async def probe(self) -> None:
        """Raises an UpstreamProblem if the server does not serve."""

    async def find(self, wanted_model: str) -> Found:
        """What the server tells of itself."""


def problem_code(problem: UpstreamProblem) -> int:
    """What /health says of it."""
    if isinstance(problem, UpstreamAway):
        return layout.BACKEND_AWAY
    return layout.BACKEND_BUSY if isinstance(problem, UpstreamBusy) else layout.BACKEND_MISSET


class UpstreamWatch:
    """Runs on the streams' event loop. Made before it; `start`ed once the server was found for the first time.

    Args:
        client: by which the server is asked.
        wanted_model: the model's name, or empty.
        tell_problem: is told when the server goes and when it is back, by `layout.BACKEND_...`.
        on_found: is told what the server says of itself when it has become another.
    """

    def __init__(
        self,
        client: Asked,
        wanted_model: str,
        tell_problem: Callable[[int], None],
        on_found: Callable[[Found], None],
    ) -> None:
        self._client = client
        self._wanted_model = wanted_model
        self._tell_problem = tell_problem
        self._on_found = on_found
        self._is_back = asyncio.Event()
        self._wake = asyncio.Event()  # of the task that looks
        self._problem: UpstreamProblem | None = None
        self._found: Found | None = None
        self._heard_s = 0.0
        self._back_s = 0.0
        self._pause_s = LOOK_FIRST_S
        self._looking: asyncio.Task[None] | None = None

    def start(self, found: Found | UpstreamProblem) -> None:
        """Begin to watch a server that was found, or was not."""
        if isinstance(found, Found):
            self._found = found
            self._is_back.set()
        else:
            self._note_away(found)
        self._looking = asyncio.get_running_loop().create_task(self._look_for_ever())

    def stop(self) -> None:
        """Watch no more."""
        if self._looking is not None:
            self._looking.cancel()

    def heard(self) -> None:
        """The server has just answered somebody."""
        self._heard_s = asyncio.get_running_loop().time()

    def is_away(self, problem: UpstreamProblem) -> None:
        """Somebody has found that nobody answers."""
        if self._problem is None:
            self._note_away(problem)
            self._wake.set()

    async def has_changed(self) -> bool:
        """Look again at a server that does not answer as it should: whether it is another than it was."""
        before = self._found
        with contextlib.suppress(UpstreamProblem):
            self._note_found(await self._find())
        return self._found is not before

    async def wait_until_back(self, until_s: float) -> None:
        """Return once the server is there, at once if it is.

        Raises:
            UpstreamAway: why it is not, at `until_s` of the loop's clock.
        """
        if self._problem is None:
            return
        try:
            async with asyncio.timeout_at(until_s):
                await self._is_back.wait()
        except TimeoutError:
            if self._problem is not None:  # it may have come back at this very moment
                raise UpstreamAway(self._problem.message) from None

    async def _look_for_ever(self) -> None:
        """Look for one that is away, and after one of which nothing is heard."""
        while True:
            if self._problem is not None:
                await self._look_until_back()
            self._wake.clear()
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                await self._look_after()

    async def _look_until_back(self) -> None:
        loop = asyncio.get_running_loop()
        gone_s = loop.time()
        if gone_s - self._back_s > STEADY_S:
            self._pause_s = LOOK_FIRST_S  # else it comes and goes, and is not believed ever sooner
        while True:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LOOK_MOST_S)
            try:
                found = await self._find()
            except UpstreamProblem as problem:
                self._problem = problem
                self._tell_problem(problem_code(problem))
            else:
                break
        self._problem = None
        self._back_s = loop.time()
        self._note_found(found)
        self._tell_problem(layout.BACKEND_WELL)
        self._is_back.set()
        _log.info("the model server is back after %.1f s", loop.time() - gone_s)

    async def _look_after(self) -> None:
        """Whether it is there, and still the one that it was; oddities are no reason to refuse anybody."""
        try:
            await self._client.probe()
            self._note_found(await self._find())
        except UpstreamAway as problem:
            if asyncio.get_running_loop().time() - self._heard_s >= LOOK_EVERY_S:  # else it has other things to do
                self._note_away(problem)
        except UpstreamProblem as problem:
            _log.debug("the model server answers oddly: %s", problem.message)

    async def _find(self) -> Found:
        """What the server says of itself. Raises UpstreamProblem, whatever goes wrong: who looks must go on looking."""
        try:
            return await self._client.find(self._wanted_model)
        except UpstreamProblem:
            raise
        except Exception as problem:
            _log.exception("looking for the model server has failed")
            raise UpstreamBroken(f"{type(problem).__name__}: {problem}") from None

    def _note_found(self, found: Found) -> None:
        if self._found is None or not found.is_like(self._found):
            self._found = found
            self._on_found(found)

    def _note_away(self, problem: UpstreamProblem) -> None:
        _log.warning("the model server is away: %s", problem.message)
        self._problem = problem
        self._is_back.clear()
        self._tell_problem(problem_code(problem))
