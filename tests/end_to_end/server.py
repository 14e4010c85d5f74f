"""A whole server in processes of its own, started in either of the two ways, and a client for it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ironbatch import layout

REPOSITORY = Path(__file__).parents[2]
START_S = 120.0  # a cold start compiles all kernels, perhaps beside other tests
STOP_S = 60.0
FORMS = ("serve", "gunicorn")
UNCOUNTED_S = 2.0
ENDS = ("completed", "cancelled", "failed", "rejected", "unavailable", "lost")
"""What becomes of a request, by the names of /metrics."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    """Poll until `condition()` is true, and return it; fail with `what` after the time-out."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)
    return result


def segments() -> set[str]:
    """Ironbatch's segments on this machine."""
    return {path.name for path in Path("/dev/shm").glob("ironbatch-*")}


def stale_segments() -> set[str]:
    """Those that no process has mapped: somebody has left them behind. (Other instances may live beside a test.)"""
    found = segments()
    for process in psutil.process_iter():
        if not found:
            break
        with contextlib.suppress(psutil.Error, OSError):
            found -= segments_of(process.pid)
    return found & segments()


def command(form: str, options: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a start; options stand in the one or in the other."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("IRONBATCH_") or "CACHE" in name
    }
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    options = {"addr": "127.0.0.1:0", **options}
    if form == "serve":
        flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return [sys.executable, "-m", "ironbatch", "serve", *flags], environ
    environ |= {f"IRONBATCH_{name.upper()}": str(value) for name, value in options.items()}
    program = [sys.executable, "-m", "gunicorn", "-c", str(REPOSITORY / "deploy" / "gunicorn.conf.py")]
    return [*program, "ironbatch.web.app:app"], environ


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    output: list[str]
    segment: str
    family: list[psutil.Process] = field(default_factory=list)

    def processes(self, name: str) -> list[psutil.Process]:
        """Its living processes whose title holds `name`, oldest first."""
        found = []
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and f"ironbatch: {name}" in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: (process.create_time(), process.pid))

    def scheduler(self) -> psutil.Process:
        """The one scheduler."""
        found = wait_until(lambda: self.processes("scheduler"), "a scheduler")
        assert len(found) == 1, found
        return found[0]

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as problem:
            return problem.code, json.load(problem)

    def metrics(self) -> dict[str, int]:
        """GET /metrics."""
        status, values = self.get("/metrics")
        assert status == 200
        return values

    def header(self) -> Any:
        """The segment's header, read from shared memory: no worker is asked."""
        return np.frombuffer(np.memmap(f"/dev/shm/{self.segment}", np.uint8, "r"), layout.HEADER, 1)[0]

    def lanes(self) -> Any:
        """The segment's lanes, read in the same way."""
        data = np.memmap(f"/dev/shm/{self.segment}", np.uint8, "r")
        header = self.header()
        return np.frombuffer(data, layout.LANE, int(header["num_lanes"]), int(header["lanes_offset"]))

    def scheduler_tokens(self) -> int:
        """Tokens generated so far, read in the same way."""
        data = np.memmap(f"/dev/shm/{self.segment}", np.uint8, "r")
        header = self.header()
        return int(np.frombuffer(data, layout.METRICS, 1, int(header["metrics_offset"]))[0]["tokens_generated"])

    def is_healthy(self) -> bool:
        """Whether GET /health says 200."""
        with contextlib.suppress(OSError):
            return self.get("/health")[0] == 200
        return False

    def wait_idle(self) -> dict[str, int]:
        """Wait until nothing runs or waits, all blocks are free and all requests are counted; return the metrics.

        A client may have its last byte a moment before its request is counted. One whose worker was killed before it
        was submitted never is, so this is not waited for for ever.
        """
        counted_by_s: float | None = None

        def idle() -> dict[str, int] | None:
            nonlocal counted_by_s
            now = self.metrics()
            if now["running"] + now["waiting"] > 0 or now["kv_blocks_free"] < now["kv_blocks_total"]:
                return None
            counted_by_s = counted_by_s or time.monotonic() + UNCOUNTED_S
            is_counted = now["requests_received"] == sum(now[f"requests_{end}"] for end in ENDS)
            return now if is_counted or time.monotonic() > counted_by_s else None

        return wait_until(idle, "an idle server")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the main process a signal; return its exit code."""
        self.remember_family()
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def remember_family(self) -> None:
        """Note all processes there are, to see later that they are gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            self.family = list({*self.family, main, *main.children(recursive=True)})

    def assert_nothing_left(self, timeout_s: float = 5.0) -> None:
        """All processes and the segment are gone."""
        wait_until(lambda: self.segment not in segments(), f"{self.segment} to be removed", timeout_s)
        wait_until(lambda: not [p for p in self.family if is_alive(p)], f"the end of {self.family}", timeout_s)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie that its parent will reap does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def running(form: str = "serve", **options: Any) -> Iterator[Server]:
    """A server that is ready; it and all its children are killed at the end, if they live."""
    words, environ = command(form, options)
    before = segments()
    process = subprocess.Popen(
        words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd="/"
    )
    output: list[str] = []
    reader = threading.Thread(target=_read_lines, args=(process, output), daemon=True)
    reader.start()
    server = Server(process, 0, output, "")
    try:
        server.port = _wait_ready(server, form)
        mine = wait_until(lambda: segments_of(process.pid) - before, "its segment")
        assert len(mine) == 1, mine
        server.segment = mine.pop()
        yield server
    finally:
        server.remember_family()
        process.kill()  # it alone: all others must follow it, and the segment is removed by what outlives it
        process.wait(STOP_S)
        try:
            server.assert_nothing_left(10)
        finally:
            for member in server.family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        reader.join(STOP_S)
        process.stdout.close()  # type: ignore[union-attr]
        print("".join(output))


def segments_of(pid: int) -> set[str]:
    """The segments that a process has mapped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        maps = psutil.Process(pid).memory_maps()
        return {Path(entry.path).name for entry in maps if "/dev/shm/ironbatch-" in entry.path}
    return set()


def _read_lines(process: subprocess.Popen[bytes], output: list[str]) -> None:
    output.extend(line.decode(errors="replace") for line in process.stdout)  # type: ignore[union-attr]


def _wait_ready(server: Server, form: str) -> int:
    pattern = r"serving on http://\S+?:(\d+)\"?[}]?$" if form == "serve" else r"Listening at: http://\S+?:(\d+) "

    def port() -> int:
        assert server.process.poll() is None, f"ended at start: {''.join(server.output)}"
        match = re.search(pattern, "".join(server.output), re.MULTILINE)
        return int(match.group(1)) if match else 0

    server.port = wait_until(port, "the port", START_S)
    wait_until(server.is_healthy, "health", START_S)
    return server.port


def run_to_end(form: str, **options: Any) -> tuple[int, str]:
    """A start that is expected to fail: exit code and output."""
    words, environ = command(form, options)
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=START_S, cwd="/", check=False)
    return done.returncode, done.stdout + done.stderr


class RawStream:
    """A POST /generate over a plain socket, so that a test sees chunks and may stop reading or hang up."""

    def __init__(
        self,
        port: int,
        body: dict[str, Any],
        *,
        receive_buffer_bytes: int | None = None,
        segment_bytes: int | None = None,  # small segments keep the kernel's buffer at the server small too
    ) -> None:
        self._socket = socket.socket()
        if receive_buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        if segment_bytes is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        self._socket.settimeout(60)
        self._socket.connect(("127.0.0.1", port))
        payload = json.dumps(body).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Length: {len(payload)}\r\n\r\n"
        self._socket.sendall(head.encode() + payload)
        self._pending = b""
        self.status = 0
        self.headers = b""

    def read_head(self) -> int:
        """Read the status line and the headers."""
        while b"\r\n\r\n" not in self._pending:
            self._receive()
        self.headers, self._pending = self._pending.split(b"\r\n\r\n", 1)
        self.status = int(self.headers.split(b" ", 2)[1])
        return self.status

    def read_chunk(self) -> bytes:
        """One chunk of the body; b"" at its end."""
        if not self.status:
            self.read_head()
        while b"\r\n" not in self._pending:
            self._receive()
        size_text, self._pending = self._pending.split(b"\r\n", 1)
        size = int(size_text, 16)
        while len(self._pending) < size + 2:
            self._receive()
        chunk, self._pending = self._pending[:size], self._pending[size + 2 :]
        return chunk

    def read_all(self) -> bytes:
        """The rest of the body."""
        return b"".join(iter(self.read_chunk, b""))

    @property
    def local_port(self) -> int:
        """The client's end of the connection."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def reset(self) -> None:
        """Hang up with a reset, whatever is unread or unsent."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        data = self._socket.recv(1 << 20)
        assert data, f"the server hung up after {self._pending!r}"
        self._pending += data


def generate_all(port: int, bodies: list[dict[str, Any]]) -> list[bytes]:
    """All at once, each on a connection and a thread of its own; the response bodies."""
    results: list[bytes | Exception] = [b""] * len(bodies)

    def one(index: int) -> None:
        try:
            with contextlib.closing(RawStream(port, bodies[index])) as stream:
                results[index] = stream.read_all()
        except Exception as problem:  # reported by the test, not by the thread
            results[index] = problem

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [result for result in results if isinstance(result, Exception)]
    assert not failures, failures
    return results  # type: ignore[return-value]


def without_stats(answer: bytes) -> bytes:
    """A detailed answer without what differs from run to run: how long it waited, what the cache had of it."""
    return re.sub(rb',"cached_tokens":[^\n]*\}(?=\}\n)', b"", answer)


def post(server: Server, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of an answer that may be an error, which does not come in chunks."""
    url = f"http://127.0.0.1:{server.port}/generate"
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as problem:
        with problem:
            return problem.code, problem.read()


def plain_body(count: int) -> bytes:
    """What a stream of `count` tokens looks like without details."""
    lines = [f'{{"token_index":{k},"done":{"true" if k == count - 1 else "false"}}}\n' for k in range(count)]
    return "".join(lines).encode()
