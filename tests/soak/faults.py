"""Kills, stops, reloads: drawn from a seed, done to a running server, and noted.

A worker is stopped before it is killed, so that the connections that die with it are known: all others must live.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import psutil

from tests.end_to_end.observer import Observer
from tests.end_to_end.server import Server

WORKER_KILL, SCHEDULER_KILL, SCHEDULER_TWICE, BOTH_KILL = (
    "worker kill",
    "scheduler kill",
    "scheduler twice",
    "both kill",
)
WORKER_STOP, SCHEDULER_STOP, HUP, RESIZE = "worker stop", "scheduler stop", "HUP", "TTIN or TTOU"
WEIGHTS = {
    WORKER_KILL: 4,
    SCHEDULER_KILL: 4,
    SCHEDULER_TWICE: 1,
    BOTH_KILL: 1,
    WORKER_STOP: 3,
    SCHEDULER_STOP: 3,
    HUP: 3,
    RESIZE: 3,
}
CALM = frozenset({WORKER_KILL, WORKER_STOP, SCHEDULER_STOP})
"""What happens during the calm, in which one worker and the scheduler are to grow old."""

MEAN_PAUSE_S = 2.0
SHORTEST_PAUSE_S = 0.3
LONGEST_STOP_S = 0.8  # of a process that is stopped and goes on
RECOVERY_LIMIT_S = 20.0
POLL_S = 0.001
NEAR_S = 3.0
NOTICE_S = 1.0  # a worker of a busy machine may need so long to notice that a client has left


@dataclass(frozen=True)
class Fault:
    """One of them, as drawn."""

    pause_s: float  # after the one before
    kind: str
    target: float  # 0 <= target < 1: which of those there are
    length_s: float


def draw(random: Random) -> Fault:
    """The next fault."""
    return Fault(
        max(random.expovariate(1 / MEAN_PAUSE_S), SHORTEST_PAUSE_S),
        random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0],
        random.random(),
        random.uniform(0.05, LONGEST_STOP_S),
    )


@dataclass
class Damage:
    """What was done. Times are of the monotonic clock."""

    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    doomed: dict[int, list[float]] = field(default_factory=dict)  # client port -> when its worker was killed
    worker_kills: list[float] = field(default_factory=list)
    retirements: list[float] = field(default_factory=list)  # when workers were told to end
    gaps_s: list[float] = field(default_factory=list)  # from a scheduler's SIGKILL to the next token
    problems: list[str] = field(default_factory=list)
    begun: list[tuple[float, str]] = field(default_factory=list)  # each fault, whether or not anything came of it

    def near(self, at_s: float) -> str:
        """The faults about a moment, for whoever wants to know why."""
        near = [f"{kind} {at_s - begun_s:.2f} s before" for begun_s, kind in self.begun if abs(at_s - begun_s) < NEAR_S]
        return ", ".join(near) or "no fault"

    def has_doomed(self, port: int, started_s: float, ended_s: float) -> bool:
        """Whether a connection's worker was killed while a request was under way on it."""
        return any(started_s <= killed_s <= ended_s for killed_s in self.doomed.get(port, ()))

    def may_hide(self, left_s: float) -> bool:
        """Whether a worker was killed so soon after a client left that it may not have noticed."""
        return any(0 <= killed_s - left_s <= NOTICE_S for killed_s in self.worker_kills)


class Faults(threading.Thread):
    """Injects faults until it is told to stop.

    Args:
        server: to whom.
        engine: its segment.
        seed: of the draws.
        workers: how many there are by configuration.
        is_calm: whether only what `CALM` lists may happen now.
    """

    def __init__(self, server: Server, engine: Observer, seed: int, workers: int, is_calm: threading.Event) -> None:
        super().__init__(name="faults", daemon=True)
        self._server, self._engine, self._workers, self._is_calm = server, engine, workers, is_calm
        self._random = Random(f"{seed} faults")
        self._more = 0  # workers beyond the configuration
        self._is_over = threading.Event()
        self.damage = Damage()

    def finish(self) -> Damage:
        """Stop, and say what was done."""
        self._is_over.set()
        self.join(4 * RECOVERY_LIMIT_S)
        return self.damage

    def run(self) -> None:
        actions = {
            WORKER_KILL: self._kill_worker,
            SCHEDULER_KILL: lambda fault: self._kill_scheduler(1),
            SCHEDULER_TWICE: lambda fault: self._kill_scheduler(2),
            BOTH_KILL: self._kill_both,
            WORKER_STOP: lambda fault: self._stop_for_a_while(self._worker(fault), fault.length_s),
            SCHEDULER_STOP: lambda fault: self._stop_for_a_while(self._scheduler(), fault.length_s),
            HUP: lambda fault: self._reload(),
            RESIZE: lambda fault: self._resize(),
        }
        while True:
            fault = draw(self._random)
            if self._is_over.wait(fault.pause_s):
                return
            done = False
            if fault.kind in CALM or not self._is_calm.is_set():
                self.damage.begun.append((time.monotonic(), fault.kind))
                try:
                    done = actions[fault.kind](fault)
                except psutil.Error:  # it has ended under our hands
                    pass
                except Exception as problem:  # told by the report, not by the thread
                    self.damage.problems.append(f"{fault.kind}: {type(problem).__name__}: {problem}")
            (self.damage.counts if done else self.damage.skipped)[fault.kind] += 1

    # ------------------------------------------------------------------------------------------------------- targets

    def _worker(self, fault: Fault) -> psutil.Process | None:
        """One of those that there are; never the oldest, in the calm."""
        workers = self._server.processes("web worker")
        if self._is_calm.is_set() and fault.kind == WORKER_KILL:
            workers = workers[1:]
        return workers[int(fault.target * len(workers))] if workers else None

    def _scheduler(self) -> psutil.Process | None:
        found = self._server.processes("scheduler")
        if len(found) > 1:
            self.damage.problems.append(f"there are {len(found)} schedulers")
        return found[0] if found else None

    # ------------------------------------------------------------------------------------------------------- actions

    def _kill_worker(self, fault: Fault) -> bool:
        worker = self._worker(fault)
        if worker is None or not self._note_doomed(worker):
            return False
        worker.kill()
        return True

    def _note_doomed(self, worker: psutil.Process) -> bool:
        """Stop a worker and note whose connections it holds."""
        worker.suspend()
        if not self._wait(lambda: worker.status() == psutil.STATUS_STOPPED):
            worker.resume()
            return False
        now_s = time.monotonic()
        self.damage.worker_kills.append(now_s)
        for connection in worker.net_connections("tcp"):
            if connection.raddr and connection.laddr.port == self._server.port:
                self.damage.doomed.setdefault(connection.raddr.port, []).append(now_s)
        return True

    def _kill_scheduler(self, times: int) -> bool:
        killed_s = 0.0
        for _ in range(times):
            if not self._wait(lambda: self._server.processes("scheduler")):
                break
            scheduler = self._scheduler()
            if scheduler is None:
                break
            killed_s = time.monotonic()
            scheduler.kill()
            self._wait(lambda scheduler=scheduler: not scheduler.is_running() or is_zombie(scheduler))
        if not killed_s:
            return False
        self._note_gap(killed_s)
        return True

    def _kill_both(self, fault: Fault) -> bool:
        worker, scheduler = self._worker(fault), self._scheduler()
        if worker is None or scheduler is None or not self._note_doomed(worker):
            return False
        killed_s = time.monotonic()
        for process in (worker, scheduler) if fault.length_s < LONGEST_STOP_S / 2 else (scheduler, worker):
            process.kill()
        self._wait(lambda: not scheduler.is_running() or is_zombie(scheduler))
        self._note_gap(killed_s)
        return True

    def _note_gap(self, killed_s: float) -> None:
        """Wait until tokens flow again."""
        before = int(self._engine.gauges["tokens_generated"])
        if self._wait(lambda: int(self._engine.gauges["tokens_generated"]) > before):
            self.damage.gaps_s.append(time.monotonic() - killed_s)
        elif self._engine.gauges["waiting"] or self._engine.gauges["running"]:
            self.damage.problems.append(f"no token in {RECOVERY_LIMIT_S} s after a scheduler's death")

    def _stop_for_a_while(self, process: psutil.Process | None, length_s: float) -> bool:
        if process is None:
            return False
        process.suspend()
        try:
            self._is_over.wait(length_s)
        finally:
            process.resume()
        return True

    def _reload(self) -> bool:
        """HUP, unless workers of an earlier one still end their streams: there are lanes for two generations."""
        if self._more or not self._is_settled():
            return False
        self.damage.retirements.append(time.monotonic())
        self._server.process.send_signal(signal.SIGHUP)
        return True

    def _resize(self) -> bool:
        """One worker more, or that one less."""
        if not self._is_settled():
            return False
        if self._more:
            self.damage.retirements.append(time.monotonic())
        self._server.process.send_signal(signal.SIGTTOU if self._more else signal.SIGTTIN)
        self._more = 0 if self._more else 1
        return True

    def _is_settled(self) -> bool:
        """Whether there are as many workers as there should be, and all of them serve."""
        lanes = self._engine.segment.lanes
        living = lanes["generation"] != lanes["reaped_generation"]
        serving = living & (lanes["serving_generation"] == lanes["generation"])
        return int(living.sum()) == int(serving.sum()) == self._workers + self._more

    def _wait(self, condition: Callable[[], object]) -> bool:
        deadline_s = time.monotonic() + RECOVERY_LIMIT_S
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
        return True


def is_zombie(process: psutil.Process) -> bool:
    """Whether it has ended, and waits for its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True
