"""The stream of one answer: checked, timed, and recorded as it arrives."""

from ironbatch.bench.measure import Failure, Measurements
from ironbatch.bench.stream import ExpectedStream, StreamChecker
from ironbatch.clock import Clock


class MeasuredStream:
    """Takes the stream of one answer, from the request's sending on, and records it in `measurements`.

    Latencies run from `intended_ns`, when the request was meant to be sent; without it from now. To be closed when
    the request is over, however it ended.
    """

    def __init__(
        self, expected: ExpectedStream, clock: Clock, measurements: Measurements, *, intended_ns: int | None = None
    ) -> None:
        self._checker = StreamChecker(expected)
        self._clock = clock
        self._measurements = measurements
        self._timeline = measurements.timeline
        sent_ns = clock.now_ns()
        self._start_ns = sent_ns if intended_ns is None else intended_ns
        self._first_ns = self._last_ns = self._end_ns = sent_ns
        if intended_ns is not None:
            measurements.lag.record(sent_ns - intended_ns)
        if self._timeline is not None:
            self._timeline.started(sent_ns)

    @property
    def tokens(self) -> int:
        """Tokens received in order so far."""
        return self._checker.tokens

    def receive(self, data: bytes) -> None:
        """Measure the lines that have come together, as `Measurements` says. Raises StreamFault."""
        arrived_ns = self._clock.now_ns()
        checker, measurements = self._checker, self._measurements
        tokens_before = checker.tokens
        try:
            lines = checker.feed(data)
        finally:  # those before a fault have arrived, too
            tokens = checker.tokens - tokens_before
            measurements.tokens += tokens
        if lines == 0:
            return
        is_first = checker.lines == lines
        if is_first:
            self._first_ns = arrived_ns
            measurements.ttft.record(arrived_ns - self._start_ns)
            gap_ns, gaps = 0, lines - 1
        else:
            gap_ns, gaps = (arrived_ns - self._last_ns) // lines, lines
        measurements.inter_token.record(gap_ns, gaps)
        self._last_ns = arrived_ns
        if self._timeline is not None:
            bucket = self._timeline.at(arrived_ns)
            bucket.tokens += tokens
            bucket.inter_token.record(gap_ns, gaps)
            if is_first:
                self._timeline.at(self._start_ns).ttft.record(arrived_ns - self._start_ns)

    def end(self) -> None:
        """The answer has ended. Raises StreamFault."""
        self._checker.finish()
        self._end_ns = self._clock.now_ns()

    def succeed(self) -> None:
        """Record the request, whose answer has ended well."""
        measurements, checker = self._measurements, self._checker
        measurements.succeeded += 1
        measurements.ended_early += checker.ended_early
        measurements.end_to_end.record(self._end_ns - self._start_ns)
        gaps = checker.lines - 1
        mean_gap_ns = (self._last_ns - self._first_ns) / gaps if gaps else None
        measurements.good += measurements.bounds.meets(self._first_ns - self._start_ns, mean_gap_ns)

    def fail(self, failure: Failure) -> None:
        """Record the request as failed."""
        self._measurements.tokens_of_failed += self._checker.tokens
        self._measurements.record_failure(failure, self._clock.now_ns())

    def close(self) -> None:
        """The request is over, well, badly, or because the run was interrupted."""
        if self._timeline is not None:
            self._timeline.ended(self._clock.now_ns())
