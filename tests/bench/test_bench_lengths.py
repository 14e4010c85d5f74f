"""Distributions of lengths: clamped, reproducible, with the mean they say; and what is none."""

import random
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.bench.lengths import read_distribution
from ironbatch.limits import Bound

BOUND = Bound(1, 1_048_576)
SAMPLES = 20_000


def draw(text: str, count: int = SAMPLES, seed: int = 0, bound: Bound = BOUND) -> list[int]:
    distribution, generator = read_distribution(text, bound), random.Random(seed)
    return [distribution.sample(generator) for _ in range(count)]


TEXTS = st.one_of(
    st.builds("{}".format, st.integers(1, 1_048_576)),
    st.builds("uniform:{}:{}".format, st.integers(1, 500), st.integers(500, 1_048_576)),
    st.builds("normal:{}:{}".format, st.integers(1, 1_048_576), st.integers(0, 1_048_576)),
    st.builds("lognormal:{}:{}".format, st.integers(1, 1_048_576), st.integers(0, 10)),
    st.builds("exponential:{}".format, st.integers(1, 1_048_576)),
)


@given(text=TEXTS, seed=st.integers(0, 2**63), low=st.integers(0, 1))
def test_every_draw_lies_in_the_bound_and_a_seed_repeats_it(text: str, seed: int, low: int) -> None:
    bound = Bound(low, 1_048_576)
    lengths = draw(text, 50, seed, bound)
    assert all(length in bound for length in lengths)
    assert lengths == draw(text, 50, seed, bound)


def test_constant_is_constant() -> None:
    assert set(draw("128", 100)) == {128}
    assert read_distribution("128", BOUND).json_value == 128
    assert read_distribution("uniform:1:2", BOUND).json_value == "uniform:1:2"
    assert set(draw("0", 10, bound=Bound(0, 9))) == {0}


def test_means_and_spreads_are_those_asked_for() -> None:
    uniform = draw("uniform:10:30")
    assert (min(uniform), max(uniform)) == (10, 30)
    assert statistics.mean(uniform) == pytest.approx(20, abs=0.2)
    normal = draw("normal:500:50")
    assert statistics.mean(normal) == pytest.approx(500, abs=2)
    assert statistics.stdev(normal) == pytest.approx(50, rel=0.03)
    lognormal = draw("lognormal:400:0.5")
    assert statistics.median(lognormal) == pytest.approx(400, rel=0.03)
    assert statistics.mean(lognormal) == pytest.approx(400 * 2.718281828 ** (0.5**2 / 2), rel=0.03)
    exponential = draw("exponential:300")
    assert statistics.mean(exponential) == pytest.approx(300, rel=0.03)
    assert statistics.stdev(exponential) == pytest.approx(300, rel=0.05)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "0 is not between 1 and 1048576; use 1 or more"),
        ("zipf:3", "'zipf:3' is no distribution; use a number between 1 and 1048576, or one of uniform:LOW:HIGH, "),
        ("constant:3", "is no distribution"),
        ("uniform:3", "does not have the form uniform:LOW:HIGH"),
        ("uniform:3:4:5", "does not have the form uniform:LOW:HIGH"),
        ("uniform:9:3", "has a LOW over its HIGH; use uniform:3:9"),
        ("uniform:1.5:3", "its LOW 1.5 is not a whole number"),
        ("uniform:0:3", "its LOW 0 is not between 1 and 1048576"),
        ("normal:128:-1", "its STDDEV '-1' is not a number"),
        ("normal:nan:1", "its MEAN 'nan' is not a number"),
        ("normal:9999999:1", "its MEAN 9999999 is not between 1 and 1048576"),
        ("lognormal:100:10.5", "its SIGMA 10.5 is not between 0 and 10"),
        ("exponential:0", "its MEAN 0 is not between 1 and 1048576"),
        ("exponential:" + "9" * 5000, "is not a number"),
    ],
)
def test_what_is_no_length_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        read_distribution(text, BOUND)
    assert len(str(caught.value)) < 250


def test_output_may_be_nothing_but_a_mean_of_nothing_is_none() -> None:
    bound = Bound(0, 100)
    assert 0 in draw("uniform:0:3", 100, bound=bound)
    with pytest.raises(ValueError, match="its MEDIAN 0 is not between 1 and 100"):
        read_distribution("lognormal:0:1", bound)
