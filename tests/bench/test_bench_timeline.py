"""The timeline: nothing is lost when it is coarsened, and it never grows over its bound."""

from hypothesis import given
from hypothesis import strategies as st

from ironbatch.bench.histogram import LatencyHistogram
from ironbatch.bench.timeline import FIRST_WIDTH_NS, MAX_BUCKETS, Timeline

START_NS = 1_000_000_000_000
WEEK_NS = 7 * 24 * 3600 * 1_000_000_000


@given(st.lists(st.tuples(st.integers(0, WEEK_NS), st.integers(0, 10**12)), min_size=1, max_size=30))
def test_coarsening_loses_nothing(events: list[tuple[int, int]]) -> None:
    timeline = Timeline()
    timeline.start_ns = START_NS
    for after_ns, latency_ns in events:
        bucket = timeline.at(START_NS + after_ns)
        bucket.tokens += 1
        bucket.ttft.record(latency_ns)
    assert len(timeline.buckets) <= MAX_BUCKETS
    assert sum(bucket.tokens for bucket in timeline.buckets) == len(events)
    assert sum(bucket.ttft.sum_ns for bucket in timeline.buckets) == sum(latency for _, latency in events)
    last_ns = max(after_ns for after_ns, _ in events)
    assert len(timeline.buckets) * timeline.width_ns > last_ns
    assert timeline.width_ns == FIRST_WIDTH_NS or timeline.width_ns * MAX_BUCKETS <= 4 * last_ns


def test_in_flight_is_the_most_of_each_stretch_and_lasts_where_nothing_happens() -> None:
    timeline = Timeline()
    timeline.started(0)
    timeline.started(FIRST_WIDTH_NS // 2)
    timeline.ended(FIRST_WIDTH_NS - 1)
    timeline.ended(3 * FIRST_WIDTH_NS)
    assert [bucket.in_flight for bucket in timeline.buckets] == [2, 1, 1, 1]
    timeline.at(5 * FIRST_WIDTH_NS)
    assert [bucket.in_flight for bucket in timeline.buckets] == [2, 1, 1, 1, 0, 0]
    timeline.at(MAX_BUCKETS * FIRST_WIDTH_NS)
    assert [bucket.in_flight for bucket in timeline.buckets][:3] == [2, 1, 0]


def test_what_is_stamped_before_the_start_counts_at_the_start() -> None:
    timeline = Timeline()
    timeline.start_ns = START_NS
    assert timeline.at(0) is timeline.at(START_NS)


@given(st.lists(st.integers(0, 2**63 - 1)), st.lists(st.integers(0, 2**63 - 1)), st.sampled_from((5, 11)))
def test_merged_histogram_is_that_of_all(first: list[int], second: list[int], bits: int) -> None:
    one, other, whole = (LatencyHistogram(bits) for _ in range(3))
    for histogram, values in ((one, first), (other, second), (whole, first + second)):
        for value_ns in values:
            histogram.record(value_ns)
    one.merge(other)
    assert vars(one) == vars(whole)


def test_what_is_in_flight_when_buckets_are_merged_stays_so() -> None:
    timeline = Timeline()
    timeline.started(0)
    timeline.started(FIRST_WIDTH_NS)
    timeline.at(MAX_BUCKETS * FIRST_WIDTH_NS)
    assert timeline.width_ns == 2 * FIRST_WIDTH_NS
    assert {bucket.in_flight for bucket in timeline.buckets} == {2}
