"""Lanes between processes: four producers, one consumer, nothing lost, doubled or reordered."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from ironbatch.kernels.jit import inline, kernel
from ironbatch.kernels.lanes import lane_drain, push_hint
from ironbatch.kernels.shared import open_shared
from ironbatch.shm.segment import Segment
from tests.race.processes import Patience, race, shared_segment

pytestmark = pytest.mark.race

PRODUCERS = 4
MESSAGES = 10_000_000
CONTROL_MESSAGES = 200_000  # a producer and round
CONTROL_S = 15.0
SPINS = 500  # looks at a full lane, before its producer hands the processor on

# So many slots that a lane has 64 entries, or 2048: the first wraps around at every turn, the second flows.
SIZES = {64: {"max_running_seqs": 8, "max_queued_requests": 8}, 2048: {"max_queued_requests": 504}}

SOUND = -1
NUMBER_STRIDE = 8  # of a message's first word: number * 8 + producer


@inline
def second_word(producer, number):
    """Differs from the first in all its bits, so that halves of two messages don't pass for one."""
    return ~(number * 0x9E3779B1 + producer)


@kernel("int64(intp, int64, int64, int64, int64)")
def push_from(address, lane, producer, first, end):
    """Push the producer's messages `first` <= number < `end`. Returns the next: fewer while the lane stays full."""
    shared = open_shared(address)
    for number in range(first, end):
        spins = 0
        while push_hint(shared, lane, number * NUMBER_STRIDE + producer, second_word(producer, number)) < 0:
            spins += 1
            if spins == SPINS:
                return number
    return end


@kernel("int64(int64[::1], int64, int64[::1])")
def first_wrong(out, count, expected):
    """Check `count` messages, and count them in `expected`, each producer's next number. Returns the first wrong."""
    for k in range(count):
        producer = out[2 * k] % NUMBER_STRIDE
        number = out[2 * k] // NUMBER_STRIDE
        if producer < 0 or producer >= len(expected) or number != expected[producer]:
            return k
        if out[2 * k + 1] != second_word(producer, number):
            return k
        expected[producer] = number + 1
    return SOUND


def produce(lane: int, producer: int, messages: int, segment: Segment) -> None:
    patience = Patience("for room in the lane")
    number = 0
    while (number := push_from(segment.address, lane, producer, number, messages)) < messages:
        patience.wait()


def consume(messages: int, segment: Segment) -> tuple[str, int]:
    """Take `messages` of each lane. Returns what was wrong, if anything, and how many kernel calls it took."""
    capacity = int(segment.header["lane_entries"])
    out = np.zeros(2 * capacity, np.int64)
    expected = np.zeros(PRODUCERS, np.int64)
    patience = Patience("for messages")
    calls = 0
    while expected.min() < messages:
        news = 0
        for lane in range(PRODUCERS):
            count = lane_drain(segment.address, lane, out, capacity)
            calls += 1
            news += count
            wrong = first_wrong(out, count, expected)
            if wrong != SOUND:
                return described(lane, out, wrong, expected), calls
        if news == 0:
            patience.wait()
    left_over = sum(lane_drain(segment.address, lane, out, capacity) for lane in range(PRODUCERS))
    return f"{left_over} messages too many" if left_over else "", calls


def described(lane: int, out: NDArray[np.int64], wrong: int, expected: NDArray[np.int64]) -> str:
    words = out[2 * wrong : 2 * wrong + 2].tolist()
    return f"lane {lane} gave {words}, when the producers' next numbers were {expected.tolist()}"


@pytest.mark.parametrize("entries", SIZES)
def test_nothing_is_lost_doubled_or_reordered(entries: int) -> None:
    messages = MESSAGES // PRODUCERS
    with shared_segment(**SIZES[entries]) as segment:
        assert segment.header["lane_entries"] == entries
        producers = [partial(produce, lane, lane, messages) for lane in range(PRODUCERS)]
        (wrong, calls), *_ = race(segment, [partial(consume, messages), *producers])
        print(f"{PRODUCERS * messages} messages in {calls} drains")
        assert wrong == ""
        assert segment.lanes["head"][:PRODUCERS].tolist() == [messages] * PRODUCERS
        assert segment.lanes["tail"][:PRODUCERS].tolist() == [messages] * PRODUCERS


# The control: two producers on one lane, where both may take the same entry, and either may set the tail back.
# Scratch words in the token table: which producers are done, and whether something was wrong.
DONE = 0
STOP = 2


def produce_control(producer: int, segment: Segment) -> None:
    patience = Patience("for room in the lane")
    scratch, number = segment.tokens[0], 0
    while not scratch[STOP] and number < CONTROL_MESSAGES:
        number = push_from(segment.address, 0, producer, number, CONTROL_MESSAGES)
        patience.wait()
    scratch[DONE + producer] = 1


def consume_control(segment: Segment) -> bool:
    """Take what lane 0 gives until something is wrong, or all has come. Returns whether something was."""
    capacity = int(segment.header["lane_entries"])
    out = np.zeros(2 * capacity, np.int64)
    expected = np.zeros(2, np.int64)
    scratch = segment.tokens[0]
    patience = Patience("for messages")
    is_wrong = are_done = False
    count = 0
    while not is_wrong and not (are_done and count == 0):
        are_done = bool(scratch[DONE : DONE + 2].all())
        count = lane_drain(segment.address, 0, out, capacity)
        is_wrong = count < 0 or first_wrong(out, count, expected) != SOUND
        patience.wait()
    scratch[STOP] = 1
    return is_wrong or expected.min() < CONTROL_MESSAGES


def test_control_two_producers_on_one_lane_lose_or_double_messages() -> None:
    patience = Patience("for a message that is lost or doubled", CONTROL_S)
    is_wrong = False
    while not is_wrong:
        with shared_segment(**SIZES[64]) as segment:
            is_wrong, *_ = race(segment, [consume_control, *(partial(produce_control, k) for k in (0, 1))])
        patience.wait()
