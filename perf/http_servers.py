"""Ironbatch as running processes, for perf/http_stream.py and others; and the former's bare protocol with its pacer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from http_client import CpuClock

BARE = str(Path(__file__).with_name("http_bare.py"))
START_S = 120.0  # the first start compiles the kernels
STOP_S = 20.0
PACE_BACKEND = "perf-http-pace"


class Ironbatch:
    """A server with one worker."""

    def __init__(self, port: int, worker_pid: int, scheduler_pid: int) -> None:
        self.port = port
        self.clock = CpuClock(worker_pid)
        self.scheduler_clock = CpuClock(scheduler_pid)

    def wait_idle(self) -> None:
        """Wait until the streams of the last measurement are gone from the engine."""
        deadline = time.monotonic() + STOP_S
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as response:
                now = json.load(response)
            if now["running"] == now["waiting"] == 0:
                return
            assert time.monotonic() < deadline, "sequences run on without a client"
            time.sleep(0.02)


class Bare:
    """The bare protocol."""

    def __init__(self, port: int, pid: int, orders: int) -> None:
        self.port = port
        self.clock = CpuClock(pid)
        self._orders = orders

    def pace(self, interval_s: float, lines: int) -> None:
        """From now on every stream is owed `lines` lines once an interval; 0, 0 pauses."""
        os.write(self._orders, b"%d %d\n" % (round(interval_s * 1e9), lines))


@contextlib.contextmanager
def ironbatch(options: Mapping[str, object], python_path: str) -> Iterator[Ironbatch]:
    """Start a server, healthy and with its worker's process known; end it."""
    words = [sys.executable, "-m", "ironbatch", "serve", "--addr", "127.0.0.1:0", "--workers", "1"]
    words += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    environ = {**os.environ, "PYTHONPATH": python_path}
    process = subprocess.Popen([*words, "--log-level", "warning"], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = re.search(r"serving on http://\S+:(\d+)", process.stdout.readline())
        assert match, "the server did not start"
        port = int(match.group(1))
        _wait_healthy(port)
        yield Ironbatch(port, _pid_of("web worker", process.pid), _pid_of("scheduler", process.pid))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its children follow it
            raise


def _wait_healthy(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return
        assert time.monotonic() < deadline, "the server is not healthy"
        time.sleep(0.02)


def _pid_of(role: str, root_pid: int) -> int:
    for process in psutil.Process(root_pid).children(recursive=True):
        if f"ironbatch: {role}" in " ".join(process.cmdline()):
            return int(process.pid)
    raise AssertionError(f"there is no {role}")


@contextlib.contextmanager
def bare(head: bytes) -> Iterator[Bare]:
    """Start the bare server and its pacer; end them."""
    bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    server = [sys.executable, BARE, "serve", str(bell), head.decode("latin-1")]
    pacer = [sys.executable, BARE, "pace", str(bell)]
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, bell)
        serving = stack.enter_context(_process(server, bell))
        pacing = stack.enter_context(_process(pacer, bell))
        assert serving.stdout is not None
        assert pacing.stdin is not None
        yield Bare(int(serving.stdout.readline()), serving.pid, pacing.stdin.fileno())


@contextlib.contextmanager
def _process(words: list[str], bell: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(bell,))
    with process:
        try:
            yield process
        finally:
            process.kill()


def install_pace(folder: Path) -> str:
    """Make http_pace.py a backend, by an entry point in `folder`; returns the PYTHONPATH with which it is found."""
    info = folder / f"{PACE_BACKEND.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACE_BACKEND}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ironbatch.backends]\n{PACE_BACKEND} = http_pace:Pace\n")
    here = Path(__file__).parent
    return os.pathsep.join(map(str, (folder, here, here.parent)))
