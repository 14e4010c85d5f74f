"""What a run measures: latency histograms of fixed size, counts, and failures by name."""

import math
from dataclasses import dataclass, field
from typing import Final

SUB_BUCKET_BITS: Final = 11
"""Values below 2**11 are kept exactly, larger ones to one part in 2**10."""

MAX_VALUE_NS: Final = 2**63 - 1
MAX_FAILURE_NAMES: Final = 50
OTHER_FAILURES: Final = "other failures"

_HALF: Final = 1 << (SUB_BUCKET_BITS - 1)
_BUCKETS: Final = (64 - SUB_BUCKET_BITS) * _HALF + _HALF


class LatencyHistogram:
    """Counts of durations in nanoseconds, in log-linear buckets (as HdrHistogram has them).

    Its memory does not grow with the run; a percentile is off by at most 0.1 %.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sum_ns = 0
        self.max_ns = 0
        self._counts = [0] * _BUCKETS

    def record(self, value_ns: int, count: int = 1) -> None:
        """Add `count` durations of `value_ns` each."""
        assert 0 <= value_ns <= MAX_VALUE_NS, "a monotonic clock does not go back"
        shift = max(value_ns.bit_length() - SUB_BUCKET_BITS, 0)
        self._counts[shift * _HALF + (value_ns >> shift)] += count
        self.count += count
        self.sum_ns += count * value_ns
        self.max_ns = max(self.max_ns, value_ns)

    def percentile_ns(self, percent: float) -> float | None:
        """The smallest value that `percent` of all don't exceed (nearest rank); None without values."""
        if self.count == 0:
            return None
        rank = max(math.ceil(percent * self.count / 100), 1)
        for index, count in enumerate(self._counts):
            rank -= count
            if rank <= 0:
                return min(_bucket_middle_ns(index), float(self.max_ns))
        raise AssertionError("the buckets hold fewer values than were counted")

    def mean_ns(self) -> float | None:
        """The mean, exactly; None without values."""
        return self.sum_ns / self.count if self.count else None


def _bucket_middle_ns(index: int) -> float:
    shift = max(index // _HALF - 1, 0)
    low = (index - shift * _HALF) << shift
    return low + ((1 << shift) - 1) / 2


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one request failed. Failures are counted by `name`; `detail` tells of this one.

    `unreachable` says that no connection came about, neither for this request nor for any that was over before.
    """

    name: str
    detail: str
    unreachable: bool = False


@dataclass(slots=True)
class FailureCount:
    """How many failures share a name, and the detail of the first."""

    count: int
    example: str


@dataclass(slots=True)
class Measurements:
    """What the requests of one run came to.

    TTFT runs from the send (connecting included) to the arrival of the first line. Inter-token latency is the
    time from one token's arrival to the next one's: k lines that come together, g nanoseconds after those before,
    count as k gaps of g / k, neither as one gap of g nor as one of g and k - 1 of nothing; those that come
    together with the first line were not waited for, and count as gaps of 0. So the gaps of a stream always add
    up to the time from its first token to its last, however the server or the network groups them.

    Both, and the tokens, count as they arrive, also if the request fails later. End-to-end latency runs from the
    send to the end of the answer, and is that of requests that succeed.
    """

    succeeded: int = 0
    failed: int = 0
    ended_early: int = 0
    tokens: int = 0
    tokens_of_failed: int = 0
    failures: dict[str, FailureCount] = field(default_factory=dict)
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    inter_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    end_to_end: LatencyHistogram = field(default_factory=LatencyHistogram)

    @property
    def requests(self) -> int:
        """Requests that are over, well or badly."""
        return self.succeeded + self.failed

    def record_failure(self, failure: Failure) -> None:
        """Count one failed request.

        Servers choose some of the names; those beyond MAX_FAILURE_NAMES are counted together.
        """
        self.failed += 1
        name = failure.name
        if name not in self.failures and len(self.failures) >= MAX_FAILURE_NAMES:
            name = OTHER_FAILURES
        self.failures.setdefault(name, FailureCount(0, failure.detail)).count += 1
