"""Requests that wait or run for too long.

The worker's clock decides and not the scheduler's step, so that the time-outs hold when the scheduler or its device
hangs. A request that has none costs nothing.
"""

from __future__ import annotations

import asyncio

from ironbatch.clock import Clock
from ironbatch.errors import RETRY_AFTER_S, RequestRejected
from ironbatch.web.collector import TokenCollector
from ironbatch.web.request import GenerateRequest
from ironbatch.web.stream import TokenStream

QUEUE_TIMEOUT = "queue_timeout"
TIMEOUT = "timeout"
NS_PER_S = 1_000_000_000


class Timeouts:
    """Makes the timers of requests. Times count from a request's arrival.

    Args:
        collector: of this worker.
        queue_timeout_s: after which a request that was never admitted is refused; 0: never.
        clock: where "now" comes from.
    """

    def __init__(self, collector: TokenCollector, queue_timeout_s: int, clock: Clock) -> None:
        self._collector = collector
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock

    def start(self, stream: TokenStream, request: GenerateRequest, arrival_ns: int) -> list[asyncio.TimerHandle]:
        """The timers of a request that was submitted; whoever sees its end cancels them."""
        timers: list[asyncio.TimerHandle] = []
        if request.timeout_s is None and not self._queue_timeout_s:
            return timers
        call_later = asyncio.get_running_loop().call_later
        age_s = (self._clock.now_ns() - arrival_ns) / NS_PER_S
        if request.timeout_s is not None:
            timers.append(call_later(max(request.timeout_s - age_s, 0), self._end_slow, stream, request.timeout_s))
        if self._queue_timeout_s:
            timers.append(call_later(max(self._queue_timeout_s - age_s, 0), self._end_waiting, stream))
        return timers

    def _end_slow(self, stream: TokenStream, timeout_s: float) -> None:
        message = f"the request has not ended within its timeout_s of {timeout_s:g} s; give it more, or leave it out"
        self._end(stream, RequestRejected(TIMEOUT, message, param="timeout_s", status=504))

    def _end_waiting(self, stream: TokenStream) -> None:
        if self._collector.was_admitted(stream):
            return
        message = (
            f"the request has waited for {self._queue_timeout_s} s to be scheduled, as long as it may"
            " (--queue-timeout-s); send it again later"
        )
        self._end(stream, RequestRejected(QUEUE_TIMEOUT, message, status=503, retry_after_s=RETRY_AFTER_S))

    def _end(self, stream: TokenStream, problem: RequestRejected) -> None:
        self._collector.collect()  # what is published already is the client's
        if self._collector.end(stream, problem):
            self._collector.counters["requests_timed_out"] += 1
