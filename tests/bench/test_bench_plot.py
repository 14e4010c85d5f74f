"""The picture: drawn in each format, of any run, and what is told when there can be none."""

import random
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ironbatch.bench.figures import figures
from ironbatch.bench.measure import Failure, Measurements
from ironbatch.bench.options import BenchOptions
from ironbatch.bench.plot import describe, draw_ramp, draw_run, require_matplotlib
from ironbatch.bench.run import RunResult, RunTimes
from ironbatch.bench.timeline import Timeline
from ironbatch.cli import main
from ironbatch.errors import ConfigError
from tests.bench.options import read_options

MS = 1_000_000
MAGIC = {".png": b"\x89PNG\r\n", ".pdf": b"%PDF-", ".svg": b"<?xml"}


def measured_run(values: int) -> Measurements:
    generator, measured = random.Random(5), Measurements(timeline=Timeline())
    assert measured.timeline is not None
    for index in range(values):
        at_ns, latency_ns = index * 20 * MS, round(generator.lognormvariate(0, 1) * 5 * MS)
        measured.ttft.record(latency_ns)
        measured.inter_token.record(index % 3 * MS)
        measured.timeline.started(at_ns)
        measured.timeline.at(at_ns).ttft.record(latency_ns)
        measured.timeline.at(at_ns).inter_token.record(index % 3 * MS)
        measured.timeline.at(at_ns).tokens += 5
        measured.timeline.ended(at_ns)
        if index % 10 == 9:
            measured.record_failure(Failure("some", "detail"), at_ns)
    return measured


def drawn(options: BenchOptions, measured: Measurements) -> bytes:
    times = RunTimes(datetime.now(UTC), 3.0, 2.0, 1.9, 0.1)
    result = RunResult(measured, Measurements(), times, options.rate, measured.requests)
    return draw_run(figures(result, options, interrupted=False), measured, options)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf", ".PNG"])
def test_each_format_is_written(suffix: str) -> None:
    options = read_options(
        "--plot", f"run{suffix}", "--rate", "5", "--duration", "2", "--warm-up", "1",
        "--ttft-bound-ms", "50", "--itl-bound-ms", "3",
    )  # fmt: skip
    assert drawn(options, measured_run(100)).startswith(MAGIC[suffix.lower()])


@pytest.mark.parametrize("values", [0, 1, 2])
def test_run_of_almost_nothing_is_drawn(values: int) -> None:
    assert drawn(read_options("--plot", "run.png"), measured_run(values)).startswith(MAGIC[".png"])


@pytest.mark.parametrize("probes", [0, 1, 3])
def test_ramp_is_drawn(probes: int) -> None:
    argv = ("--ramp", "1:99", "--duration", "5", "--ttft-bound-ms", "9", "--plot", "ramp.png")
    latency = {"p50": 1.0, "p90": 5.0, "p99": 400.0}
    nothing = dict.fromkeys(latency)
    ramp: dict[str, Any] = {
        "highest_rate_within_bounds": None if probes < 3 else 2.0,
        "started_at": "2026-01-02T03:04:05+00:00",
        "ironbatch_version": "1.2.3",
        "probes": [
            {"rate": rate, "passed": rate < 3, "good_share": 1 / rate, "ttft_ms": latency, "inter_token_ms": nothing}
            for rate in (1.0, 4.0, 2.0)[:probes]
        ],
    }
    assert draw_ramp(ramp, read_options(*argv)).startswith(MAGIC[".png"])


def test_title_says_the_parameters() -> None:
    def title(*argv: str) -> str:
        return describe(read_options(*argv))

    assert title() == "closed loop, 128 in flight, prompt 128, output 64 tokens"
    assert title("--rate", "5", "--duration", "1", "--burstiness", "0.5", "--max-new-tokens", "uniform:1:9") == (
        "open loop, 5 requests/s, burstiness 0.5, prompt 128, output uniform:1:9 tokens"
    )
    assert title("--trace", "/a/b.csv", "--time-scale", "2") == "replay, 2 times as fast, trace b.csv"
    assert title("--ramp", "1:9", "--duration", "1", "--ttft-bound-ms", "5", "--trace", "b.csv") == (
        "ramp 1 to 9 requests/s, trace b.csv"
    )


def test_no_matplotlib_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="needs matplotlib, which is not installed"):
        require_matplotlib()
    assert main(["bench", "--plot", str(tmp_path / "run.png")]) == 2
    assert "`pip install 'ironbatch[plot]'`" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_place_that_is_not_writable_is_told_before_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "--plot", str(tmp_path / "no" / "run.png")]) == 2
    assert f"--plot: '{tmp_path / 'no' / 'run.png'}' can't be written: No such file" in capsys.readouterr().err
