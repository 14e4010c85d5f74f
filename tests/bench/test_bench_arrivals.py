"""Arrivals: a Poisson process by its own properties, bursts by theirs, and the same for the same seed."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.bench.arrivals import arrivals_ns

COUNT = 20_000


def arrivals(rate: float, burstiness: float = 1.0, seed: int = 0, count: int = COUNT) -> list[int]:
    return list(itertools.islice(arrivals_ns(rate, burstiness, random.Random(seed)), count))


def gaps_s(times_ns: list[int]) -> list[float]:
    return [(later - earlier) / 1e9 for earlier, later in itertools.pairwise([0, *times_ns])]


@given(rate=st.floats(0.001, 100_000), burstiness=st.floats(0.01, 1000), seed=st.integers(0, 2**63))
def test_time_never_goes_back_and_a_seed_repeats_it(rate: float, burstiness: float, seed: int) -> None:
    times = arrivals(rate, burstiness, seed, 50)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times == arrivals(rate, burstiness, seed, 50)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_poisson_gaps_are_exponential(seed: int) -> None:
    gaps = sorted(gaps_s(arrivals(50.0, seed=seed)))
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    # Kolmogorov-Smirnov: the largest distance from the exponential distribution; 1.95 is its 0.1 % critical value.
    distance = max(abs((rank + 1) / COUNT - (1 - math.exp(-50 * gap))) for rank, gap in enumerate(gaps))
    assert distance < 1.95 / math.sqrt(COUNT)


def test_poisson_counts_have_their_mean_as_variance_and_gaps_do_not_depend_on_each_other() -> None:
    times = arrivals(50.0)
    seconds = times[-1] // 1_000_000_000
    counts = [0] * seconds
    for at_ns in times:
        if at_ns // 1_000_000_000 < seconds:
            counts[at_ns // 1_000_000_000] += 1
    assert statistics.mean(counts) == pytest.approx(50, rel=0.03)
    assert statistics.variance(counts) == pytest.approx(50, rel=0.3)
    gaps = gaps_s(times)
    assert abs(statistics.correlation(gaps[:-1], gaps[1:])) < 0.03


@pytest.mark.parametrize("burstiness", [0.25, 4.0, 100.0])
def test_burstiness_is_the_gamma_shape(burstiness: float) -> None:
    gaps = gaps_s(arrivals(20.0, burstiness))
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)
