"""Waking a sleeping process: `python perf/wake_up.py`.

`one_way` is half of a ping-pong between two processes that sleep: through Ironbatch's doorbells, and through bare
blocking eventfds. `token` is the time from before a step that publishes a token until it is collected in a worker
whose uvloop event loop slept: the median, by the clock that both processes share. `bare_event` is the same with
nothing in between but an eventfd that the event loop watches, and `bare_read` with one that a process blocks on. Before
each wake the waking side spins until the other sleeps; `token_after_pause` is with a pause before that, in which both
go cold.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyperf
import uvloop
from engine import LANE, StepEngine
from second_core import child
from yardsticks import runner

from ironbatch.kernels.slots import NEWS_WORDS, slots_collect, slots_settle
from ironbatch.shm.wakeup import Doorbell

FOREVER_MS = 1 << 30
PAUSE_S = 0.002
"""Between two wakes, as between two steps: what was in the caches has cooled by then."""

ASLEEP_NS = 50_000
"""The waking side spins for so long before each wake, so that it is awake, and the other really sleeps."""

WAKES = 400
"""A value is the median of so many."""

ROUNDS = 15


def time_ping_pong(loops: int, wait: Callable[[int], None], ring: Callable[[int], None], eventfds: list[int]) -> float:
    """Seconds of `loops` one-way wakes."""
    here, there = eventfds

    def answer() -> None:
        wait(there)
        ring(here)

    with child(answer):
        start_s = time.perf_counter()
        for _ in range(loops):
            ring(there)
            wait(here)
        elapsed_s = time.perf_counter() - start_s
    for descriptor in eventfds:
        os.close(descriptor)
    return elapsed_s / 2


def time_doorbells(loops: int) -> float:
    """Ping-pong through two doorbells."""
    bells = [Doorbell.create() for _ in range(2)]
    by_descriptor = {bell.descriptor: bell for bell in bells}
    return time_ping_pong(
        loops,
        lambda descriptor: void(by_descriptor[descriptor].wait(FOREVER_MS)),
        lambda descriptor: by_descriptor[descriptor].ring(),
        list(by_descriptor),
    )


def void(value: object) -> None:
    """Drop a result."""


def time_eventfds(loops: int) -> float:
    """Ping-pong through two eventfds that block."""
    return time_ping_pong(
        loops,
        lambda descriptor: void(os.eventfd_read(descriptor)),
        lambda descriptor: os.eventfd_write(descriptor, 1),
        [os.eventfd(0), os.eventfd(0)],
    )


class Stamps:
    """When the other side has collected, in a word that both see, and an eventfd that says so."""

    def __init__(self) -> None:
        self._words = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64, 1)
        self._answered = os.eventfd(0)

    def stamp(self) -> int:
        """The other side has collected, now. Returns the time, in nanoseconds."""
        now_ns = self._words[0] = time.monotonic_ns()
        os.eventfd_write(self._answered, 1)
        return now_ns

    def median_delay_s(self, wake: Callable[[], object], pause_s: float) -> float:
        """The median, over WAKES wakes, of the seconds from before `wake()` until the stamp."""
        delays_ns = []
        os.eventfd_read(self._answered)  # it is there
        for _ in range(WAKES):
            if pause_s:
                time.sleep(pause_s)
            until_ns = time.monotonic_ns() + ASLEEP_NS
            while (start_ns := time.monotonic_ns()) < until_ns:
                pass
            wake()
            os.eventfd_read(self._answered)
            delays_ns.append(int(self._words[0]) - start_ns)
        os.close(self._answered)
        return statistics.median(delays_ns) / 1e9


def watch(descriptor: int, stamps: Stamps, answer: Callable[[], None]) -> None:
    """Run a uvloop event loop that calls `answer` when the eventfd is written to; stamp once it does."""
    loop = uvloop.new_event_loop()
    loop.add_reader(descriptor, answer)
    loop.call_soon(stamps.stamp)
    loop.run_forever()


def bare_read_s(pause_s: float) -> float:
    """An eventfd on which the other process blocks."""
    descriptor, stamps = os.eventfd(0), Stamps()

    def answer() -> None:
        stamps.stamp()
        os.eventfd_read(descriptor)

    with child(answer):
        delay_s = stamps.median_delay_s(lambda: os.eventfd_write(descriptor, 1), pause_s)
    os.close(descriptor)
    return delay_s


def bare_event_s(pause_s: float) -> float:
    """An eventfd which the other process's event loop watches."""
    descriptor, stamps = os.eventfd(0, os.EFD_NONBLOCK), Stamps()

    def answer() -> None:
        os.eventfd_read(descriptor)
        stamps.stamp()

    with child(lambda: watch(descriptor, stamps, answer)):
        delay_s = stamps.median_delay_s(lambda: os.eventfd_write(descriptor, 1), pause_s)
    os.close(descriptor)
    return delay_s


def token_s(pause_s: float) -> float:
    """From a step of one sequence to its token in the worker."""
    engine = StepEngine(1)
    bell = engine.engine.lane_bells[LANE]
    active, seen = np.zeros(1, np.int32), np.zeros(1, np.int64)
    last_ns, news = np.zeros(1, np.int64), np.zeros(NEWS_WORDS, np.int64)
    stamps = Stamps()

    def answer() -> None:
        bell.silence()
        count = slots_collect(engine.address, LANE, active, 1, seen, news)
        now_ns = stamps.stamp() if count > 0 else 0
        slots_settle(engine.address, LANE, active, 1, seen, news, count, last_ns, now_ns)

    engine.make_steady()
    engine.engine.segment.lanes[LANE]["worker_sleeping"] = 1
    seen[0] = 1
    with child(lambda: watch(bell.descriptor, stamps, answer)):
        delay_s = stamps.median_delay_s(engine.scheduler.step, pause_s)
    engine.close()
    return delay_s


CASES: dict[str, Callable[[float], float]] = {
    "ironbatch": token_s,
    "bare_event": bare_event_s,
    "bare_read": bare_read_s,
}


def token_delays(rounds: int) -> Iterator[pyperf.Benchmark]:
    """All cases in turn, round after round, so that the machine's moods meet all of them alike.

    pyperf would finish one before it begins the next; on a virtual machine a wake may cost twice as much by then.
    """
    delays_s: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, pause_s in (("token", 0.0), ("token_after_pause", PAUSE_S)):
            for side, measure_s in CASES.items():
                delays_s.setdefault(f"{name}/{side}", []).append(measure_s(pause_s))
    for name, values in delays_s.items():
        yield pyperf.Benchmark([pyperf.Run(values, metadata={"name": name, "unit": "second"}, collect_metadata=False)])


def main() -> None:
    """Run all cases."""
    made = runner(__doc__)
    made.bench_time_func("one_way/doorbell", time_doorbells)
    made.bench_time_func("one_way/bare_eventfd", time_eventfds)
    arguments = made.args
    if arguments.worker:
        return
    for benchmark in token_delays(1 if arguments.debug_single_value else ROUNDS):
        print(f"{benchmark.get_name()}: median {benchmark.median() * 1e6:.1f} us", flush=True)
        if arguments.output:
            pyperf.add_runs(arguments.output, benchmark)


if __name__ == "__main__":
    asyncio.set_event_loop(None)
    main()
