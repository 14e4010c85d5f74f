"""The search for the highest rate that passes: doubling, then bisection. No clock, no network."""

from typing import Final

RESOLUTION: Final = 0.05
"""The search ends when the lowest rate that failed is at most so much, as a share, over the highest that passed."""


class RateSearch:
    """Says which rate to try next, from what became of those before; all in requests a second.

    It takes for granted that a rate below one that passes would pass as well. A server's noise may say otherwise;
    the search still ends, with a rate that was seen to pass.
    """

    def __init__(self, low: float, high: float, resolution: float = RESOLUTION) -> None:
        assert 0 < low < high, "flags are checked"
        self.low = low
        self.high = high
        self.resolution = resolution
        self.highest_passed: float | None = None
        self.lowest_failed: float | None = None

    def next_rate(self) -> float | None:
        """The rate to try next; None when the search is over."""
        passed, failed = self.highest_passed, self.lowest_failed
        if passed is None:
            return self.low if failed is None else None
        if failed is None:
            return None if passed >= self.high else min(2 * passed, self.high)
        return None if failed <= passed * (1 + self.resolution) else (passed + failed) / 2

    def record(self, rate: float, *, passed: bool) -> None:
        """`rate`, which `next_rate` had named, has passed or failed."""
        if passed:
            self.highest_passed = rate
        else:
            self.lowest_failed = rate
