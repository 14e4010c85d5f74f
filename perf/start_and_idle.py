"""How long a start takes, cold and warm, and what an idle server costs: `python perf/start_and_idle.py`.

Cold means that no kernel is compiled; a warm start loads them from the cache. A start ends when /health says 200. The
idle server's CPU time is summed over all its processes for ten seconds, and divided by them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pyperf
from http_client import CpuClock

REPOSITORY = Path(__file__).parents[1]
IDLE_S = 10.0


def start(cache: str) -> tuple[subprocess.Popen[str], float]:
    """Start a server; returns it and the seconds until it was healthy."""
    environ = {**os.environ, "IRONBATCH_CACHE_DIR": cache, "PYTHONPATH": str(REPOSITORY)}
    began = time.monotonic()
    words = [sys.executable, "-m", "ironbatch", "serve", "--addr", "127.0.0.1:0", "--log-level", "warning"]
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"serving on (http://\S+)", line)
    if match is None:
        raise SystemExit(f"the server did not start: {line}")
    while not healthy(match.group(1)):
        time.sleep(0.01)
    return process, time.monotonic() - began


def healthy(url: str) -> bool:
    """Whether the server says so."""
    with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/health") as response:
        return bool(response.status == 200)
    return False


def measure(warm_starts: int) -> dict[str, list[float]]:
    """Seconds, by what they are of."""
    found: dict[str, list[float]] = {"start/cold": [], "start/warm": [], "idle/cpu_per_second": []}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("start/cold", *["start/warm"] * warm_starts):
            process, taken_s = start(cache)
            found[name].append(taken_s)
            if len(found["start/warm"]) == warm_starts:
                found["idle/cpu_per_second"].append(idle_cpu(psutil.Process(process.pid)))
            stop(process)
    return found


def idle_cpu(root: psutil.Process) -> float:
    """Seconds of CPU that a server and its processes take in a second in which nobody asks for anything."""
    clocks = [CpuClock(process.pid) for process in (root, *root.children(recursive=True))]
    before_ns = sum(clock.now_ns() for clock in clocks)
    time.sleep(IDLE_S)
    return (sum(clock.now_ns() for clock in clocks) - before_ns) / 1e9 / IDLE_S


def stop(process: subprocess.Popen[str]) -> None:
    """End a server."""
    process.send_signal(signal.SIGINT)
    process.wait()


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a pyperf suite")
    parser.add_argument("--fast", action="store_true", help="one warm start instead of five")
    arguments = parser.parse_args()
    found = measure(1 if arguments.fast else 5)
    for name, values in found.items():
        print(f"{name:20}", *(f"{value:.4f}" for value in values))
    if arguments.output is not None:
        benchmarks = [
            pyperf.Benchmark([pyperf.Run(values, metadata={"name": name, "unit": "second"})])
            for name, values in found.items()
        ]
        pyperf.BenchmarkSuite(benchmarks).dump(str(arguments.output), replace=True)


if __name__ == "__main__":
    main()
