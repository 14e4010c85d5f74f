"""The clocks: both count nanoseconds and never go back."""

import time

import pytest

from ironbatch.clock import Clock, FakeClock, MonotonicClock


def test_monotonic_clock_is_the_machines() -> None:
    clock: Clock = MonotonicClock()
    before_ns, now_ns, after_ns = time.monotonic_ns(), clock.now_ns(), time.monotonic_ns()
    assert before_ns <= now_ns <= after_ns
    stamps = [clock.now_ns() for _ in range(1000)]
    assert stamps == sorted(stamps)


def test_fake_clock_stands_still_until_it_is_told() -> None:
    clock = FakeClock(5)
    source: Clock = clock
    assert [source.now_ns(), source.now_ns()] == [5, 5]
    clock.advance_ns(7)
    assert source.now_ns() == 12
    clock.advance_ns(0)
    clock.set_ns(12)
    assert source.now_ns() == 12
    clock.set_ns(1_000)
    assert source.now_ns() == 1_000
    assert FakeClock().now_ns() == 0


def test_fake_clock_does_not_go_back() -> None:
    clock = FakeClock(5)
    with pytest.raises(AssertionError):
        clock.set_ns(4)
    with pytest.raises(AssertionError):
        clock.advance_ns(-1)
    assert clock.now_ns() == 5
