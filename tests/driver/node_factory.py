"""Nodes and clients as processes that start at once: forked from one that has loaded and compiled all it takes.

`python -m tests.driver.node_factory` is that one: it reads a JSON line for each process to start.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.driver.node_process import END_S, ROOT, START_S, clear_mount, environment, process_state
from tests.support import wait_until


@dataclass
class Forked:
    """A process. `line` is the first that it has printed."""

    pid: int
    line: str

    def send(self, number: signal.Signals) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    @property
    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()  # the factory reaps its children

    def kill(self) -> None:
        """As SIGKILL does; returns when it is dead."""
        self.send(signal.SIGKILL)
        wait_until(lambda: not self.is_alive, END_S, f"the end of process {self.pid}")

    def freeze(self) -> None:
        """It does not answer any more."""
        self.send(signal.SIGSTOP)
        wait_until(lambda: process_state(self.pid) == "T", END_S, f"the stop of process {self.pid}")


class NodeFactory:
    """Starts nodes and clients. `close` ends them all."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.driver.node_factory"],
            cwd=ROOT,
            env=environment() | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._read = b""
        self._started: list[Forked] = []
        self._paths: list[str] = []

    def node(self, path: str | Path, *flags: str) -> Forked:
        """A node that serves. What it says if it does not is on our stderr."""
        self._paths.append(str(path))
        node = self._start("device", "--node", str(path), *flags)
        assert "serving" in node.line, node.line
        return node

    def client(self, name: str, *arguments: str) -> Forked:
        """A process that runs one of the functions below."""
        return self._start(name, *arguments)

    def end_all(self) -> None:
        """End what was started since the last time, and take away what it has mounted."""
        for forked in self._started:
            forked.send(signal.SIGCONT)
            forked.send(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while any(forked.is_alive for forked in self._started) and time.monotonic() < deadline:
            time.sleep(0.001)
        for path in self._paths:
            clear_mount(path)
        for forked in self._started:
            forked.kill()
        self._started.clear()
        self._paths.clear()

    def close(self) -> None:
        self.end_all()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _start(self, name: str, *arguments: str) -> Forked:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + START_S
        pid, line = 0, ""
        while not pid or not line:
            text = self._line(deadline)
            word, _, rest = text.partition(" ")
            if word == "forked":
                pid = int(rest)
                self._started.append(Forked(pid, ""))
            elif pid and not _is_an_end(text, pid):
                line = text
        self._started[-1].line = line
        return self._started[-1]

    def _line(self, deadline: float) -> str:
        while b"\n" not in self._read:
            readable, _, _ = select.select([self._out], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self._out, 65536) if readable else b""
            assert chunk, "the factory of nodes says nothing any more"
            self._read += chunk
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()


def _is_an_end(text: str, pid: int) -> bool:
    """Whether one of those that were started before has said this when it ended."""
    words = text.split()
    return "was unmounted" in text or "was aborted" in text or (words[0] == "ended" and words[1] != str(pid))


# ------------------------------------------------------------------------------------------- in the factory's process


def wait_forever(path: str) -> int:
    """A client that has claimed blocks and waits, in the kernel, for a fence that does not come soon."""
    from ironbatch.driver import abi  # noqa: PLC0415
    from ironbatch.driver.ioctl import IoctlDevice  # noqa: PLC0415
    from ironbatch.errors import DeviceGone  # noqa: PLC0415

    device = IoctlDevice(path)
    device.claim_blocks(5)
    fence = device.submit(num_seqs=0, ring_offset=0, ring_bytes=0)
    print("waits", flush=True)
    try:
        device._ask(abi.WAIT_FENCE, fence=fence, deadline_ns=abi.NO_DEADLINE)
    except DeviceGone:
        return 0
    return 1


def open_as_nobody(path: str) -> int:
    """What the owner of no file is told."""
    from ironbatch.driver.ioctl import IoctlDevice  # noqa: PLC0415
    from ironbatch.errors import DeviceUnavailable  # noqa: PLC0415

    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    try:
        IoctlDevice(path).close()
        print("opened", flush=True)
    except DeviceUnavailable as problem:
        print(errno.errorcode.get(problem.code, "?"), problem, flush=True)
    return 0


def _run(name: str, arguments: list[str]) -> int:
    from ironbatch.cli import main  # noqa: PLC0415

    clients: dict[str, Any] = {"wait_forever": wait_forever, "open_as_nobody": open_as_nobody}
    return int(clients[name](*arguments) if name in clients else main([name, *arguments]))


def _serve() -> None:
    import ironbatch.driver.ioctl  # noqa: PLC0415
    import ironbatch.driver.serving  # noqa: F401, PLC0415

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody has to reap them
    while line := sys.stdin.buffer.readline():
        name, *arguments = json.loads(line)
        pid = os.fork()
        if pid:
            continue
        os.write(1, f"forked {os.getpid()}\n".encode())  # by itself, so that it is before all else that it says
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = 1
        try:
            code = _run(name, arguments)
        finally:
            os.write(1, f"ended {os.getpid()} {code}\n".encode())
            os._exit(code)


if __name__ == "__main__":
    _serve()
