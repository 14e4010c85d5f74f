"""The flags of load, measurement and search: what they read as, and which need or exclude each other."""

import pytest

from ironbatch.bench.options import FLAGS
from ironbatch.bench.readers import RampRange
from ironbatch.errors import ConfigError
from tests.bench.options import read_options

RAMP = ("--ramp", "1:100", "--ttft-bound-ms", "50", "--duration", "5")


def test_open_loop_has_a_cap_and_no_default_end() -> None:
    options = read_options("--rate", "12.5", "--duration", "30", "--warm-up", "5")
    assert options.is_open_loop
    assert (options.rate, options.duration_s, options.warm_up_s, options.total_requests) == (12.5, 30, 5, None)
    assert (options.concurrency, options.has_concurrency_flag, options.burstiness) == (16384, False, 1)
    capped = read_options("--rate", "1", "--total-requests", "9", "--concurrency", "50", "--burstiness", ".5")
    assert (capped.concurrency, capped.has_concurrency_flag, capped.burstiness) == (50, True, 0.5)


def test_closed_loop_with_a_duration_counts_no_requests() -> None:
    options = read_options("--duration", "3")
    assert (options.is_open_loop, options.concurrency, options.total_requests) == (False, 128, None)
    assert read_options("--duration", "3", "--total-requests", "5").total_requests == 5


def test_ramp_and_percentiles() -> None:
    options = read_options(*RAMP, "--percentiles", "99.9, 50,50,0", "--itl-bound-ms", "7")
    assert options.ramp == RampRange(1, 100)
    assert options.percentiles == (0, 50, 99.9)
    assert (options.bounds.ttft_ms, options.bounds.itl_ms, options.ramp_share) == (50, 7, 0.99)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--rate", "0"), "--rate: '0' is not between 0.001 and 100000 requests a second; use 0.001 or more"),
        (("--rate", "fast"), "--rate: 'fast' is not a number; give one between"),
        (("--rate", "inf"), "--rate: 'inf' is not a number"),
        (("--rate", "5"), "--rate: nothing would end the run; give --duration or --total-requests"),
        (("--duration", "0"), "--duration: '0' is not between 0.1 and 604800 seconds"),
        (("--warm-up", "-1"), "--warm-up: '-1' is not between 0 and 86400 seconds"),
        (("--burstiness", "2"), "--burstiness: there are no drawn arrivals to shape; give --rate or --ramp"),
        (("--seed", "-1"), "--seed: -1 is not between 0 and"),
        (("--percentiles", "50,101"), "--percentiles: '101' is not between 0 and 100"),
        (("--percentiles", ""), "--percentiles: '' is not a number"),
        (("--percentiles", ",".join("5" * 11)), "--percentiles: 11 percentiles are over the limit of 10"),
        (("--trace", ""), "--trace: '' is not the path of a file"),
        (("--trace", "t", "--prompt-tokens", "5"), "--trace: it holds the lengths of the requests; leave out"),
        (("--trace", "t", "--max-new-tokens", "64"), "--trace: it holds the lengths"),
        (("--time-scale", "2"), "--time-scale: there is no trace to replay; give --trace"),
        (
            ("--time-scale", "2", "--trace", "t", "--rate", "5", "--duration", "1"),
            "--time-scale: with --rate or --ramp the trace's own times are not used",
        ),
        ((*RAMP, "--rate", "5"), "--rate: --ramp chooses the rates itself"),
        ((*RAMP, "--total-requests", "5"), "--total-requests: --ramp tries each rate for --duration"),
        (("--ramp", "1:100", "--duration", "5"), "--ramp: there are no bounds to search by; give --ttft-bound-ms"),
        (("--ramp", "1:100", "--itl-bound-ms", "5"), "--ramp: each rate is tried for a time; give --duration"),
        (("--ramp", "100"), "--ramp: '100' does not have the form LOW:HIGH; use one such as 1:200"),
        (("--ramp", "9:9"), "--ramp: '9:9' has a LOW that is not under its HIGH"),
        (("--ramp", "0:9"), "--ramp: '0' is not between 0.001 and 100000"),
        (("--ramp-share", "0.9"), "--ramp-share: there is no ramp; give --ramp"),
        (("--ramp-share", "1.1"), "--ramp-share: '1.1' is not between 0.5 and 1"),
        (("--plot", "run.jpg"), "--plot: 'run.jpg' does not end in .svg, .png, .pdf; give it one of these suffixes"),
    ],
)
def test_what_does_not_go_is_one_line_with_flag_value_and_remedy(argv: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(*argv)
    (problem,) = caught.value.problems
    assert problem.startswith(told)


def test_every_flag_is_spelled_once() -> None:
    spellings = [flag.text for flag in FLAGS]
    assert len(set(spellings)) == len(spellings)
    assert {"--duration", "--warm-up", "--rate", "--timeout-s"} <= set(spellings)
