"""A worker's last part: what it ends when, and when gunicorn may have it."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

from ironbatch.draining import announce_drain
from ironbatch.web.drain import LOOK_S, WORKER_KEY, Drain
from tests.web.fakes import Answer, Lifetime, expected_lines, fetch, in_loop, parsed, until
from tests.web.test_app import LANE, Server, a_server

NS_PER_S = 1_000_000_000
ENDLESS = b'{"prompt_tokens": 2, "max_new_tokens": 60}'


class FakeWorker:
    """gunicorn's worker with our book of connections, as far as a drain knows them."""

    def __init__(self) -> None:
        self.cfg = SimpleNamespace(keepalive=0)
        self.servers = [SimpleNamespace(close=lambda: self.calls.append("close"))]
        self.connections = SimpleNamespace(is_sending=False)
        self.nr_conns = 0
        self.calls: list[str] = []

    def handle_exit_signal(self) -> None:
        self.calls.append("exit")

    def handle_quit_signal(self) -> None:
        self.calls.append("quit")


class GunicornLifetime(Lifetime):
    """As gunicorn runs it: with a state, in which its worker stands."""

    def __init__(self, server: Server, worker: FakeWorker) -> None:
        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            scope["state"] = self.state
            await server.app(scope, receive, send)

        self.state: dict[str, Any] = {WORKER_KEY: worker}
        super().__init__(app)

    async def __aexit__(self, *problem: object) -> None:
        await super().__aexit__(*problem)
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


def drain(server: Server, timeout_s: float = 30) -> None:
    announce_drain(server.segment.header, server.small.clock.now_ns(), timeout_s)


def drain_of(server: Server) -> Drain:
    """The drain that the application has made."""
    cells = server.app.__closure__ or ()  # type: ignore[attr-defined]
    (found,) = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Drain)]
    return found


def is_drained(server: Server) -> bool:
    lane = server.segment.lanes[LANE]
    return int(lane["drained_generation"]) == int(lane["generation"])


async def ended(answer: Answer) -> None:
    assert answer.task is not None
    await answer.task
    assert answer.send.is_complete


@in_loop
async def test_a_worker_says_when_nothing_is_left() -> None:
    with a_server() as server:
        async with Lifetime(server.app):
            answer = server.generate(ENDLESS)
            await server.is_submitted()
            server.small.step()
            drain(server)
            refused = await fetch(server.app, "POST", "/generate", b'{"prompt_tokens": 1}')
            assert refused.status == 503
            assert not is_drained(server)
            await server.finish(answer)
            assert answer.body == expected_lines(60)
            await until(lambda: is_drained(server), "the word")


@in_loop
async def test_the_connections_learn_when_an_answer_is_to_be_their_last() -> None:
    with a_server() as server:
        worker = FakeWorker()
        async with GunicornLifetime(server, worker):
            assert not worker.connections.must_close()
            drain(server)
            assert worker.connections.must_close()


@in_loop
async def test_streams_that_run_on_are_ended_in_time_with_a_line_or_a_status() -> None:
    with a_server(max_running_seqs=1) as server:
        async with Lifetime(server.app):
            begun = server.generate(ENDLESS)
            await server.is_submitted()
            server.small.step()
            queued = server.generate(ENDLESS)
            await server.is_submitted(2)
            server.small.step()
            drain(server, 30)
            server.small.clock.advance_ns(29 * NS_PER_S)
            server.small.scheduler.beat()
            await asyncio.sleep(0.5)  # the claim is that a look finds nothing to do yet
            assert not begun.send.is_complete
            server.small.clock.advance_ns(NS_PER_S)
            await ended(begun)
            await ended(queued)
            last = parsed(begun.body)[-1]
            assert last["done"] is True
            assert last["error"]["type"] == "shutting_down"
            assert "--drain-timeout-s" in last["error"]["message"]
            assert queued.status == 503
            assert queued.error["type"] == "shutting_down"
            server.small.step()
            await until(lambda: not server.segment.slots["owner"].any(), "the slots' return")
            await until(lambda: is_drained(server), "the word")
            assert server.counts() == {"received": 2, "failed": 2}


@in_loop
async def test_told_to_leave_it_hands_over_once_its_requests_have_ended() -> None:
    with a_server() as server:
        worker = FakeWorker()
        lifetime = GunicornLifetime(server, worker)
        async with lifetime:
            assert lifetime.state == {}, "requests get copies of the state"
            worker.nr_conns = 2
            worker.connections.is_sending = True
            answer = server.generate(ENDLESS)
            await server.is_submitted()
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: "close" in worker.calls, "the end of listening")
            os.kill(os.getpid(), signal.SIGTERM)  # as gunicorn's arbiter does
            late = await fetch(server.app, "GET", "/health")
            assert late.status == 200
            assert worker.connections.must_close()
            await server.finish(answer)
            assert answer.body == expected_lines(60)
            await until(lambda: drain_of(server)._last_begun == 2, "a look that has seen both requests")
            server.small.clock.advance_ns(NS_PER_S)
            await until(lambda: drain_of(server)._is_quiet(), "a quiet while")
            await asyncio.sleep(2 * LOOK_S)  # the claim is that a look does nothing yet
            assert worker.calls == ["close"], "the end of an answer is still to be sent"
            worker.connections.is_sending = False
            await until(lambda: "exit" in worker.calls, "the hand-over")


@in_loop
async def test_told_to_leave_it_ends_what_takes_too_long_and_cuts_who_does_not_read() -> None:
    with a_server() as server:
        worker = FakeWorker()
        async with GunicornLifetime(server, worker):
            reading, stalled = server.generate(ENDLESS), server.generate(ENDLESS)
            await server.is_submitted(2)
            stalled.send.stall()
            server.small.step()
            await until(lambda: stalled.send.chunks, "a chunk that waits")
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: "close" in worker.calls, "the end of listening")
            server.small.clock.advance_ns(30 * NS_PER_S)
            await ended(reading)
            assert "replaces this web worker" in parsed(reading.body)[-1]["error"]["message"]
            assert "quit" not in worker.calls
            server.small.clock.advance_ns(NS_PER_S)
            await until(lambda: "quit" in worker.calls, "the cut")
            stalled.task.cancel()  # type: ignore[union-attr]
            await asyncio.wait([stalled.task])  # type: ignore[list-item]
            server.small.step()


@in_loop
async def test_told_to_quit_it_ends_streams_first() -> None:
    with a_server() as server:
        worker = FakeWorker()
        async with GunicornLifetime(server, worker):
            answer = server.generate(ENDLESS)
            await server.is_submitted()
            server.small.step()
            await until(lambda: answer.send.starts, "a head")
            os.kill(os.getpid(), signal.SIGQUIT)
            await until(lambda: worker.calls, "gunicorn's turn")
            assert worker.calls == ["quit"]
            await ended(answer)
            assert parsed(answer.body)[-1]["error"]["type"] == "shutting_down"
            server.small.step()


@in_loop
async def test_without_gunicorn_there_are_no_signals_to_take_over() -> None:
    with a_server() as server:
        handler = signal.getsignal(signal.SIGTERM)
        async with Lifetime(server.app):
            assert signal.getsignal(signal.SIGTERM) is handler
            assert (await fetch(server.app, "GET", "/health")).status == 200
