"""Histograms against exact percentiles; flags and their messages; the JSON file; the report's lines."""

import json
import math
import os
import resource
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.bench.figures import figures
from ironbatch.bench.histogram import MAX_VALUE_NS, LatencyHistogram
from ironbatch.bench.measure import (
    MAX_FAILURE_NAMES,
    OTHER_FAILURES,
    Failure,
    Measurements,
)
from ironbatch.bench.options import FLAGS
from ironbatch.bench.report import report_lines
from ironbatch.bench.run import RunResult, RunTimes
from ironbatch.bench.runner import reserve_file_descriptors
from ironbatch.bench.whole_file import WholeFile
from ironbatch.errors import ConfigError
from tests.bench.options import read_options

STARTED_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def result(measured: Measurements, *, duration_s: float = 2.0, client_cpu_s: float = 0.1) -> RunResult:
    times = RunTimes(STARTED_AT, duration_s, duration_s, duration_s, client_cpu_s)
    return RunResult(measured, Measurements(), times, None, measured.requests)


@given(
    st.lists(st.tuples(st.integers(0, MAX_VALUE_NS), st.integers(1, 5)), min_size=1, max_size=50),
    st.sampled_from((0.0, 1.0, 50.0, 90.0, 99.0, 100.0)),
)
def test_percentile_is_the_nearest_rank_to_a_thousandth(values: list[tuple[int, int]], percent: float) -> None:
    histogram = LatencyHistogram()
    for value_ns, count in values:
        histogram.record(value_ns, count)
    every = sorted(value_ns for value_ns, count in values for _ in range(count))
    exact = every[max(math.ceil(percent * len(every) / 100), 1) - 1]
    measured = histogram.percentile_ns(percent)
    assert measured is not None
    assert abs(measured - exact) <= exact / 1000
    assert measured == exact or exact >= 2048
    assert (histogram.count, histogram.sum_ns, histogram.max_ns) == (len(every), sum(every), every[-1])


def test_empty_histogram_has_no_percentiles() -> None:
    histogram = LatencyHistogram()
    histogram.record(5, 0)
    assert histogram.percentile_ns(50) is None
    assert histogram.mean_ns() is None


def test_failure_names_are_bounded() -> None:
    measurements = Measurements()
    for index in range(MAX_FAILURE_NAMES + 7):
        measurements.record_failure(Failure(f"name {index}", "detail"), 0)
    assert len(measurements.failures) == MAX_FAILURE_NAMES + 1
    assert measurements.failures[OTHER_FAILURES].count == 7
    assert measurements.failed == MAX_FAILURE_NAMES + 7


def test_defaults() -> None:
    options = read_options()
    assert (options.url, options.timeout_s, options.is_open_loop) == ("http://127.0.0.1:8080", 60.0, False)
    assert (options.concurrency, options.total_requests, options.duration_s) == (128, 2000, None)
    assert (options.prompt_tokens.json_value, options.max_new_tokens.json_value) == (128, 64)
    assert (options.percentiles, options.seed, options.warm_up_s) == ((50, 90, 99), 0, 0)


def test_url_loses_its_trailing_slash_and_keeps_its_path() -> None:
    assert read_options("--url", "https://[::1]:8443/engine/").url == "https://[::1]:8443/engine"


@pytest.mark.parametrize(
    ("flag", "value", "bound"),
    [
        ("--concurrency", "0", "between 1 and 16384"),
        ("--concurrency", "16385", "between 1 and 16384"),
        ("--concurrency", "1.5", "between 1 and 16384"),
        ("--concurrency", "9" * 5000, "between 1 and 16384"),
        ("--total-requests", "-1", "between 1 and 100000000"),
        ("--prompt-tokens", "0", "between 1 and 1048576"),
        ("--max-new-tokens", "1048577", "between 0 and 1048576"),
        ("--max-new-tokens", "", "between 0 and 1048576"),
        ("--timeout-s", "0", "between 0.001 and 3600"),
        ("--timeout-s", "nan", "between 0.001 and 3600"),
        ("--url", "127.0.0.1:8080", "http://"),
        ("--url", "ftp://host", "http://"),
        ("--url", "http://", "http://"),
        ("--url", "http://host:99999", "http://"),
        ("--url", "http://host/?a=b", "http://"),
        ("--url", "http://ho st", "http://"),
        ("--url", "http://h/" + "x" * 3000, "2048"),
        ("--json", "", "path"),
    ],
)
def test_bad_value_is_one_line_with_flag_value_and_bound(flag: str, value: str, bound: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(flag, value)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{flag}: ")
    assert bound in problem
    assert "\n" not in problem
    assert len(problem) < 250
    assert value in problem or len(value) > 60


def test_password_in_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        read_options("--url", "http://me:s3cret@host:99999")
    assert "s3cret" not in str(caught.value)


def test_all_problems_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        read_options("--concurrency", "0", "--prompt-tokens", "x")
    assert len(caught.value.problems) == 2


def test_whole_file_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with WholeFile(str(path)):
        assert len(list(tmp_path.iterdir())) == 1, "the temporary file is not there"
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    with WholeFile(str(path)) as file:
        assert path.read_text() == "old"
        file.write(b'{"a": 1}')
        assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_whole_file_keeps_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    with WholeFile(str(link)) as file:
        file.write(b"{}\n")
    assert link.is_symlink()
    assert target.read_text() == "{}\n"


@pytest.mark.parametrize("path", ["", "missing/out.json"])
def test_whole_file_refuses_what_it_cannot_write(tmp_path: Path, path: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - a folder, a missing folder
        WholeFile(str(tmp_path / path))
    assert list(tmp_path.iterdir()) == []


def test_whole_file_never_replaces_a_device() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        WholeFile(os.devnull)


def test_figures_and_lines_say_the_same() -> None:
    measurements = Measurements(succeeded=7, tokens=700, ended_early=1)
    measurements.record_failure(Failure("timed out", "3 tokens, then nothing for 60 s"), 0)
    measurements.ttft.record(1_234_000)
    measurements.end_to_end.record(2_500_000_000)
    run = figures(result(measurements, client_cpu_s=1.9), read_options(), interrupted=True)
    assert json.loads(json.dumps(run)) == run
    assert run["requests"] == 8
    assert run["tokens_per_s"] == 350.0
    assert run["ttft_ms"]["p99"] == pytest.approx(1.234, rel=1e-3)
    assert run["inter_token_ms"] == {
        "count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None,
    }  # fmt: skip
    assert run["started_at"] == "2026-01-02T03:04:05+00:00"
    assert {flag.name for flag in FLAGS} - {"json", "plot"} < run["parameters"].keys()
    text = "\n".join(report_lines(run))
    for expected in ("interrupted after 8 of 2000", "1 x timed out; the first: 3 tokens", "1.23", "2500", "95%"):
        assert expected in text


def test_run_of_nothing_can_be_reported() -> None:
    nothing = result(Measurements(), duration_s=0.0, client_cpu_s=0.0)
    assert list(report_lines(figures(nothing, read_options(), interrupted=False)))


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to"),
    [
        (1024, 4096, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
        (100, 4096, 192),
        (100, 192, 192),
        (100, resource.RLIM_INFINITY, 192),
    ],
)
def test_open_files_are_reserved(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised_to: int | None) -> None:
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits_set.append(pair))
    reserve_file_descriptors(128)
    assert limits_set == ([] if raised_to is None else [(raised_to, hard)])


@pytest.mark.parametrize("hard", [20, 64, 65, 66])
def test_one_connection_is_let_through_under_any_limit(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits_set.append(pair))
    reserve_file_descriptors(1)
    assert limits_set == [(min(65, hard), hard)]


def test_more_connections_than_files_may_be_open_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 191))
    with pytest.raises(ConfigError) as caught:
        reserve_file_descriptors(128)
    (problem,) = caught.value.problems
    assert problem.startswith(
        "--concurrency: 128 connections need 192 open files, over this process's hard limit of 191;"
    )
    assert problem.endswith("use 127 or less, or raise `ulimit -n`")
