"""Durations counted in log-linear buckets: memory that does not grow with the run."""

import math
from collections.abc import Iterator
from typing import Final

SUB_BUCKET_BITS: Final = 11
"""Values below 2**11 are kept exactly, larger ones to one part in 2**10."""

MAX_VALUE_NS: Final = 2**63 - 1


class LatencyHistogram:
    """Counts of durations in nanoseconds, in log-linear buckets (as HdrHistogram has them).

    Its memory does not grow with the run. Values below 2**bits are kept exactly, larger ones to one part in
    2**(bits - 1): by default a percentile is off by at most 0.1 %.
    """

    def __init__(self, bits: int = SUB_BUCKET_BITS) -> None:
        self.count = 0
        self.sum_ns = 0
        self.max_ns = 0
        self.bits = bits
        self._half = 1 << (bits - 1)
        self.counts = [0] * ((65 - bits) * self._half)

    def record(self, value_ns: int, count: int = 1) -> None:
        """Add `count` durations of `value_ns` each."""
        assert 0 <= value_ns <= MAX_VALUE_NS, "a monotonic clock does not go back"
        shift = max(value_ns.bit_length() - self.bits, 0)
        self.counts[shift * self._half + (value_ns >> shift)] += count
        self.count += count
        self.sum_ns += count * value_ns
        self.max_ns = max(self.max_ns, value_ns)

    def merge(self, other: "LatencyHistogram") -> None:
        """Add what `other` has counted, in as many bits."""
        assert self.bits == other.bits, "buckets differ"
        self.count += other.count
        self.sum_ns += other.sum_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        for index, count in enumerate(other.counts):
            if count:
                self.counts[index] += count

    def percentile_ns(self, percent: float) -> float | None:
        """The smallest value that `percent` of all don't exceed (nearest rank); None without values."""
        if self.count == 0:
            return None
        # Rounded first: 99.9 has no exact binary form, and must not reach one rank too far.
        rank = max(math.ceil(round(percent * self.count / 100, 6)), 1)
        for middle_ns, count in self.buckets():
            rank -= count
            if rank <= 0:
                return min(middle_ns, float(self.max_ns))
        raise AssertionError("the buckets hold fewer values than were counted")

    def mean_ns(self) -> float | None:
        """The mean, exactly; None without values."""
        return self.sum_ns / self.count if self.count else None

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield the middle of each bucket that is not empty, and its count, in ascending order."""
        for index, count in enumerate(self.counts):
            if count:
                yield self._middle_ns(index), count

    def _middle_ns(self, index: int) -> float:
        shift = max(index // self._half - 1, 0)
        low = (index - shift * self._half) << shift
        return low + ((1 << shift) - 1) / 2
