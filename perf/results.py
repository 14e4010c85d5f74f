"""The result files: where they are, what of pyperf's metadata they keep, and how a figure is read from them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pyperf

DIRECTORY = Path(__file__).with_name("results")
NAMES = (
    "kernel_call",
    "scheduler_step",
    "features",
    "prefix_cache",
    "audit",
    "mock_kv",
    "device",
    "lane_hand_off",
    "slot_publish_collect",
    "wake_up",
    "http_stream",
    "model_server",
    "start_and_idle",
)
"""One script each, in the order in which `make bench` runs them."""

OF_WHOLE_SERVERS = ("http_stream", "model_server", "start_and_idle")
"""The scripts that start servers and measure other processes than their own: they take none of pyperf's options."""

CANNOT_RUN = 77
"""The exit code of a script that lacks what it measures; it has said so in a line (as automake has it)."""

YARDSTICKS = ("empty_call", "oracle_step")

KEPT = frozenset(
    {
        *("name", "unit", "description", "loops", "inner_loops", "date", "load_avg_1min"),
        *("cpu_count", "cpu_model_name", "cpu_config", "cpu_freq", "platform", "aslr", "timer"),
        *("perf_version", "python_version", "python_implementation", "python_compiler", "commit"),
        *(
            "ironbatch_version",
            "falcon_version",
            "gunicorn_version",
            "numba_version",
            "numpy_version",
            "uvloop_version",
        ),
        *("lines_per_send", "lines_per_second"),
    }
)
"""What tells of a measurement. pyperf knows the host's name and paths too, which are nobody's business."""


def keep_public(suite: dict[str, Any]) -> dict[str, Any]:
    """A pyperf suite, as its JSON has it, with the metadata in KEPT alone."""
    cleaned = dict(suite)
    if "metadata" in cleaned:
        cleaned["metadata"] = {key: value for key, value in suite["metadata"].items() if key in KEPT}
    for parts in ("benchmarks", "runs"):
        if parts in cleaned:
            cleaned[parts] = [keep_public(part) for part in suite[parts]]
    return cleaned


def publish(measured: Path, name: str, measured_commit: str, directory: Path = DIRECTORY) -> None:
    """Make what a script has measured of a commit the result file of `name`."""
    suite = json.loads(measured.read_text())
    suite.setdefault("metadata", {})["commit"] = measured_commit
    directory.mkdir(exist_ok=True)
    text = json.dumps(keep_public(suite), indent=1, sort_keys=True)
    unfinished = directory / f".{name}.tmp"
    unfinished.write_text(text + "\n")
    unfinished.replace(directory / f"{name}.json")


def commit() -> str:
    """The commit that is measured; "-dirty" if anything differs from it but the results and their page."""
    revision = _git("rev-parse", "--short=10", "HEAD")
    elsewhere = (":/", ":!results", ":!results.py", ":!render.py", ":!README.md", ":(top,exclude)BENCHMARKS.md")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", *elsewhere)
    return (revision or "unknown") + ("-dirty" if changes else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=DIRECTORY.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


class Figures:
    """The medians of one result file, in seconds."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{name}.json"
        if not self.path.exists():
            raise SystemExit(f"{self.path.name} is missing: run `make bench`")
        try:
            suite = pyperf.BenchmarkSuite.load(str(self.path))
            self.metadata: dict[str, Any] = json.loads(self.path.read_text()).get("metadata", {})
        except (ValueError, KeyError, TypeError, AttributeError):  # as pyperf has it for whatever is no suite
            raise SystemExit(f"{self.path.name} is damaged: run `make bench`") from None
        self._benchmarks = {benchmark.get_name(): benchmark for benchmark in suite}

    def __getitem__(self, name: str) -> float:
        """The median of a benchmark's values."""
        return float(self._benchmark(name).median())

    def __contains__(self, name: str) -> bool:
        """Whether there is such a benchmark."""
        return name in self._benchmarks

    def spread(self, name: str) -> float:
        """Half of the values are no farther from the median than this share of it (median absolute deviation)."""
        benchmark = self._benchmark(name)
        return float(benchmark.median_abs_dev() / benchmark.median())

    def note(self, name: str, key: str) -> Any:
        """One of a benchmark's own metadata."""
        return self._benchmark(name).get_metadata().get(key)

    def _benchmark(self, name: str) -> pyperf.Benchmark:
        try:
            return self._benchmarks[name]
        except KeyError:
            raise SystemExit(f"{self.path.name} has no {name}: run `make bench`") from None
