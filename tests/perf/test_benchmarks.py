"""The benchmark scripts run, and BENCHMARKS.md says what the committed result files say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyperf
import pytest

REPOSITORY = Path(__file__).parents[2]
PERF = REPOSITORY / "perf"
RESULTS = PERF / "results"
RUN_ONCE = Path(__file__).with_name("run_once.py")

sys.path.insert(0, str(PERF))

import render  # noqa: E402
import results  # noqa: E402

PYPERF_SCRIPTS = [name for name in results.NAMES if name not in results.OF_WHOLE_SERVERS]


def run_script(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(PERF / f"{name}.py"), *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)


def suite_of(path: Path, **medians: float) -> None:
    """A result file with these benchmarks; `__` stands for a slash."""
    benchmarks = [
        pyperf.Benchmark([pyperf.Run([value], metadata={"name": name.replace("__", "/")}, collect_metadata=False)])
        for name, value in medians.items()
    ]
    pyperf.BenchmarkSuite(benchmarks).dump(str(path))


# ------------------------------------------------------------------------------------------------------- the scripts


@pytest.mark.parametrize(("name", "own"), [("kernel_call", "builtin"), ("wake_up", "token/ironbatch")])
def test_script_is_run_by_pyperf(name: str, own: str, tmp_path: Path) -> None:
    """One that leaves all to pyperf, and the one that adds runs of its own to its file."""
    done = run_script(name, "--debug-single-value", "--quiet", "--output", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    found = set(pyperf.BenchmarkSuite.load(str(tmp_path / "found.json")).get_benchmark_names())
    assert {"empty_call", "oracle_step", own} < found


@pytest.mark.slow
@pytest.mark.parametrize("name", PYPERF_SCRIPTS)
def test_script_measures_its_yardsticks_and_counterparts(name: str) -> None:
    words = [sys.executable, str(RUN_ONCE), str(PERF / f"{name}.py"), "--debug-single-value"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode == results.CANNOT_RUN:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    found = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert {"empty_call", "oracle_step"} < found
    committed = pyperf.BenchmarkSuite.load(str(RESULTS / f"{name}.json"))
    assert found == set(committed.get_benchmark_names()), "the result file is of another version of the script"


@pytest.mark.slow
def test_streaming_script_measures_both_sides(tmp_path: Path) -> None:
    options = ("--fast", "--cases", "1-stream/eight-lines", "--output", str(tmp_path / "found.json"))
    done = run_script("http_stream", *options)
    assert done.returncode == 0, done.stderr
    suite = pyperf.BenchmarkSuite.load(str(tmp_path / "found.json"))
    name = "http_stream/1-stream/eight-lines"
    assert set(suite.get_benchmark_names()) == {f"{name}/ironbatch", f"{name}/bare"}
    for side in ("ironbatch", "bare"):
        lines_per_send = suite.get_benchmark(f"{name}/{side}").get_metadata()["lines_per_send"]
        assert 7.5 < lines_per_send < 16, "eight are ready at once; where the machine is busy, now and then two steps'"


@pytest.mark.slow
def test_model_server_script_measures_both_ways(tmp_path: Path) -> None:
    done = run_script("model_server", "--fast", "--output", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    found = pyperf.BenchmarkSuite.load(str(tmp_path / "found.json")).get_benchmark_names()
    committed = pyperf.BenchmarkSuite.load(str(RESULTS / "model_server.json")).get_benchmark_names()
    assert set(found) == set(committed), "the result file is of another version of the script"


# --------------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("name", results.NAMES)
def test_result_file_holds_no_name_and_no_path_of_a_machine(name: str) -> None:
    text = (RESULTS / f"{name}.json").read_text()
    assert re.search(r'"(?:/|~|[A-Z]:\\)', text) is None
    assert "hostname" not in text
    assert results.keep_public(json.loads(text)) == json.loads(text)
    assert "commit" in json.loads(text)["metadata"]


def test_page_is_what_the_result_files_make() -> None:
    assert render.PAGE.read_text() == render.Page(RESULTS).text().rstrip() + "\n", "run `python perf/render.py`"
    assert render.FIGURE.exists()


def test_figure_in_the_readme_is_in_the_benchmarks() -> None:
    """What BENCHMARKS.md does not have, README may not claim: `**12.3 us**` and the like."""
    page, readme = render.PAGE.read_text(), (REPOSITORY / "README.md").read_text()
    for figure in re.findall(r"\*\*([0-9.]+ (?:ns|us|ms|s|times))\*\*", readme):
        assert figure in page, f"README.md quotes {figure}"


# ------------------------------------------------------------------------------------------------ rendering, comparing


def test_private_metadata_is_dropped_at_every_level() -> None:
    suite = {
        "version": "1.0",
        "metadata": {"hostname": "h", "python_executable": "/x", "cpu_count": 2},
        "benchmarks": [{"metadata": {"name": "n", "command": "/y"}, "runs": [{"metadata": {"date": "d", "pid": 1}}]}],
    }
    assert results.keep_public(suite) == {
        "version": "1.0",
        "metadata": {"cpu_count": 2},
        "benchmarks": [{"metadata": {"name": "n"}, "runs": [{"metadata": {"date": "d"}}]}],
    }


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (31.2e-9, "31.2 ns"),
        (2.9e-6, "2.90 us"),
        (999.4e-9, "999 ns"),
        (999.6e-9, "1.00 us"),
        (0.0151, "15.1 ms"),
        (123, "123 s"),
    ],
)
def test_three_digits_and_a_unit(value_s: float, text: str) -> None:
    assert render.seconds(value_s) == text


def test_missing_file_or_benchmark_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"wake_up\.json is missing: run `make bench`"):
        results.Figures(tmp_path, "wake_up")
    suite_of(tmp_path / "wake_up.json", token__ironbatch=1e-6)
    figures = results.Figures(tmp_path, "wake_up")
    assert figures["token/ironbatch"] == 1e-6
    with pytest.raises(SystemExit, match=r"wake_up\.json has no token/bare_event"):
        figures["token/bare_event"]


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}', "[]", "", '{"benchmarks": 1, "version": "1.0"}'])
def test_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "wake_up.json").write_text(content)
    with pytest.raises(SystemExit, match=r"wake_up\.json is damaged: run `make bench`"):
        results.Figures(tmp_path, "wake_up")
    done = run_script("compare", str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "wake_up.json is damaged: run `make bench`\n")


def test_a_missed_target_is_said(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    suite = json.loads((tmp_path / "scheduler_step.json").read_text())
    for benchmark in suite["benchmarks"]:
        if benchmark.get("metadata", {}).get("name") == "first/256/alone":
            for run in benchmark["runs"]:
                run["values"] = [1.0 for _ in run.get("values", [])]
    (tmp_path / "scheduler_step.json").write_text(json.dumps(suite))
    (line,) = [line for line in render.Page(tmp_path).text().splitlines() if "256 admissions" in line]
    assert line.endswith("| missed |")


def test_comparison_names_both_sides_and_what_the_machine_did(tmp_path: Path) -> None:
    for name, factor in (("old", 1.0), ("new", 2.0)):
        (tmp_path / name).mkdir()
        suite_of(tmp_path / name / "wake_up.json", empty_call=1e-8 * factor, token__ironbatch=1e-6 * factor)
    done = run_script("compare", str(tmp_path / "old"), str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    assert f"from {tmp_path / 'old'} to {tmp_path / 'new'}" in done.stdout
    assert "yardsticks: empty_call +100%; less than that is the machine" in done.stdout
    assert "2.00x slower" in done.stdout
    done = run_script("compare", str(tmp_path / "old"), str(tmp_path / "old"))
    assert "the same file; `make bench` measures anew" in done.stdout


def test_comparison_with_what_has_no_results_is_refused(tmp_path: Path) -> None:
    for name in ("no-such-thing", str(tmp_path)):
        done = run_script("compare", name)
        assert done.returncode == 1
        assert f"error: {name} is neither a folder nor a commit that has result files" in done.stderr
