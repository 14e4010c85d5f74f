"""The arbiter's other ways, on an arbiter of which only the bookkeeping is there."""

from __future__ import annotations

import queue
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ironbatch import layout
from ironbatch.web.arbiter import adapt


class FakeArbiter:
    """gunicorn's, as far as `adapt` knows it: its reload waits until the old workers are gone."""

    def __init__(self, workers: int = 2) -> None:
        self.header = np.zeros(1, layout.HEADER)[0]
        self.num_workers = workers
        self.WORKERS: dict[int, Any] = {}
        self.SIG_QUEUE: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.calls: list[Any] = []
        self.dying: list[int] = []
        self.hung: list[int] = []
        self.next_pid = 100
        self.log = SimpleNamespace(error=lambda *words: self.calls.append(words))
        adapt(self, self.header, 30, 4)
        self.manage_workers()

    def spawn_worker(self) -> None:
        self.next_pid += 1
        self.WORKERS[self.next_pid] = object()

    def kill_worker(self, pid: int, number: int) -> None:
        self.calls.append(("kill", pid, number))

    def reap_workers(self) -> None:
        for pid in self.dying:
            self.WORKERS.pop(pid, None)
        self.dying = []

    def manage_workers(self) -> None:
        while len(self.WORKERS) < self.num_workers:
            self.spawn_worker()
        for pid in list(self.WORKERS)[: len(self.WORKERS) - self.num_workers]:
            self.kill_worker(pid, signal.SIGTERM)

    def reload(self) -> None:
        old = set(self.WORKERS)
        for _ in range(self.num_workers):
            self.spawn_worker()
        self.manage_workers()
        for _ in range(10):
            if not old & set(self.WORKERS):
                return
            self.reap_workers()
        self.calls.append("waited in vain")

    def stop(self, graceful: bool = True) -> None:  # noqa: FBT001, FBT002 - gunicorn's signature
        self.calls.append(("stop", graceful, int(self.header["draining"])))

    def handle_ttin(self) -> None:
        self.num_workers += 1
        self.manage_workers()

    def murder_workers(self) -> None:
        self.dying += self.hung
        self.hung = []

    def handle_term(self) -> None:
        raise StopIteration

    def handle_quit(self) -> None:
        self.stop(False)  # noqa: FBT003
        raise StopIteration

    handle_int = handle_quit


def test_a_stop_is_announced_before_it_begins() -> None:
    arbiter = FakeArbiter()
    arbiter.stop()
    assert arbiter.calls == [("stop", True, 1)]
    runs_ns = int(arbiter.header["streams_end_ns"])
    arbiter.stop(False)  # noqa: FBT003
    assert int(arbiter.header["streams_end_ns"]) < runs_ns, "at once"


def test_what_the_supervisor_has_announced_stays() -> None:
    arbiter = FakeArbiter()
    arbiter.header["draining"], arbiter.header["streams_end_ns"] = 1, 7
    arbiter.stop()
    assert arbiter.header["streams_end_ns"] == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_reload_that_waits_hears_of_a_stop(number: int) -> None:
    arbiter = FakeArbiter()
    for other in (signal.SIGTTIN, number, signal.SIGHUP):
        arbiter.SIG_QUEUE.put(other)
    with pytest.raises(StopIteration):
        arbiter.reload()
    assert "waited in vain" not in arbiter.calls
    assert (("stop", False, 1) in arbiter.calls) is (number != signal.SIGTERM)


def test_other_signals_keep_their_turn() -> None:
    arbiter = FakeArbiter()
    others = [signal.SIGHUP, signal.SIGTTIN, signal.SIGCHLD]
    for number in others:
        arbiter.SIG_QUEUE.put(number)
    arbiter.reload()
    assert [arbiter.SIG_QUEUE.get_nowait() for _ in others] == others


def test_a_new_worker_that_dies_while_old_ones_are_waited_for_is_replaced() -> None:
    arbiter = FakeArbiter()
    old = set(arbiter.WORKERS)
    reload_wait = arbiter.reap_workers
    deaths = iter([[103], [104, 105]])

    def dying_reap() -> None:
        arbiter.dying = next(deaths, [])
        reload_wait()
        assert len(set(arbiter.WORKERS) - old) == 2

    arbiter.reap_workers = dying_reap  # type: ignore[method-assign]
    arbiter.reload()
    assert arbiter.calls[-1] == "waited in vain"
    assert old < set(arbiter.WORKERS)
    assert len(arbiter.WORKERS) == 4


def test_a_worker_that_leaves_is_not_one_that_serves() -> None:
    arbiter = FakeArbiter()
    arbiter.num_workers = 1
    arbiter.manage_workers()
    leaving, staying = arbiter.WORKERS
    assert arbiter.calls == [("kill", leaving, signal.SIGTERM)]
    arbiter.dying = [staying]
    arbiter.reap_workers()
    arbiter.manage_workers()
    assert len(arbiter.WORKERS) == 2
    assert leaving in arbiter.WORKERS
    arbiter.dying = [leaving]
    arbiter.reap_workers()
    arbiter.manage_workers()
    assert len(arbiter.WORKERS) == 1


def test_a_worker_that_hangs_while_old_ones_are_waited_for_is_replaced() -> None:
    arbiter = FakeArbiter()
    arbiter.hung = [104]  # one of the new
    arbiter.reload()
    assert 104 not in arbiter.WORKERS
    assert len(set(arbiter.WORKERS) - {101, 102}) == 2


def test_no_more_workers_than_there_is_room_for() -> None:
    arbiter = FakeArbiter(workers=3)
    arbiter.handle_ttin()
    assert len(arbiter.WORKERS) == 4
    arbiter.handle_ttin()
    assert len(arbiter.WORKERS) == 4
    ((message, count),) = arbiter.calls
    assert message.startswith("TTIN is refused")
    assert "--workers" in message
    assert count == 4
