"""Who is told when a model server goes and comes back, and who waits for it how long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ironbatch import layout
from ironbatch.backends import upstream_watch
from ironbatch.backends.upstream_watch import UpstreamWatch
from ironbatch.upstream.dialects import LlamaCppDialect, OpenAIDialect
from ironbatch.upstream.problems import UpstreamAway, UpstreamBroken, UpstreamBusy, UpstreamMisset, UpstreamProblem
from ironbatch.upstream.types import Found

FOUND = Found("m", 4, 0, OpenAIDialect())
DEADLINE_S = 10.0


class FakeServer:
    """Answers every look with `problem`, or well."""

    def __init__(self) -> None:
        self.problem: UpstreamProblem | None = None
        self.is_now = FOUND
        self.probes = 0
        self.finds = 0
        self.told: list[int] = []
        self.found: list[Found] = []

    async def probe(self) -> None:
        self.probes += 1
        if self.problem is not None:
            raise self.problem

    async def find(self, wanted_model: str) -> Found:
        self.finds += 1
        if self.problem is not None:
            raise self.problem
        return self.is_now


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_watch, "LOOK_FIRST_S", 0.001)
    monkeypatch.setattr(upstream_watch, "LOOK_MOST_S", 0.002)
    monkeypatch.setattr(upstream_watch, "LOOK_EVERY_S", 0.005)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


def watched(scene: Callable[[FakeServer, UpstreamWatch], Coroutine[Any, Any, None]]) -> FakeServer:
    server = FakeServer()

    async def run() -> None:
        watch = UpstreamWatch(server, "", server.told.append, server.found.append)
        watch.start(FOUND)
        await scene(server, watch)
        watch.stop()

    asyncio.run(run())
    return server


def test_one_that_is_there_is_not_waited_for() -> None:
    async def scene(server: FakeServer, watch: UpstreamWatch) -> None:
        await watch.wait_until_back(0.0)

    assert watched(scene).told == []


@pytest.mark.parametrize("reports", [1, 3])
def test_one_that_goes_is_looked_for_until_it_is_back(reports: int, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(server: FakeServer, watch: UpstreamWatch) -> None:
        server.problem = UpstreamAway("refused")
        for _ in range(reports):
            watch.is_away(server.problem)
        waiting = asyncio.create_task(watch.wait_until_back(asyncio.get_running_loop().time() + DEADLINE_S))
        await until(lambda: server.finds >= 3)
        assert not waiting.done()
        server.problem = UpstreamBusy("no time")
        await until(lambda: server.told[-1] == layout.BACKEND_BUSY)
        server.problem = None
        await waiting

    caplog.set_level(logging.INFO, "ironbatch.scheduler")
    server = watched(scene)
    assert (server.told[0], server.told[-1]) == (layout.BACKEND_AWAY, layout.BACKEND_WELL)
    assert server.found == [], "it is the one that it was"
    lines = [record.message[:26] for record in caplog.records]
    assert lines == ["the model server is away: ", "the model server is back a"], "one line for each change"


def test_one_that_was_not_there_at_the_start_is_waited_for() -> None:
    """A scheduler that takes over while the server is away goes on without it."""

    async def run() -> None:
        server = FakeServer()
        server.problem = UpstreamAway("refused")
        watch = UpstreamWatch(server, "", server.told.append, server.found.append)
        watch.start(server.problem)
        assert server.told == [layout.BACKEND_AWAY]
        with pytest.raises(UpstreamAway, match="refused"):
            await watch.wait_until_back(asyncio.get_running_loop().time())
        server.problem = None
        await watch.wait_until_back(asyncio.get_running_loop().time() + DEADLINE_S)
        assert server.found == [FOUND]
        watch.stop()

    asyncio.run(run())


def test_one_that_comes_and_goes_is_not_asked_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may answer every look and still be away for whoever asks it for tokens."""
    monkeypatch.setattr(upstream_watch, "LOOK_FIRST_S", 0.01)
    monkeypatch.setattr(upstream_watch, "LOOK_MOST_S", 0.08)

    async def scene(server: FakeServer, watch: UpstreamWatch) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 0.5
        while loop.time() < until_s:
            await watch.wait_until_back(until_s + DEADLINE_S)
            watch.is_away(UpstreamAway("reset"))

    assert watched(scene).finds <= 3 + 0.5 / 0.08


def test_a_wait_ends_at_its_time_with_the_reason() -> None:
    async def scene(server: FakeServer, watch: UpstreamWatch) -> None:
        server.problem = UpstreamMisset("no such path")
        watch.is_away(UpstreamAway("refused"))
        await until(lambda: server.finds > 1)
        with pytest.raises(UpstreamAway, match="no such path"):
            await watch.wait_until_back(asyncio.get_running_loop().time())

    watched(scene)


def test_one_that_is_busy_is_not_called_away() -> None:
    async def scene(server: FakeServer, watch: UpstreamWatch) -> None:
        server.problem = UpstreamAway("no answer in time")
        async with asyncio.timeout(DEADLINE_S):
            while server.probes < 4:
                watch.heard()
                await asyncio.sleep(0.0005)
        assert server.told == []

    watched(scene)


def test_an_idle_one_is_looked_after() -> None:
    async def scene(server: FakeServer, watch: UpstreamWatch) -> None:
        await until(lambda: server.probes > 1)
        server.problem = UpstreamBroken("odd")
        await until(lambda: server.probes > 3)
        assert server.told == [], "what it says when it is there is no reason to refuse anybody"
        server.problem = UpstreamAway("refused")
        await until(lambda: layout.BACKEND_AWAY in server.told)

    watched(scene)


@pytest.mark.parametrize("other", [FOUND._replace(slots=2), FOUND._replace(dialect=LlamaCppDialect())])
def test_one_that_is_replaced_is_noticed(other: Found) -> None:
    """By a look at an idle one, and by whoever gets an answer that is none; and after it was away."""

    async def idle(server: FakeServer, watch: UpstreamWatch) -> None:
        server.is_now = other
        await until(lambda: server.found == [other])

    async def asked(server: FakeServer, watch: UpstreamWatch) -> None:
        assert not await watch.has_changed()
        server.problem = UpstreamBroken("odd")
        assert not await watch.has_changed()
        server.problem, server.is_now = None, other
        assert await watch.has_changed()

    async def away(server: FakeServer, watch: UpstreamWatch) -> None:
        server.is_now = other
        watch.is_away(UpstreamAway("refused"))
        await watch.wait_until_back(asyncio.get_running_loop().time() + DEADLINE_S)

    for scene in (idle, asked, away):
        assert watched(scene).found == [other]


def test_one_that_comes_back_as_the_wait_ends_is_back() -> None:
    async def scene(server: FakeServer, watch: UpstreamWatch) -> None:
        watch.is_away(UpstreamAway("refused"))

        async def never() -> None:
            watch._problem = None
            raise TimeoutError

        watch._is_back.wait = never  # type: ignore[method-assign, assignment]
        await watch.wait_until_back(asyncio.get_running_loop().time() + DEADLINE_S)

    watched(scene)


def test_whatever_goes_wrong_it_goes_on_looking() -> None:
    async def scene(server: FakeServer, watch: UpstreamWatch) -> None:
        server.problem = UpstreamAway("refused")
        watch.is_away(server.problem)
        server.problem = ValueError("a bug")  # type: ignore[assignment]
        await until(lambda: server.finds >= 3)
        server.problem = None
        await watch.wait_until_back(asyncio.get_running_loop().time() + DEADLINE_S)

    assert watched(scene).told[-1] == layout.BACKEND_WELL
