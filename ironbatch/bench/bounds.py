"""The latency bounds that make a request count as good."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatencyBounds:
    """Bounds in milliseconds; None is no bound.

    A request is good if it succeeds with its TTFT and its mean inter-token latency within both. The mean is over
    one request, from its first token to its last: what DistServe (Zhong et al., OSDI 2024) and vLLM call time per
    output token (TPOT). A request of less than two tokens has no gap, and meets any bound on gaps.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None

    @property
    def are_given(self) -> bool:
        """Whether there is any bound."""
        return self.ttft_ms is not None or self.itl_ms is not None

    def meets(self, ttft_ns: int, mean_gap_ns: float | None) -> bool:
        """Whether a request that succeeded with these latencies is good."""
        if self.ttft_ms is not None and ttft_ns > self.ttft_ms * 1e6:
            return False
        return self.itl_ms is None or mean_gap_ns is None or mean_gap_ns <= self.itl_ms * 1e6
