"""A node in a process of its own, started by the command, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ironbatch
from ironbatch.driver.mount import FUSE_DEVICE, abort_connection, find_mount

ROOT = Path(ironbatch.__file__).parents[1]
START_S = 240.0  # the first one compiles the kernels
END_S = 20.0
CAP_SYS_ADMIN = 21


def unusable_reason() -> str:
    """Why no node can be served here; empty if one can."""
    try:
        os.close(os.open(FUSE_DEVICE, os.O_RDWR))
    except OSError as problem:
        return f"{FUSE_DEVICE} can't be opened: {problem.strerror}"
    if os.geteuid() != 0:
        return "" if shutil.which("fusermount3") else "fusermount3 is not installed, and this is not root"
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff"))
    return "" if int(effective.split()[1], 16) >> CAP_SYS_ADMIN & 1 else "this root has no CAP_SYS_ADMIN"


_REASON = unusable_reason()
needs_node = pytest.mark.skipif(bool(_REASON), reason=_REASON or "a node can be served")


@dataclass
class NodeProcess:
    """A node that serves. `line` is what it said then."""

    path: str
    process: subprocess.Popen[str]
    line: str

    def kill(self) -> None:
        """Its mount stays, dead."""
        self.process.kill()
        self.process.wait(END_S)

    def stop(self) -> int:
        """End it as an operator does. Returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)

    def freeze(self) -> None:
        """It does not answer any more."""
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + END_S
        while process_state(self.process.pid) != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)


def node_command(path: str | Path, *flags: str) -> list[str]:
    """What serves a node at a path."""
    return [sys.executable, "-W", "error", "-m", "ironbatch", "device", "--node", str(path), *flags]


def environment() -> dict[str, str]:
    """Of the processes that tests start, in whatever folder."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}


def start_node(path: str | Path, *flags: str) -> NodeProcess:
    """Start one and wait until it serves. Whoever calls this must end it: `end_node`."""
    process = subprocess.Popen(
        node_command(path, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], START_S)
    line = process.stdout.readline() if readable else ""
    if "serving" not in line:
        process.kill()
        _, told = process.communicate()
        raise AssertionError(f"the node does not serve: {line!r} {told!r}")
    return NodeProcess(str(path), process, line.rstrip("\n"))


def end_node(node: NodeProcess) -> None:
    """Whatever has become of it: nothing of it is left."""
    if node.process.poll() is None:
        node.process.send_signal(signal.SIGCONT)
        node.process.send_signal(signal.SIGTERM)
        try:
            node.process.wait(END_S)
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait(END_S)
    for stream in (node.process.stdout, node.process.stderr):
        if stream is not None:
            stream.close()
    clear_mount(node.path)


def clear_mount(path: str | Path) -> None:
    """Take away what a node that was killed has left."""
    while find_mount(str(path)) is not None:
        abort_connection(str(path))  # which may have unmounted it as well
        umount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        if find_mount(str(path)) is not None:
            subprocess.run([*umount, str(path)], check=True, timeout=END_S)


@contextlib.contextmanager
def running_node(folder: Path, *flags: str, name: str = "device0") -> Iterator[NodeProcess]:
    """A node at `folder / name`, for as long as the block lasts."""
    node = start_node(folder / name, *flags)
    try:
        yield node
    finally:
        end_node(node)


def process_state(pid: int) -> str:
    """As ps(1) has it: T stopped, D in an uninterruptible sleep, S asleep."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
