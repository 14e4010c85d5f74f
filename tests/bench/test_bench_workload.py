"""What is sent, and when: the same for the same options."""

import itertools
from pathlib import Path

import pytest

from ironbatch.bench.workload import Arrival, Shape, Workload
from ironbatch.errors import ConfigError
from tests.bench.options import read_options

MS = 1_000_000
DRAWN = ("--duration", "9", "--prompt-tokens", "uniform:1:1000", "--max-new-tokens", "exponential:64")
TRACE = "arrival_s,prompt_tokens,max_new_tokens\n5,10,1\n5.5,0,2\n7,30,3\n"


def trace_file(folder: Path, content: str = TRACE) -> str:
    path = folder / "trace.csv"
    path.write_text(content)
    return str(path)


def first(*argv: str, rate: float | None, count: int = 50) -> list[Arrival]:
    return list(itertools.islice(Workload(read_options(*argv)).arrivals(rate), count))


def test_same_seed_same_requests_and_another_rate_leaves_the_lengths() -> None:
    one = first(*DRAWN, "--rate", "10", rate=10.0)
    assert one == first(*DRAWN, "--rate", "10", rate=10.0)
    assert one != first(*DRAWN, "--rate", "10", "--seed", "1", rate=10.0)
    faster = first(*DRAWN, "--rate", "20", rate=20.0)
    assert [arrival.shape for arrival in faster] == [arrival.shape for arrival in one]
    assert all(abs(2 * a.at_ns - b.at_ns) <= 2 for a, b in zip(faster, one, strict=True))
    shapes = itertools.islice(Workload(read_options(*DRAWN)).shapes(), 50)
    assert list(shapes) == [arrival.shape for arrival in one]


def test_replay_has_the_traces_times_and_ends_with_it(tmp_path: Path) -> None:
    shapes = [Shape(10, 1), Shape(1, 2), Shape(30, 3)]
    path = trace_file(tmp_path)
    for scale, times in (("1", [0, 500, 2000]), ("4", [0, 125, 500]), ("0.5", [0, 1000, 4000])):
        wanted = [Arrival(at_ms * MS, shape) for at_ms, shape in zip(times, shapes, strict=True)]
        assert first("--trace", path, "--time-scale", scale, rate=None) == wanted


def test_with_a_rate_only_the_lengths_count_and_begin_again(tmp_path: Path) -> None:
    workload = Workload(read_options("--trace", trace_file(tmp_path), "--rate", "5", "--total-requests", "7"))
    workload.check()
    assert workload.raised_prompts == 0
    arrivals = list(itertools.islice(workload.arrivals(5.0), 7))
    assert [arrival.shape.max_new_tokens for arrival in arrivals] == [1, 2, 3, 1, 2, 3, 1]
    assert workload.raised_prompts == 2
    assert [arrival.at_ns for arrival in arrivals] == [
        arrival.at_ns for arrival in first("--rate", "5", "--duration", "1", rate=5.0, count=7)
    ]


@pytest.mark.parametrize(
    ("argv", "is_met"),
    [
        ((), True),
        (("--total-requests", "3"), False),
        (("--total-requests", "3", "--warm-up", "1"), True),
        (("--duration", "3"), True),
        (("--duration", "1.9"), False),
        (("--duration", "1.9", "--warm-up", "0.2"), True),
        (("--duration", "1.9", "--time-scale", "2"), True),
        (("--duration", "1.9", "--rate", "1"), True),
        (("--duration", "1.9", "--ramp", "1:2", "--ttft-bound-ms", "9"), True),
    ],
)
def test_bad_line_is_met_before_the_run_if_the_run_would_meet_it(
    tmp_path: Path, argv: tuple[str, ...], *, is_met: bool
) -> None:
    workload = Workload(read_options("--trace", trace_file(tmp_path, TRACE + "8,bad,1\n"), *argv))
    if is_met:
        with pytest.raises(ConfigError, match="line 5: prompt_tokens 'bad' is not a whole number"):
            workload.check()
    else:
        workload.check()


def test_long_trace_is_not_walked_to_its_end_for_a_short_run(tmp_path: Path) -> None:
    path = trace_file(tmp_path, TRACE + "7,1,1\n" * 2000 + "bad\n")
    Workload(read_options("--trace", path, "--rate", "5", "--duration", "1")).check()
