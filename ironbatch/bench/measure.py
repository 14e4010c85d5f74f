"""What a run measures: latency histograms, counts, and failures by name."""

from dataclasses import dataclass, field
from typing import Final

from ironbatch.bench.bounds import LatencyBounds
from ironbatch.bench.histogram import LatencyHistogram
from ironbatch.bench.timeline import Timeline

MAX_FAILURE_NAMES: Final = 50
OTHER_FAILURES: Final = "other failures"


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

    A request's latencies run from its start: in the closed loop from the send (connecting included), in the open
    loop from the time it was meant to be sent. `lag` is by how much the client itself sent it later than that; it
    is part of the latencies, as the wait in a queue is part of a caller's.

    TTFT runs to the arrival of the first line. Inter-token latency is the time from one token's arrival to the
    next one's: k lines that come together, g nanoseconds after those before, count as k gaps of g / k, neither as
    one gap of g nor as one of g and k - 1 of nothing; those that come together with the first line were not
    waited for, and count as gaps of 0. So the gaps of a stream always add up to the time from its first token to
    its last, however the server or the network groups them.

    Both, and the tokens, count as they arrive, also if the request fails later. End-to-end latency runs to the end
    of the answer, and is that of requests that succeed. `good` are those that succeed within `bounds`.
    """

    bounds: LatencyBounds = field(default_factory=LatencyBounds)
    timeline: Timeline | None = None
    succeeded: int = 0
    good: int = 0
    failed: int = 0
    ended_early: int = 0
    tokens: int = 0
    tokens_of_failed: int = 0
    failures: dict[str, FailureCount] = field(default_factory=dict)
    lag: LatencyHistogram = field(default_factory=LatencyHistogram)
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    inter_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    end_to_end: LatencyHistogram = field(default_factory=LatencyHistogram)

    @property
    def requests(self) -> int:
        """Requests that are over, well or badly."""
        return self.succeeded + self.failed

    def record_failure(self, failure: Failure, at_ns: int) -> None:
        """Count one request that has failed at this time.

        Servers choose some of the names; those beyond MAX_FAILURE_NAMES are counted together.
        """
        self.failed += 1
        name = failure.name
        if name not in self.failures and len(self.failures) >= MAX_FAILURE_NAMES:
            name = OTHER_FAILURES
        self.failures.setdefault(name, FailureCount(0, failure.detail)).count += 1
        if self.timeline is not None:
            self.timeline.at(at_ns).failed += 1
