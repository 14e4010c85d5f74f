"""Sleeping flags and doorbells between processes: no wake is lost, unless a fence or the order is taken away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ironbatch.kernels.arena import Geometry, StateArena
from ironbatch.shm.segment import Segment
from ironbatch.shm.wakeup import Doorbell
from tests.race import wakeups
from tests.race.processes import DEADLINE_S, Patience, race, scratch_of, shared_segment
from tests.race.wakeups import DONE, LOOKS_FIRST, REAL, RING, UNFENCED

pytestmark = pytest.mark.race

ROUNDS = 20_000  # a race
RACES = 10
BUDGET_S = 10.0
"""After so long no further race begins: beside busy processes a round takes not 15 us but hundreds."""

CONTROL_S = 10.0
CONTROL_LOOK_MS = 20

Step = Callable[[], int]
"""One side's kernel: it answers DONE, RING, SLEEP or WAIT."""


@dataclass
class Way:
    """How each side behaves."""

    sleeper: int = REAL
    ringer: int = REAL

    @property
    def is_real(self) -> bool:
        return (self.sleeper, self.ringer) == (REAL, REAL)


def words_of(segment: Segment) -> NDArray[np.int64]:
    """The scratch memory of `wakeups`."""
    return segment.tokens.reshape(-1).view(np.int64)[: wakeups.SCRATCH_WORDS]


def scheduler_that_sleeps(way: Way, segment: Segment) -> Step:
    out = np.zeros(2, np.int64)
    return partial(wakeups.take_hints, segment.address, scratch_of(segment), way.sleeper, ROUNDS, out)


def worker_that_rings(way: Way, segment: Segment) -> Step:
    progress = np.zeros(2, np.int64)
    return partial(wakeups.push_hints, segment.address, scratch_of(segment), way.ringer, ROUNDS, progress)


def worker_that_sleeps(way: Way, segment: Segment) -> Step:
    num_slots = int(segment.header["num_slots"])
    active = np.array([wakeups.SLOT], np.int32)
    seen, news = np.zeros(num_slots, np.int64), np.zeros(8 * num_slots, np.int64)
    ours = (segment.address, scratch_of(segment), way.sleeper, ROUNDS)
    return partial(wakeups.collect_news, *ours, active, seen, news)


def scheduler_that_rings(way: Way, segment: Segment) -> Step:
    # The arena belongs to the step: its address alone does not keep it alive.
    arena = StateArena(Geometry(8, int(segment.header["num_lanes"]), 8, 4, 64, 8, 16))
    progress = np.zeros(2, np.int64)
    ours = (segment.address, scratch_of(segment), arena.address, way.ringer, ROUNDS, progress)
    return lambda: int(wakeups.publish_news(*ours)) if arena else DONE


@dataclass
class Pair:
    """Who sleeps and who rings, and the sleeper's flag."""

    sleeper: Callable[[Way, Segment], Step]
    ringer: Callable[[Way, Segment], Step]
    is_flagged: Callable[[Segment], Any]


PAIRS = {
    "the scheduler sleeps": Pair(
        scheduler_that_sleeps, worker_that_rings, lambda segment: segment.header["scheduler_sleeping"]
    ),
    "a worker sleeps": Pair(
        worker_that_sleeps, scheduler_that_rings, lambda segment: segment.lanes[wakeups.LANE]["worker_sleeping"]
    ),
}


def ring(pair: Pair, way: Way, bell: Doorbell, segment: Segment) -> int:
    """The side that publishes, until all is seen or a wake is lost. Returns how often it rang."""
    step, words, rings = pair.ringer(way, segment), words_of(segment), 0
    patience = Patience("for the sleeper")
    while (answer := step()) != DONE and not words[wakeups.STOPPED]:
        if answer == RING:
            bell.ring()
            rings += 1
        else:
            patience.wait()
    return rings


def sleep(pair: Pair, way: Way, bell: Doorbell, segment: Segment) -> int:
    """The side that sleeps, until it has seen all. Nothing but the bell ever wakes it. Returns how often it slept."""
    step, sleeps = pair.sleeper(way, segment), 0
    while step() != DONE:
        sleeps += 1
        assert bell.wait(int(DEADLINE_S * 1000)), f"nobody has rung in sleep {sleeps}"
    return sleeps


def sleep_control(pair: Pair, way: Way, bell: Doorbell, segment: Segment) -> bool:
    """As `sleep`, until a wake is lost for good. Returns whether one was."""
    step, words = pair.sleeper(way, segment), words_of(segment)
    patience = Patience("for the bell")
    while step() != DONE:
        while not bell.wait(CONTROL_LOOK_MS):
            patience.wait()
            # The ringer has news that we have not seen, and knows that it need not ring, while our flag stands.
            if words[wakeups.DECIDED] > words[wakeups.SEEN] and pair.is_flagged(segment):
                words[wakeups.STOPPED] = 1
                return True
    return False


def run(pair: Pair, way: Way) -> list[Any]:
    """Race the two sides on a new segment. Returns the sleeper's and the ringer's result."""
    sleeper = sleep if way.is_real else sleep_control
    with shared_segment() as segment, contextlib.closing(Doorbell.create()) as bell:
        segment.slots[wakeups.SLOT]["generation"] = wakeups.GENERATION
        return race(segment, [partial(sleeper, pair, way, bell), partial(ring, pair, way, bell)])


@pytest.mark.parametrize("who", PAIRS)
def test_no_wake_is_lost(who: str) -> None:
    patience = Patience("for all races", BUDGET_S)
    races = sleeps = 0
    while races < RACES and not patience.is_over:
        slept, rung = run(PAIRS[who], Way())
        assert rung >= slept
        races += 1
        sleeps += slept
    print(f"{races * ROUNDS} rounds, {sleeps} sleeps")
    assert sleeps > races * ROUNDS // 100  # or little was tested


@pytest.mark.parametrize("who", PAIRS)
def test_control_who_looks_before_saying_that_it_sleeps_loses_wakes(who: str) -> None:
    patience = Patience("for a lost wake", CONTROL_S)
    while not run(PAIRS[who], Way(sleeper=LOOKS_FIRST))[0]:
        patience.wait()


@pytest.mark.parametrize("side", ["sleeper", "ringer"])
@pytest.mark.parametrize("who", PAIRS)
def test_control_without_a_fence_wakes_are_lost(who: str, side: str) -> None:
    patience = Patience("never used to fail", CONTROL_S)
    way = Way(**{side: UNFENCED})
    while not run(PAIRS[who], way)[0]:
        if patience.is_over:
            pytest.skip(f"in {CONTROL_S:.0f} s this machine ({os.cpu_count()} cores) has not let a load pass a store")
