"""A hint through a lane, from a worker to the scheduler: `python perf/lane_hand_off.py`.

Push and drain in one process, for each hint of 256; beside the standard library's queue, which threads share. And from
core to core, half of a ping-pong through two lanes by two processes that spin; beside the same ping-pong through two
bare words.
"""

from __future__ import annotations

import mmap
import queue
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from engine import StepEngine
from second_core import child
from yardsticks import runner

from ironbatch.kernels import lanes
from ironbatch.kernels.atomics import load_acquire, store_release
from ironbatch.kernels.jit import kernel
from ironbatch.kernels.lanes import push_hint
from ironbatch.kernels.shared import HEAD, LANE_WORDS, TAIL, open_shared
from ironbatch.kernels.tables import word_table

HINTS = 256
PING, PONG = 0, 1
SPINS = 1 << 20  # then Python looks for signals
WORDS_APART = 16  # on cache lines of their own


@kernel("int64(intp, int64, int64)")
def lane_round(address, mine, other):
    """Take one hint from lane `other` and push one on lane `mine`. Returns 0 if none came for a long time."""
    shared = open_shared(address)
    row = other * LANE_WORDS
    for _ in range(SPINS):
        head = shared.lanes[row + HEAD]
        if load_acquire(shared.lanes, row + TAIL) != head:
            store_release(shared.lanes, row + HEAD, head + 1)
            push_hint(shared, mine, 0, 1)
            return 1
    return 0


@kernel("int64(intp, int64, int64)")
def word_round(address, mine, other):
    """As `lane_round`, through two counters: PONG makes its equal to PING's plus one, and PING follows."""
    words = word_table(address, 2 * WORDS_APART)
    for _ in range(SPINS):
        is_level = load_acquire(words, other * WORDS_APART) == words[mine * WORDS_APART]
        if is_level == (mine == PONG):
            store_release(words, mine * WORDS_APART, words[mine * WORDS_APART] + 1)
            return 1
    return 0


def time_lane(loops: int) -> float:
    """Seconds to push and drain `loops` times HINTS hints."""
    engine = StepEngine(HINTS)
    out = np.zeros(2 * HINTS, np.int64)
    push, drain, address = lanes.lane_push, lanes.lane_drain, engine.address
    start_s = time.perf_counter()
    for _ in range(loops):
        for slot in range(HINTS):
            push(address, 0, slot, 1)
        drain(address, 0, out, HINTS)
    elapsed_s = time.perf_counter() - start_s
    engine.close()
    return elapsed_s


def time_queue(loops: int) -> float:
    """The same with `queue.SimpleQueue`, which is written in C."""
    hints: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    put, get = hints.put, hints.get_nowait
    start_s = time.perf_counter()
    for _ in range(loops):
        for slot in range(HINTS):
            put((slot, 1))
        for _ in range(HINTS):
            get()
    return time.perf_counter() - start_s


def time_ping_pong(loops: int, rounds: Callable[[int, int], int]) -> float:
    """Seconds of `loops` one-way hand-offs between two processes; `rounds(mine, other)` makes one of each side."""
    with child(lambda: rounds(PONG, PING)):
        start_s = time.perf_counter()
        for _ in range(loops):
            while not rounds(PING, PONG):
                pass
        return (time.perf_counter() - start_s) / 2


def time_lanes_between_cores(loops: int) -> float:
    """Half of a ping-pong through two lanes."""
    engine = StepEngine(HINTS)
    lanes.lane_push(engine.address, PONG, 0, 1)  # so that the first round of this side finds a hint
    elapsed_s = time_ping_pong(loops, partial(lane_round, engine.address))
    engine.close()
    return elapsed_s


def time_words_between_cores(loops: int) -> float:
    """Half of a ping-pong through two words."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        words = np.frombuffer(memory, np.int64)
        words[PONG * WORDS_APART] = 1
        elapsed_s = time_ping_pong(loops, partial(word_round, int(words.ctypes.data)))
        del words
    return elapsed_s


def main() -> None:
    """Run all cases."""
    made = runner(__doc__)
    made.bench_time_func("push_and_drain/lane", time_lane, inner_loops=HINTS)
    made.bench_time_func("push_and_drain/simple_queue", time_queue, inner_loops=HINTS)
    made.bench_time_func("between_cores/lane", time_lanes_between_cores)
    made.bench_time_func("between_cores/bare_words", time_words_between_cores)


if __name__ == "__main__":
    main()
