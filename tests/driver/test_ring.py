"""The ring against a model that only knows which bytes are whose."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ironbatch.driver.ring import ALIGN_BYTES, Ring
from ironbatch.errors import DeviceRefused
from tests.support import machine_settings

SIZE = 16 * ALIGN_BYTES


def lines_of(start: int, size: int) -> range:
    """The cache lines that a piece touches."""
    return range(start // ALIGN_BYTES, -(-(start + size) // ALIGN_BYTES))


class RingMachine(RuleBasedStateMachine):
    """Pieces are reserved, held and released; no two that are in flight share a cache line."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(SIZE)
        self.held: dict[int, range] = {}  # by fence
        self.fence = 0

    def used(self) -> set[int]:
        return {line for lines in self.held.values() for line in lines}

    def has_room(self, size: int) -> bool:
        """Whether there is a free run of so many lines anywhere."""
        count = len(lines_of(0, size))
        used = self.used()
        return any(used.isdisjoint(range(first, first + count)) for first in range(SIZE // ALIGN_BYTES - count + 1))

    @rule(size=st.integers(1, SIZE))
    def reserve_and_hold(self, size: int) -> None:
        self.take(size)

    @rule(lines=st.integers(1, 4), before_end=st.integers(0, 3))
    def reserve_some_lines(self, lines: int, before_end: int) -> None:
        self.take(lines * ALIGN_BYTES - before_end)

    def take(self, size: int) -> None:
        try:
            start = self.ring.reserve(size)
        except DeviceRefused as refused:
            self.check_refusal(size, str(refused))
            return
        assert self.has_room(size)
        assert start % ALIGN_BYTES == 0
        assert start >= 0
        assert start + size <= SIZE
        assert self.used().isdisjoint(lines_of(start, size))
        self.fence += 1
        self.ring.hold(self.fence, start, size)
        self.held[self.fence] = lines_of(start, size)

    def check_refusal(self, size: int, message: str) -> None:
        assert not self.used().isdisjoint(lines_of(0, size)), "there was room at the beginning"
        assert f"{size} of {SIZE} bytes" in message
        assert f"{len(self.held)} batches are in flight" in message

    @rule(size=st.integers(1, SIZE))
    def reserve_only(self, size: int) -> None:
        """A batch that the device refuses leaves no trace."""
        try:
            first = self.ring.reserve(size)
        except DeviceRefused:
            return
        assert self.ring.reserve(size) == first

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        signaled = data.draw(st.integers(min(self.held) - 1, self.fence + 1))
        self.ring.release(signaled)
        self.held = {fence: lines for fence, lines in self.held.items() if fence > signaled}

    @rule()
    def clear(self) -> None:
        self.ring.clear()
        self.held = {}

    @invariant()
    def an_empty_ring_has_room_for_all_of_it(self) -> None:
        if not self.held:
            assert self.ring.reserve(SIZE) == 0


RingMachine.TestCase.settings = machine_settings(max_examples=60, stateful_step_count=40)
TestRing = RingMachine.TestCase


def hold(ring: Ring, fence: int, size: int) -> int:
    start = ring.reserve(size)
    ring.hold(fence, start, size)
    return start


def test_pieces_follow_each_other_and_begin_again_where_one_does_not_fit() -> None:
    ring = Ring(10 * ALIGN_BYTES)
    assert [hold(ring, fence, 3 * ALIGN_BYTES) for fence in (1, 2, 3)] == [0, 192, 384]
    ring.release(2)
    assert hold(ring, 4, 2 * ALIGN_BYTES) == 0  # one line is left at the end, and stays so
    assert hold(ring, 5, 4 * ALIGN_BYTES) == 128
    with pytest.raises(DeviceRefused, match="64 of 640 bytes of the device's ring are not free while 3 batches"):
        hold(ring, 6, ALIGN_BYTES)


def test_a_piece_that_ends_with_the_ring_is_followed_by_its_beginning() -> None:
    ring = Ring(4 * ALIGN_BYTES)
    assert hold(ring, 1, 2 * ALIGN_BYTES) == 0
    assert hold(ring, 2, 2 * ALIGN_BYTES - 1) == 128
    ring.release(1)
    assert hold(ring, 3, 1) == 0


def test_a_whole_ring_is_one_piece() -> None:
    ring = Ring(4 * ALIGN_BYTES)
    for fence in (1, 2, 3):
        assert hold(ring, fence, 4 * ALIGN_BYTES) == 0
        with pytest.raises(DeviceRefused):
            ring.reserve(1)
        ring.release(fence)


def test_what_never_fits_says_what_would() -> None:
    with pytest.raises(DeviceRefused) as caught:
        Ring(4096).reserve(4097)
    assert str(caught.value) == (
        "a batch needs 4097 bytes of the device's ring, which has 4096; use a device with a larger ring (--ring-bytes),"
        " or smaller batches"
    )
