"""The ramp: one run after the other, at the rates that the search names."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ironbatch.bench.load import Unreachable
from ironbatch.bench.options import BenchOptions
from ironbatch.bench.rate_search import RateSearch
from ironbatch.bench.run import Run, RunResult
from ironbatch.bench.workload import Workload
from ironbatch.clock import Clock

LATE_CLIENT_MS: Final = 20.0
"""A client whose 99th percentile of lag is over this has not sent the load that was asked for."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate that was tried. `good_share` is of all requests measured; a run that measured none has 0."""

    result: RunResult
    good_share: float
    client_kept_up: bool
    passed: bool


class Ramp:
    """Tries rates until the highest within the bounds is known.

    `probes` are those that are over, in order. `ended_by` says what has ended it before its time, if anything has: a
    server that cannot be reached any more is no reason to lose what is known.
    """

    def __init__(self, options: BenchOptions, workload: Workload, clock: Clock, tell: Callable[[Probe], None]) -> None:
        assert options.ramp is not None, "flags are checked"
        self.search = RateSearch(options.ramp.low, options.ramp.high)
        self.probes: list[Probe] = []
        self.ended_by: str | None = None
        self.wanted_share = options.ramp_share
        self._options = options
        self._workload = workload
        self._clock = clock
        self._tell = tell

    async def run(self) -> None:
        """Do all probes. Each waits for its last answer, so the next one meets an idle server.

        Raises Unreachable, if the first one cannot reach the server.
        """
        while (rate := self.search.next_rate()) is not None:
            run = Run(self._options, self._workload, self._clock, rate)
            try:
                await run.send_all()
            except Unreachable as problem:
                if not self.probes:
                    raise
                self.ended_by = str(problem)
                return
            probe = judge(run.result(), self.wanted_share)
            self.probes.append(probe)
            self.search.record(rate, passed=probe.passed)
            self._tell(probe)
            await asyncio.sleep(0)  # a signal that came while the line was printed


def judge(result: RunResult, wanted_share: float) -> Probe:
    """Whether a run was within its bounds, and fast enough on the client's side to say so."""
    measured = result.measured
    good_share = measured.good / measured.requests if measured.requests else 0.0
    client_kept_up = not is_late(result)
    return Probe(result, good_share, client_kept_up, passed=good_share >= wanted_share and client_kept_up)


def is_late(result: RunResult) -> bool:
    """Whether the client sent late enough to spoil the figures."""
    lag_ns = result.measured.lag.percentile_ns(99)
    return lag_ns is not None and lag_ns > LATE_CLIENT_MS * 1e6
