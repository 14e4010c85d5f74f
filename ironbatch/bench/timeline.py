"""A run against time, for the plot: buckets of equal width, whose number is bounded however long the run is."""

from typing import Final

from ironbatch.bench.histogram import LatencyHistogram

MAX_BUCKETS: Final = 256
FIRST_WIDTH_NS: Final = 50_000_000
COARSE_BITS: Final = 5
"""Values to one part in 16: a plot shows no more, and a bucket's two histograms take 15 kB instead of 900."""


class Bucket:
    """What happened in one stretch of time. `in_flight` is the most at a time, `in_flight_last` at its end."""

    def __init__(self, in_flight: int) -> None:
        self.ttft = LatencyHistogram(COARSE_BITS)
        self.inter_token = LatencyHistogram(COARSE_BITS)
        self.tokens = 0
        self.failed = 0
        self.in_flight = self.in_flight_last = in_flight

    def merge(self, later: "Bucket") -> None:
        """Add what happened in the bucket after this one."""
        self.ttft.merge(later.ttft)
        self.inter_token.merge(later.inter_token)
        self.tokens += later.tokens
        self.failed += later.failed
        self.in_flight = max(self.in_flight, later.in_flight)
        self.in_flight_last = later.in_flight_last


class Timeline:
    """Buckets of `width_ns` from `start_ns` on. When there are too many, pairs are merged and the width doubles."""

    def __init__(self) -> None:
        self.start_ns = 0
        self.width_ns = FIRST_WIDTH_NS
        self.buckets: list[Bucket] = []
        self._in_flight = 0

    def at(self, now_ns: int) -> Bucket:
        """The bucket of this time, which may lie in the past, but not before the start."""
        index = max(now_ns - self.start_ns, 0) // self.width_ns
        while index >= MAX_BUCKETS:
            self._halve()
            index = max(now_ns - self.start_ns, 0) // self.width_ns
        while len(self.buckets) <= index:
            self.buckets.append(Bucket(self.buckets[-1].in_flight_last if self.buckets else 0))
        return self.buckets[index]

    def started(self, now_ns: int) -> None:
        """A request is sent."""
        self._change_in_flight(now_ns, 1)

    def ended(self, now_ns: int) -> None:
        """A request is over."""
        self._change_in_flight(now_ns, -1)

    def _change_in_flight(self, now_ns: int, change: int) -> None:
        self._in_flight += change
        bucket = self.at(now_ns)
        bucket.in_flight = max(bucket.in_flight, self._in_flight)
        bucket.in_flight_last = self._in_flight

    def _halve(self) -> None:
        if len(self.buckets) % 2:
            self.buckets.append(Bucket(self.buckets[-1].in_flight_last))
        for first, second in zip(self.buckets[::2], self.buckets[1::2], strict=True):
            first.merge(second)
        del self.buckets[1::2]
        self.width_ns *= 2
