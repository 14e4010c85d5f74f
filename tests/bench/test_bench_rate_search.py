"""The search against servers of known capacity, and the verdict on one probe."""

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.bench.bounds import LatencyBounds
from ironbatch.bench.measure import Failure, Measurements
from ironbatch.bench.ramp import judge
from ironbatch.bench.rate_search import RESOLUTION, RateSearch
from ironbatch.bench.run import RunResult, RunTimes

RATES = st.floats(0.001, 100_000)


def search(low: float, high: float, capacity: float) -> tuple[RateSearch, list[float]]:
    """Search on a server that keeps its bounds up to `capacity`."""
    searching, tried = RateSearch(low, high), []
    while (rate := searching.next_rate()) is not None:
        tried.append(rate)
        searching.record(rate, passed=rate <= capacity)
        assert len(tried) < 100
    return searching, tried


@given(low=RATES, ratio=st.floats(1.001, 1e6), capacity=RATES)
def test_capacity_is_found_to_the_resolution(low: float, ratio: float, capacity: float) -> None:
    high = low * ratio
    found, tried = search(low, high, capacity)
    assert all(low <= rate <= high for rate in tried)
    assert len(tried) == len(set(tried))
    assert len(tried) <= 2 + math.ceil(math.log2(ratio)) + math.ceil(math.log2(1 / RESOLUTION)) + 1
    if capacity < low:
        assert (found.highest_passed, tried) == (None, [low])
    elif capacity >= high:
        assert (found.highest_passed, found.lowest_failed) == (high, None)
    else:
        assert found.highest_passed is not None
        assert found.lowest_failed is not None
        assert found.highest_passed <= capacity < found.lowest_failed
        assert found.lowest_failed <= found.highest_passed * (1 + RESOLUTION)


@given(low=RATES, ratio=st.floats(1.001, 1e6), verdicts=st.lists(st.booleans(), min_size=100, max_size=100))
def test_noise_never_keeps_it_from_ending(low: float, ratio: float, verdicts: list[bool]) -> None:
    searching, passed = RateSearch(low, low * ratio), []
    for verdict in verdicts:
        rate = searching.next_rate()
        if rate is None:
            break
        passed += [rate] * verdict
        searching.record(rate, passed=verdict)
    assert searching.next_rate() is None
    assert searching.highest_passed == max(passed, default=None)


def test_order_of_the_tries() -> None:
    assert search(10, 100, 55)[1] == [10, 20, 40, 80, 60, 50, 55, 57.5]


@pytest.mark.parametrize(
    ("good", "requests", "lag_ms", "passed"),
    [(99, 100, 1, True), (98, 100, 1, False), (100, 100, 21, False), (0, 0, 0, False)],
)
def test_probe_passes_with_enough_good_requests_and_a_client_in_time(
    good: int, requests: int, lag_ms: int, *, passed: bool
) -> None:
    measured = Measurements(bounds=LatencyBounds(ttft_ms=5), good=good, succeeded=good)
    for _ in range(requests - good):
        measured.record_failure(Failure("some", "detail"), 0)
    measured.lag.record(lag_ms * 1_000_000, requests)
    times = RunTimes(datetime.now(UTC), 1.0, 1.0, 1.0, 0.1)
    probe = judge(RunResult(measured, Measurements(), times, 10.0, requests), 0.99)
    assert probe.passed is passed
    assert probe.client_kept_up is (lag_ms <= 20)
