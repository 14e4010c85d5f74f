"""One measured run: its client, its loop, and its times, also when it is interrupted."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from ironbatch.bench.client import GenerateClient
from ironbatch.bench.load import closed_loop
from ironbatch.bench.measure import Measurements
from ironbatch.bench.open_loop import open_loop
from ironbatch.bench.options import BenchOptions
from ironbatch.bench.timeline import Timeline
from ironbatch.bench.window import Window
from ironbatch.bench.workload import Workload
from ironbatch.clock import Clock


@dataclass(frozen=True, slots=True)
class RunTimes:
    """When a run started, and its stretches in seconds.

    `elapsed_s` is all of it. `duration_s` is what is measured: from the end of the warm-up to the last answer;
    during its first `sending_s` requests were sent, after them answers were waited for. `client_cpu_s` is how long
    this process was on a CPU.
    """

    started_at: datetime
    elapsed_s: float
    duration_s: float
    sending_s: float
    client_cpu_s: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to. `rate` is the requests a second it was asked for, None in the closed loop or a replay."""

    measured: Measurements
    warm_up: Measurements
    times: RunTimes
    rate: float | None
    offered: int


class Run:
    """One run at `rate` requests a second; None for the closed loop, or for a trace's own times."""

    def __init__(self, options: BenchOptions, workload: Workload, clock: Clock, rate: float | None) -> None:
        timeline = Timeline() if options.plot is not None and options.ramp is None else None
        self.measured = Measurements(bounds=options.bounds, timeline=timeline)
        self.window = Window(
            self.measured,
            warm_up_s=options.warm_up_s,
            duration_s=options.duration_s,
            total_requests=options.total_requests,
        )
        self._options = options
        self._workload = workload
        self._clock = clock
        self._rate = rate
        self._start_clocks()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return (self._clock.now_ns() - self._started_ns) / 1e9

    async def send_all(self) -> None:
        """Send the load and wait for its answers; `result` is valid after it, also if it is cancelled.

        Raises Unreachable.
        """
        options = self._options
        self._start_clocks()
        try:
            async with GenerateClient(options.url, self._clock, timeout_s=options.timeout_s) as client:
                await self._send_with(client)
                self._stop_clocks()  # before connections are closed
        except BaseException:
            self._stop_clocks()
            raise

    async def _send_with(self, client: GenerateClient) -> None:
        options, workload, window, clock = self._options, self._workload, self.window, self._clock
        if options.is_open_loop:
            arrivals = workload.arrivals(self._rate)
            await open_loop(client, arrivals, window, clock, most_in_flight=options.concurrency)
        else:
            await closed_loop(client, workload.shapes(), window, clock, concurrency=options.concurrency)

    def _start_clocks(self) -> None:
        self._started_at = datetime.now(UTC)
        self._started_ns = self._ended_ns = self._clock.now_ns()
        self._started_cpu_ns = self._ended_cpu_ns = time.process_time_ns()
        self.window.open(self._started_ns)  # the loop says it again, later by what the client's start takes

    def _stop_clocks(self) -> None:
        self._ended_ns, self._ended_cpu_ns = self._clock.now_ns(), time.process_time_ns()
        self.window.close(self._ended_ns)

    def result(self) -> RunResult:
        """What the run came to."""
        window, ended_ns = self.window, self._ended_ns
        sent_until_ns = ended_ns if window.closed_ns is None else window.closed_ns
        times = RunTimes(
            started_at=self._started_at,
            elapsed_s=(ended_ns - self._started_ns) / 1e9,
            duration_s=max(ended_ns - window.measured_from_ns, 0) / 1e9,
            sending_s=max(sent_until_ns - window.measured_from_ns, 0) / 1e9,
            client_cpu_s=(self._ended_cpu_ns - self._started_cpu_ns) / 1e9,
        )
        return RunResult(self.measured, window.warm_up, times, self._rate, window.admitted)
