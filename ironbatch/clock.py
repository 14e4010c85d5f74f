"""Where the time comes from: handed in, so that a test or a simulation owns it."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time that never goes back. Its zero means nothing; only differences do."""

    def now_ns(self) -> int:
        """Nanoseconds since this clock's zero."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC. All processes of one machine share its zero, so stamps may cross the segment."""

    now_ns = staticmethod(time.monotonic_ns)  # read twice a step, so without a call in between


class FakeClock:
    """A clock that stands still until it is told the time."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """The time last set, in nanoseconds."""
        return self._now_ns

    def set_ns(self, now_ns: int) -> None:
        """Jump to `now_ns`, which must not lie in the past."""
        assert now_ns >= self._now_ns, "a monotonic clock does not go back"
        self._now_ns = now_ns

    def advance_ns(self, by_ns: int) -> None:
        """Let `by_ns` nanoseconds pass; not negative."""
        self.set_ns(self._now_ns + by_ns)
