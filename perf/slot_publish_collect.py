"""Tokens through the slots: `python perf/slot_publish_collect.py`.

`publish` is the end of a step (the commit kernel), `collect` is a worker's look at its slots and the account of what it
has found, both for 256 slots with one new token each. Beside them the same words moved by numpy, without order, checks
or accounts: a copy of 256 words and tokens, and the search for those of 256 that have changed.
"""

from __future__ import annotations

import time

import numpy as np
from engine import LANE, StepEngine
from yardsticks import runner

from ironbatch.kernels.commit import commit
from ironbatch.kernels.intake import drain
from ironbatch.kernels.plan import plan
from ironbatch.kernels.slots import NEWS_WORDS, slots_collect, slots_settle

SLOTS = 256


def time_publish(loops: int) -> float:
    """Seconds of `loops` commits."""
    engine = StepEngine(SLOTS)
    state, shared = engine.scheduler.arena.address, engine.address
    elapsed_s = 0.0
    for step in range(loops):
        if engine.steps_left == 0:
            engine.make_steady()
        drain(state, shared, step)
        plan(state, shared, step)
        start_s = time.perf_counter()
        commit(state, shared)
        elapsed_s += time.perf_counter() - start_s
        engine.steps_left -= 1
    engine.close()
    return elapsed_s


def time_collect(loops: int) -> float:
    """Seconds of `loops` looks, each after a step."""
    engine = StepEngine(SLOTS)
    address = engine.address
    active = np.arange(SLOTS, dtype=np.int32)
    seen, last_ns, news = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.int64), np.zeros(SLOTS * NEWS_WORDS, np.int64)
    elapsed_s = 0.0
    for look in range(loops):
        if engine.steps_left == 0:
            engine.make_steady()
            seen[:] = 0
        engine.scheduler.step()
        engine.steps_left -= 1
        start_s = time.perf_counter()
        count = slots_collect(address, LANE, active, SLOTS, seen, news)
        slots_settle(address, LANE, active, SLOTS, seen, news, count, last_ns, look)
        elapsed_s += time.perf_counter() - start_s
        assert count == SLOTS
        engine.engine.segment.lanes[LANE]["worker_sleeping"] = 0
    engine.close()
    return elapsed_s


class BareWords:
    """256 words and 256 tokens, at the distances of slots and token rows."""

    def __init__(self) -> None:
        self._published = np.zeros((SLOTS, 24), np.int64)[:, 16]
        self._tokens = np.zeros((SLOTS, 4112), np.int32)[:, 16]
        self._new_words, self._new_tokens = np.arange(SLOTS), np.arange(SLOTS, dtype=np.int32)
        self._seen = np.zeros(SLOTS, np.int64)

    def publish(self) -> None:
        """Two copies."""
        self._tokens[:] = self._new_tokens
        self._published[:] = self._new_words

    def collect(self) -> None:
        """One comparison, one search, one copy."""
        news = np.flatnonzero(self._published != self._seen)
        self._published[news].tolist()


def main() -> None:
    """Run all cases."""
    made = runner(__doc__)
    made.bench_time_func("publish/ironbatch", time_publish)
    bare = BareWords()
    made.bench_func("publish/bare_numpy", bare.publish)
    made.bench_time_func("collect/ironbatch", time_collect)
    bare.publish()
    made.bench_func("collect/bare_numpy", bare.collect)


if __name__ == "__main__":
    main()
