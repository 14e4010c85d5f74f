"""How long a start takes, cold and warm, and what an idle server costs: `python perf/start_and_idle.py`.

Cold means that no kernel is compiled; a warm start loads them from the cache. A start ends when /health says 200. The
idle server's CPU time is summed over all its processes for ten seconds.
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


def cpu_seconds(root: psutil.Process) -> float:
    """CPU time of a process and its children so far."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm-starts", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        process, cold_s = start(cache)
        stop(process)
        print(f"cold start  {cold_s:6.2f} s")
        for _ in range(arguments.warm_starts):
            process, warm_s = start(cache)
            print(f"warm start  {warm_s:6.2f} s")
            stop(process)
        process, _ = start(cache)
        root = psutil.Process(process.pid)
        before = cpu_seconds(root)
        time.sleep(IDLE_S)
        percent = (cpu_seconds(root) - before) / IDLE_S * 100
        print(f"idle        {percent:6.2f} % CPU over {1 + len(root.children(recursive=True))} processes")
        stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """End a server."""
    process.send_signal(signal.SIGINT)
    process.wait()


if __name__ == "__main__":
    main()
