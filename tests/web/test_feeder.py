"""Turns of the loop, shared by connections with much to parse."""

from __future__ import annotations

import pytest

from ironbatch.clock import FakeClock
from ironbatch.web.feeder import BUDGET_NS, Feeder


class FakeLoop:
    """Runs what is due when told to."""

    def __init__(self) -> None:
        self.due: list[object] = []

    def call_soon(self, function: object) -> None:
        self.due.append(function)

    def turn(self) -> None:
        due, self.due = self.due, []
        assert len(due) == 1
        due[0]()  # type: ignore[operator]


class Fed:
    """Costs `cost_ns` a slice, of which it has `slices`."""

    def __init__(self, clock: FakeClock, cost_ns: int, slices: int) -> None:
        self._clock, self._cost_ns, self.left, self.parse_ns = clock, cost_ns, slices, 0

    def feed_slice(self) -> bool:
        self._clock.advance_ns(self._cost_ns)
        self.left -= 1
        return self.left > 0


def test_the_dear_share_the_budget_of_a_turn() -> None:
    clock, loop = FakeClock(), FakeLoop()
    feeder = Feeder(loop, clock)  # type: ignore[arg-type]
    dear = [Fed(clock, BUDGET_NS // 2, 3) for _ in range(4)]
    for one in dear:
        feeder.add(one)
    for expected in ([2, 2, 3, 3], [2, 2, 2, 2], [1, 1, 2, 2], [1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]):
        before_ns = clock.now_ns()
        loop.turn()
        assert [one.left for one in dear] == expected
        assert clock.now_ns() - before_ns == BUDGET_NS
    assert loop.due == []


def test_who_has_cost_little_does_not_wait_for_who_has_cost_much() -> None:
    clock, loop = FakeClock(), FakeLoop()
    feeder = Feeder(loop, clock)  # type: ignore[arg-type]
    dear = [Fed(clock, BUDGET_NS // 2, 1000) for _ in range(100)]
    for one in dear:
        feeder.add(one)
    for _ in range(50):
        loop.turn()
    assert {one.left for one in dear} == {999}
    cheap = Fed(clock, 10, 60)
    feeder.add(cheap)
    loop.turn()
    assert cheap.left == 0
    assert cheap.parse_ns == 600


def test_the_cheap_are_fed_in_one_turn_and_may_come_again() -> None:
    clock, loop = FakeClock(), FakeLoop()
    feeder = Feeder(loop, clock)  # type: ignore[arg-type]
    for _ in range(2):
        cheap = Fed(clock, 10, 1000)
        feeder.add(cheap)
        loop.turn()
        assert cheap.left == 0
        assert loop.due == []


def test_a_fault_of_one_does_not_hold_up_the_others() -> None:
    class Faulty:
        parse_ns = 0

        def feed_slice(self) -> bool:
            raise ZeroDivisionError

    clock, loop = FakeClock(), FakeLoop()
    feeder = Feeder(loop, clock)  # type: ignore[arg-type]
    sound = Fed(clock, 10, 3)
    feeder.add(Faulty())
    feeder.add(sound)
    with pytest.raises(ZeroDivisionError):
        loop.turn()
    loop.turn()
    assert sound.left == 0
