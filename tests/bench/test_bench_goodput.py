"""Which requests are good, and how the report says it."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.bench.bounds import LatencyBounds
from ironbatch.bench.figures import figures
from ironbatch.bench.measure import Failure, Measurements
from ironbatch.bench.measured_stream import MeasuredStream
from ironbatch.bench.report import report_lines
from ironbatch.bench.run import RunResult, RunTimes
from ironbatch.bench.stream import ExpectedStreams
from ironbatch.clock import FakeClock
from tests.bench.options import read_options
from tests.bench.server import answers, make_client, serving, stream

MS = 1_000_000


def one_request(bounds: LatencyBounds, arrivals_ms: list[int], tokens: int) -> Measurements:
    """One token at each time, the request being meant for 0."""
    clock, measured = FakeClock(), Measurements(bounds=bounds)
    receiver = MeasuredStream(ExpectedStreams().of(tokens), clock, measured, intended_ns=0)
    for at_ms, line in zip(arrivals_ms, stream(tokens).splitlines(keepends=True), strict=True):
        clock.set_ns(at_ms * MS)
        receiver.receive(line)
    receiver.end()
    receiver.close()
    receiver.succeed()
    return measured


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
    st.none() | st.integers(1, 100),
    st.none() | st.integers(1, 100),
)
def test_good_is_ttft_and_mean_gap_within_the_bounds(gaps: list[int], ttft_ms: int | None, itl_ms: int | None) -> None:
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    measured = one_request(LatencyBounds(ttft_ms, itl_ms), times, len(gaps))
    mean_gap = sum(gaps[1:]) / (len(gaps) - 1) if len(gaps) > 1 else 0
    wanted = (ttft_ms is None or gaps[0] <= ttft_ms) and (itl_ms is None or mean_gap <= itl_ms)
    assert (measured.succeeded, measured.good) == (1, wanted)


def test_request_for_no_tokens_meets_any_bound_on_gaps() -> None:
    assert one_request(LatencyBounds(itl_ms=1), [7], 0).good == 1


def test_request_that_fails_is_not_good() -> None:
    async def scenario() -> Measurements:
        async with serving(answers("503 Service Unavailable", "")) as (url, _), make_client(url) as client:
            client.measurements.bounds = LatencyBounds(ttft_ms=10_000)
            await client.once()
            return client.measurements

    measured = asyncio.run(scenario())
    assert (measured.failed, measured.good) == (1, 0)


def run_figures(measured: Measurements, *argv: str, **more: Any) -> dict[str, Any]:
    times = RunTimes(
        datetime.now(UTC), elapsed_s=13.0, duration_s=10.0, sending_s=8.0, client_cpu_s=more.pop("cpu_s", 1.0)
    )
    result = RunResult(measured, more.pop("warm_up", Measurements()), times, 5.0, 16)
    return figures(result, read_options(*argv), interrupted=False, **more)


OPEN = ("--rate", "5", "--duration", "8", "--percentiles", "50,99.9")


def test_goodput_is_a_rate_and_a_share_of_all_requests() -> None:
    measured = Measurements(bounds=LatencyBounds(200.0, 4.5), succeeded=14, good=12)
    measured.record_failure(Failure("a", "b"), 0)
    measured.record_failure(Failure("a", "b"), 0)
    run = run_figures(measured, *OPEN)
    assert run["goodput"] == {
        "ttft_bound_ms": 200.0, "itl_bound_ms": 4.5, "good": 12, "good_per_s": 1.2, "good_share": 0.75,
    }  # fmt: skip
    text = "\n".join(report_lines(run))
    assert "1.2 (75.00% of requests: TTFT <= 200 ms, mean inter-token latency <= 4.5 ms)" in text
    assert "8.00 s, then 2.00 s until the last answer" in text
    assert run["offered_per_s"] == 2.0
    assert "p99.9" in text


def test_goodput_of_nothing_and_without_bounds() -> None:
    empty = run_figures(Measurements(bounds=LatencyBounds(itl_ms=4)), *OPEN)
    assert (empty["goodput"]["good_per_s"], empty["goodput"]["good_share"]) == (0, None)
    assert any("(- of requests: mean inter-token latency <= 4 ms)" in line for line in report_lines(empty))
    assert run_figures(Measurements(), *OPEN)["goodput"] is None


@pytest.mark.parametrize(
    ("lag_ms", "cpu_s", "argv", "told"),
    [
        (25, 1.0, OPEN, "note: this client sent requests late (by up to 25.0 ms)"),
        (15, 1.0, OPEN, None),
        (0, 12.9, OPEN, "another machine, or at a lower rate"),
        (0, 12.9, (), "another machine, or with less concurrency"),
    ],
)
def test_notes_on_the_clients_own_limits(lag_ms: int, cpu_s: float, argv: tuple[str, ...], told: str | None) -> None:
    measured = Measurements(succeeded=1)
    measured.lag.record(lag_ms * MS)
    notes = [line for line in report_lines(run_figures(measured, *argv, cpu_s=cpu_s)) if line.startswith("note: ")]
    assert len(notes) == (told is not None)
    assert told is None or told in notes[0]


def test_warm_up_and_raised_prompts_are_mentioned() -> None:
    warm_up = Measurements(succeeded=3)
    warm_up.record_failure(Failure("a", "b"), 0)
    run = run_figures(Measurements(succeeded=1), *OPEN, warm_up=warm_up, raised_prompts=2)
    assert run["warm_up"] == {"requests": 4, "failed": 1, "failures": [{"name": "a", "count": 1, "example": "b"}]}
    assert (run["requests"], run["failed"]) == (1, 0)
    text = "\n".join(report_lines(run))
    assert "4 requests of the warm-up, 1 of them failed, are in no figure above" in text
    assert "prompts of 0 tokens in the trace, sent with 1, the least there is: 2" in text
