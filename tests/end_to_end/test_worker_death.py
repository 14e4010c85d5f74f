"""Web workers that die or hang: what they owned is free within a second, and nobody else notices.

Which worker gets a connection is chosen by stopping the others while it is made.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from ironbatch.kernels.slots import slot_claim
from ironbatch.layout import owner_word
from tests.end_to_end.observer import Observer, observed, seconds_until
from tests.end_to_end.server import FORMS, RawStream, Server, is_alive, running, wait_until
from tests.mock_answers import Mock, Verdict, judge

pytestmark = pytest.mark.end_to_end

MOCK = Mock(keeps_kv=True)
LIMIT_S = 3.0  # the claim is one second, and the figures are printed; this is for a machine that is busy

OPTIONS: dict[str, Any] = {
    "mock_kv": True,
    "max_running_seqs": 16,
    "max_queued_requests": 64,
    "max_batch_tokens": 64,
    "total_kv_blocks": 4_096,
    "mock_token_latency_us": 4_000,
    "mock_prefill_token_latency_ns": 100_000,  # a chunk takes 10 ms, 8,000 tokens take 1.3 s
    "audit_every": 16,
}
LONG = 8_000  # tokens: more than can be generated while a test lasts
WHOLE = 150
LASTING = 800  # tokens of a stream that is to be there still when something happens, and is then read to its end


def workers(server: Server) -> list[psutil.Process]:
    return server.processes("web worker")


def lane_of(server: Server, worker: psutil.Process) -> int:
    (lane,) = (int(name.split()[-1]) for name in worker.cmdline() if "web worker" in name)
    return lane


def wait_serving(server: Server, engine: Observer, count: int) -> list[psutil.Process]:
    """Wait until there are `count` workers that serve; each has a lane of its own."""

    def serving() -> list[psutil.Process] | None:
        with contextlib.suppress(psutil.Error, ValueError):
            found = workers(server)
            lanes = engine.segment.lanes
            pids = set(lanes["worker_pid"][lanes["serving_generation"] == lanes["generation"]].tolist())
            if len(found) == count and {worker.pid for worker in found} <= pids:
                return found
        return None

    found: list[psutil.Process] = wait_until(serving, f"{count} workers that serve", 30)
    return found


@contextlib.contextmanager
def only(server: Server, worker: psutil.Process) -> Iterator[None]:
    """Meanwhile this worker alone takes connections. Who is stopped already stays so."""
    others = [other for other in workers(server) if other.pid != worker.pid]
    others = [other for other in others if other.status() != psutil.STATUS_STOPPED]
    for other in others:
        other.suspend()
    try:
        for other in others:
            wait_until(lambda other=other: other.status() == psutil.STATUS_STOPPED, "a stop")
        yield
    finally:
        for other in others:
            other.resume()


class Streams:
    """Requests on one worker, and their judgement."""

    def __init__(self, server: Server, engine: Observer, worker: psutil.Process) -> None:
        self._server, self._engine, self._worker = server, engine, worker
        self.lane = lane_of(server, worker)
        self.owner = (self.lane, int(engine.segment.lanes["generation"][self.lane]))
        self.open: list[tuple[dict[str, Any], RawStream]] = []

    def ask(self, *bodies: dict[str, Any]) -> None:
        """Send requests to this worker, and see that they are its own."""
        before = len(self._engine.owned_by(*self.owner))
        more = sum(body.get("n", 1) for body in bodies)
        with only(self._server, self._worker):
            self.open += [(body, RawStream(self._server.port, body)) for body in bodies]
            wait_until(lambda: len(self._engine.owned_by(*self.owner)) >= before + more, "its slots")

    def verdicts(self) -> list[tuple[Verdict, bool]]:
        """Read all to their ends. What has come of each, and whether its connection was cut."""
        found = []
        for body, stream in self.open:
            received, is_cut = b"", False
            try:
                while chunk := stream.read_chunk():
                    received += chunk
            except (AssertionError, OSError):
                is_cut = True
            stream.close()
            found.append((judge(body, received, MOCK), is_cut))
        self.open = []
        return found

    def assert_whole(self) -> None:
        for verdict, is_cut in self.verdicts():
            assert verdict.problem is None, verdict
            assert verdict.is_whole, verdict
            assert not is_cut
            assert not verdict.errors

    def assert_cut(self) -> None:
        """Each is a beginning of what was to come, and then its connection ends."""
        for verdict, is_cut in self.verdicts():
            assert verdict.problem is None, verdict
            assert is_cut
            assert not verdict.is_whole


def body(seed: int, *, prompt: int = 10, tokens: int = LONG, **more: Any) -> dict[str, Any]:
    ids = list(range(seed, seed + prompt))
    return {"prompt_token_ids": ids, "max_new_tokens": tokens, "seed": seed, "details": True} | more


def in_all_states(engine: Observer, streams: Streams) -> None:
    """This worker's sequences decode, prefill and wait, groups among them; and it has claimed one slot more."""
    decoding = [body(seed) for seed in range(3)] + [body(3, n=2)]
    streams.ask(*decoding)
    wait_until(lambda: engine.are_decoding(engine.owned_by(*streams.owner)).sum() == 5, "tokens")
    streams.ask(*(body(seed, prompt=7_500, tokens=WHOLE) for seed in range(10, 14)), body(14, n=3), body(15))
    # As a worker leaves it that dies between claim and submit. Which takes microseconds, so it is made by hand.
    assert slot_claim(engine.segment.address, owner_word(*streams.owner), 0) >= 0
    mine = engine.owned_by(*streams.owner)
    for state in (engine.are_decoding, engine.are_prefilling, engine.are_queued):
        wait_until(lambda state=state: state(mine).any(), "each of the states")
    assert len(mine) == 5 + 4 + 3 + 1 + 1
    sequences = engine.owned() - 1
    wait_until(lambda: engine.gauges["running"] + engine.gauges["waiting"] == sequences, "a step that knows them all")


def assert_freed(engine: Observer, streams: Streams, what: str) -> None:
    """Within the limit the dead owner has nothing, and its lane is free for another."""
    lanes = engine.segment.lanes
    slots_s = seconds_until(lambda: not len(engine.owned_by(*streams.owner)), f"{what}: slots", LIMIT_S)
    lane, generation = streams.owner
    lane_s = seconds_until(lambda: lanes["reaped_generation"][lane] >= generation, f"{what}: lane", LIMIT_S)
    print(f"{what}: slots after {slots_s * 1e3:.1f} ms, lane {lane_s * 1e3:.1f} ms later")


def assert_sound(server: Server, engine: Observer, completed: int, lost: int) -> None:
    """At the end: idle, all counted, and the server serves."""
    wait_until(engine.is_idle, "an idle engine")
    wait_until(lambda: engine.unaccounted() == 0, "the last counters")
    now = engine.metrics()
    assert (now["requests_completed"], now["requests_lost"]) == (completed, lost)
    assert now["requests_cancelled"] == now["requests_failed"] == now["audit_failures"] == now["sequences_failed"] == 0
    wait_until(server.is_healthy, "health")
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.output)


@pytest.mark.parametrize("form", FORMS)
def test_all_that_a_killed_worker_owned_is_free(form: str) -> None:
    with running(form, workers=2, **OPTIONS) as server, observed(server) as engine:
        first, second = wait_serving(server, engine, 2)
        doomed, others = Streams(server, engine, first), Streams(server, engine, second)
        others.ask(*(body(100 + seed, tokens=LASTING) for seed in range(4)), body(104, tokens=LASTING, n=2))
        in_all_states(engine, doomed)
        aborted = len(engine.owned_by(*doomed.owner)) - 1  # the claimed one is no sequence yet
        assert len(engine.owned_by(*others.owner)) == 6, "the others have ended already"
        first.kill()
        assert_freed(engine, doomed, f"{form}, killed")
        others.assert_whole()
        doomed.assert_cut()
        assert engine.gauges["sequences_aborted"] == aborted
        replaced = wait_serving(server, engine, 2)
        assert {worker.pid for worker in replaced} & {first.pid, second.pid} == {second.pid}
        (successor,) = (worker for worker in replaced if worker.pid != second.pid)
        served = Streams(server, engine, successor)
        served.ask(body(200, tokens=WHOLE))
        served.assert_whole()
        assert_sound(server, engine, completed=6, lost=10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", ["worker first", "scheduler first"])
def test_worker_and_scheduler_in_the_same_moment(form: str, order: str) -> None:
    with running(form, workers=2, **OPTIONS) as server, observed(server) as engine:
        first, second = wait_serving(server, engine, 2)
        doomed, others = Streams(server, engine, first), Streams(server, engine, second)
        others.ask(*(body(100 + seed, tokens=LASTING) for seed in range(4)), body(104, tokens=LASTING, n=2))
        in_all_states(engine, doomed)
        scheduler = server.scheduler()
        for process in (first, scheduler) if order == "worker first" else (scheduler, first):
            process.kill()
        assert_freed(engine, doomed, f"{form}, {order}")
        others.assert_whole()
        doomed.assert_cut()
        wait_serving(server, engine, 2)
        assert engine.gauges["scheduler_starts"] == 2
        assert_sound(server, engine, completed=5, lost=10)


@pytest.mark.parametrize("form", FORMS)
def test_all_workers_at_once(form: str) -> None:
    with running(form, workers=3, **OPTIONS) as server, observed(server) as engine:
        old = wait_serving(server, engine, 3)
        doomed = [Streams(server, engine, worker) for worker in old]
        for k, streams in enumerate(doomed):
            streams.ask(*(body(10 * k + seed) for seed in range(4)))
        for worker in old:
            worker.kill()
        for streams in doomed:
            assert_freed(engine, streams, f"{form}, all at once")
            streams.assert_cut()
        new = wait_serving(server, engine, 3)
        assert not {worker.pid for worker in new} & {worker.pid for worker in old}
        for worker in new:
            served = Streams(server, engine, worker)
            served.ask(body(200, tokens=WHOLE))
            served.assert_whole()
        assert_sound(server, engine, completed=3, lost=12)


@pytest.mark.parametrize("form", FORMS)
def test_killed_again_and_again(form: str) -> None:
    """One worker and its successors, more often than there are lanes; the other's streams go on through all of it."""
    rounds = 8
    with running(form, workers=2, **OPTIONS) as server, observed(server) as engine:
        assert rounds > len(engine.segment.lanes)
        _, spared = wait_serving(server, engine, 2)
        others = Streams(server, engine, spared)
        others.ask(*(body(100 + seed, tokens=3_000) for seed in range(3)))
        for k in range(rounds):
            (victim,) = (worker for worker in wait_serving(server, engine, 2) if worker.pid != spared.pid)
            doomed = Streams(server, engine, victim)
            doomed.ask(*(body(10 * k + seed) for seed in range(3)))
            victim.kill()
            assert_freed(engine, doomed, f"{form}, death {k}")
            doomed.assert_cut()
        others.assert_whole()
        wait_serving(server, engine, 2)
        assert "no lane is free" not in "".join(server.output)
        assert_sound(server, engine, completed=3, lost=3 * rounds)


def test_a_hung_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its sequences are computed as any other's and end in their slots; its clients wait. Nobody else does.

    gunicorn alone, since `serve` lets nobody shorten the time-out of 30 s.
    """
    monkeypatch.setenv("GUNICORN_CMD_ARGS", "--timeout 6")
    with running("gunicorn", workers=2, **OPTIONS) as server, observed(server) as engine:
        first, second = wait_serving(server, engine, 2)
        hung, others = Streams(server, engine, first), Streams(server, engine, second)
        hung.ask(*(body(seed, tokens=300) for seed in range(3)), body(3))
        wait_until(lambda: engine.are_decoding(engine.owned_by(*hung.owner)).sum() == 4, "tokens")
        first.send_signal(signal.SIGSTOP)
        others.ask(*(body(100 + seed, tokens=WHOLE) for seed in range(4)))
        others.assert_whole()
        mine = engine.owned_by(*hung.owner)
        wait_until(lambda: np.count_nonzero(engine.reasons(mine)) == 3, "the ends of the short ones")
        assert is_alive(first)
        # Those ends cost no block; the slots are held until the worker is replaced.
        assert len(engine.owned_by(*hung.owner)) == 4
        replaced_s = seconds_until(lambda: not is_alive(first), "the end of the hung worker", 30)
        assert_freed(engine, hung, f"hung, killed after {replaced_s:.1f} s")
        hung.assert_cut()
        wait_serving(server, engine, 2)
        assert "WORKER TIMEOUT" in "".join(server.output)
        assert_sound(server, engine, completed=4, lost=4)


@pytest.mark.parametrize("form", FORMS)
def test_a_worker_that_was_stopped_for_a_while_loses_nothing(form: str) -> None:
    """Neither what was generated meanwhile, nor a client that has gone meanwhile."""
    with running(form, workers=2, **OPTIONS) as server, observed(server) as engine:
        first, _ = wait_serving(server, engine, 2)
        streams = Streams(server, engine, first)
        streams.ask(*(body(seed, tokens=WHOLE) for seed in range(3)), body(3, tokens=WHOLE, n=3), body(4), body(5))
        first.suspend()
        wait_until(lambda: first.status() == psutil.STATUS_STOPPED, "its stop")
        (_, closed), (_, reset) = (streams.open.pop(), streams.open.pop())
        closed.close()
        reset.reset()
        mine = engine.owned_by(*streams.owner)
        wait_until(lambda: np.count_nonzero(engine.reasons(mine)) == 6, "ends that nobody collects")
        first.resume()
        streams.assert_whole()
        wait_until(engine.is_idle, "an idle engine")
        wait_until(lambda: engine.unaccounted() == 0, "the last counters")
        now = engine.metrics()
        assert (now["requests_completed"], now["requests_cancelled"], now["requests_lost"]) == (4, 2, 0)
        assert server.stop() == 0
