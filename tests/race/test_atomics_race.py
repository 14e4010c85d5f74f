"""Atomics between processes: with them nothing is lost, and without them it is."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest
from numba import carray

from ironbatch.kernels.atomics import (
    address_to_words,
    compare_and_swap,
    fetch_add,
    full_fence,
    load_acquire,
    store_release,
)
from ironbatch.kernels.jit import inline, kernel
from ironbatch.shm.segment import Segment
from tests.race.processes import LINE_WORDS, Patience, race, scratch_of, shared_segment

pytestmark = pytest.mark.race

PROCESSES = 3
ADDITIONS = 10_000_000
LOCKED_ADDITIONS = 2_000_000
LITMUS_ROUNDS = 150_000
CONTROL_S = 15.0
SPINS = 2_000  # a few microseconds; then whoever waits hands the processor on

# Scratch words, each on a cache line of its own.
COUNTER = 0
LOCK = 1 * LINE_WORDS
ARRIVED = 2 * LINE_WORDS  # one a side
FLAG = 4 * LINE_WORDS  # one a side
SCRATCH_WORDS = 6 * LINE_WORDS


@inline
def scratch(address):
    return carray(address_to_words(address), SCRATCH_WORDS)


@kernel("int64(intp, int64)")
def add_atomically(address, times):
    words = scratch(address)
    for _ in range(times):
        fetch_add(words, COUNTER, 1)
    return times


@kernel("int64(intp, int64)")
def add_unlocked(address, times):
    """The control: load and store are each atomic, the pair is not."""
    words = scratch(address)
    for _ in range(times):
        store_release(words, COUNTER, load_acquire(words, COUNTER) + 1)
    return times


@kernel("int64(intp, int64)")
def add_locked(address, times):
    """Up to `times` plain additions under a lock. Returns how many: fewer when the lock stays taken."""
    words = scratch(address)
    for done in range(times):
        spins = 0
        while compare_and_swap(words, LOCK, 0, 1) != 0:
            spins += 1
            if spins == SPINS:
                return done
        words[COUNTER] += 1
        store_release(words, LOCK, 0)
    return times


def add(function: Any, times: int, segment: Segment) -> None:
    address, left = scratch_of(segment), times
    patience = Patience("for the lock")
    while left:
        left -= function(address, left)
        if left:
            patience.wait()


def sum_of_race(segment: Segment, function: Any, times: int) -> int:
    segment.tokens[:] = 0
    race(segment, [partial(add, function, times)] * PROCESSES)
    return int(segment.tokens.reshape(-1).view(np.int64)[COUNTER])


def test_fetch_add_loses_nothing() -> None:
    with shared_segment() as segment:
        assert sum_of_race(segment, add_atomically, ADDITIONS) == PROCESSES * ADDITIONS


def test_compare_and_swap_and_store_release_are_a_lock() -> None:
    with shared_segment() as segment:
        assert sum_of_race(segment, add_locked, LOCKED_ADDITIONS) == PROCESSES * LOCKED_ADDITIONS


def test_control_without_a_lock_additions_are_lost() -> None:
    with shared_segment() as segment:
        patience = Patience("for a lost addition", CONTROL_S)
        while sum_of_race(segment, add_unlocked, ADDITIONS) == PROCESSES * ADDITIONS:
            patience.wait()


# The store-buffer litmus (Dekker's entry): each side stores its own flag, then reads the other's. If every store were
# visible before the load that follows it, at least one side would see the other.


@inline
def store_and_look(words, side, turn, has_fence):
    store_release(words, FLAG + side * LINE_WORDS, turn)
    if has_fence:
        full_fence()
    return load_acquire(words, FLAG + (1 - side) * LINE_WORDS) == turn


@kernel("int64(intp, int64, int64, int64, uint8[::1])")
def litmus(address, side, first, has_fence, saw):
    """Rounds `first` <= turn < len(saw) with the other side in step. Returns the round it came to.

    saw[turn]: whether this side saw the other's flag of that round. A round begins when both have arrived, and the
    short delay before it, which differs from round to round, lets the two meet in every way.
    """
    words = scratch(address)
    for turn in range(first, len(saw)):
        store_release(words, ARRIVED + side * LINE_WORDS, turn)
        spins = 0
        while load_acquire(words, ARRIVED + (1 - side) * LINE_WORDS) < turn:
            spins += 1
            if spins == SPINS:
                return turn
        for _ in range((turn * (3 + 4 * side)) % 8):
            load_acquire(words, COUNTER)
        saw[turn] = store_and_look(words, side, turn, has_fence != 0)
    store_release(words, ARRIVED + side * LINE_WORDS, len(saw))
    return len(saw)


def play(side: int, has_fence: int, segment: Segment) -> Any:
    saw = np.ones(1 + LITMUS_ROUNDS, np.uint8)
    patience = Patience("for the other side")
    turn = 1  # the flags are 0 before
    while (turn := litmus(scratch_of(segment), side, turn, has_fence, saw)) < len(saw):
        patience.wait()
    return saw


def both_blind(segment: Segment, has_fence: int) -> int:
    """In how many rounds neither side saw the other."""
    segment.tokens[:] = 0
    left, right = race(segment, [partial(play, side, has_fence) for side in (0, 1)])
    return int(np.count_nonzero((left == 0) & (right == 0)))


def test_full_fence_orders_a_store_before_a_load() -> None:
    with shared_segment() as segment:
        assert [both_blind(segment, has_fence=1) for _ in range(3)] == [0, 0, 0]


def test_control_without_a_fence_both_sides_are_blind() -> None:
    patience = Patience("never used to fail", CONTROL_S)
    with shared_segment() as segment:
        while both_blind(segment, has_fence=0) == 0:
            if patience.is_over:
                pytest.skip(
                    f"in {CONTROL_S:.0f} s this machine ({os.cpu_count()} cores) has not let a load pass a store"
                )
