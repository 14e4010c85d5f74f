"""The phases of a run: the warm-up, the part that is measured, and its end."""

from typing import Final

from ironbatch.bench.measure import Measurements

NS_PER_S: Final = 1_000_000_000


class Window:
    """Decides by the time a request starts whether it is measured, and whether it is still to be sent.

    A request starts when it is sent (closed loop) or when it is meant to be sent (open loop). Requests of the first
    `warm_up_s` seconds are recorded in `warm_up`, those after it in `measured`, until `duration_s` seconds or
    `total_requests` requests more; None is no such limit.
    """

    def __init__(
        self,
        measured: Measurements,
        *,
        warm_up_s: float = 0.0,
        duration_s: float | None = None,
        total_requests: int | None = None,
    ) -> None:
        self.measured = measured
        self.warm_up = Measurements(timeline=measured.timeline)
        self.start_ns = 0
        self.closed_ns: int | None = None
        self.admitted = 0
        self._warm_up_ns = round(warm_up_s * NS_PER_S)
        self._duration_ns = None if duration_s is None else round(duration_s * NS_PER_S)
        self._total_requests = total_requests

    def open(self, now_ns: int) -> None:
        """The run starts now."""
        self.start_ns = now_ns
        if self.measured.timeline is not None:
            self.measured.timeline.start_ns = now_ns

    def close(self, now_ns: int) -> None:
        """No request is sent any more, though answers may be under way. The first call counts.

        With a client that is late, this is after `end_ns`.
        """
        if self.closed_ns is None:
            self.closed_ns = now_ns

    @property
    def measured_from_ns(self) -> int:
        """When the warm-up is over."""
        return self.start_ns + self._warm_up_ns

    @property
    def end_ns(self) -> int | None:
        """When the last request may start; None if only a number of requests ends the run."""
        return None if self._duration_ns is None else self.measured_from_ns + self._duration_ns

    def admit(self, at_ns: int) -> Measurements | None:
        """Where to record the request that starts at `at_ns`; None: it is not to be sent, the run is over."""
        if at_ns < self.measured_from_ns:
            return self.warm_up
        if self.end_ns is not None and at_ns >= self.end_ns:
            return None
        if self._total_requests is not None and self.admitted >= self._total_requests:
            return None
        self.admitted += 1
        return self.measured
