"""What a power cut leaves in /dev/shm is swept by the next start; what a living instance holds there never is."""

from __future__ import annotations

import logging
import os
import random
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ironbatch import layout
from ironbatch.shm import stale
from ironbatch.shm.segment import Segment
from tests.support import small_config, wait_until

SHM = Path("/dev/shm")
ROOT = Path(__file__).parents[2]

# Made without a resource tracker, which is what is left of an instance when all of it is killed at once.
PROGRAM = """
import os, random, sys, time
from multiprocessing import resource_tracker
resource_tracker.register = resource_tracker.unregister = lambda name, rtype: None
from ironbatch.config import Config
from ironbatch.shm import segment
segment.NAME_PREFIX = sys.argv[1]
def create():
    return segment.Segment.create(Config(max_queued_requests=1, max_running_seqs=1, max_model_len=64), 0)
"""


def program(prefix: str, body: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of its own that begins with PROGRAM."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("IRONBATCH_INTERNAL")}
    words = [sys.executable, "-W", "error", "-c", PROGRAM + textwrap.dedent(body), prefix, *arguments]
    return subprocess.Popen(
        words, cwd=ROOT, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def creator(prefix: str, more: str = "") -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a segment and now waits, and the segment's file."""
    process = program(prefix, f"made = create()\n{more}\nprint(made.name, flush=True)\nsys.stdin.read()\n")
    assert process.stdout is not None
    return process, SHM / process.stdout.readline().strip()


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=30)


def sweep(prefix: str) -> None:
    stale.remove_stale(str(SHM), prefix)


# --------------------------------------------------------------------------------------------------------------- stale


def test_the_next_start_removes_what_a_power_cut_has_left(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    process, path = creator(prefix)
    killed(process)
    assert path.exists(), "or the test proves nothing"
    segment = Segment.create(small_config(), 0)
    try:
        assert not path.exists()
        assert (SHM / segment.name).exists()
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert lines[0].startswith(f"removed {path} (")
    finally:
        segment.close()


def test_all_of_them(prefix: str) -> None:
    left = [creator(prefix) for _ in range(3)]
    for process, _ in left:
        killed(process)
    sweep(prefix)
    assert not any(path.exists() for _, path in left)


@pytest.mark.parametrize("age_s", [0.0, stale.UNFINISHED_S + 1])
def test_one_whose_making_was_cut_off_is_removed_when_it_is_old(
    prefix: str, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    path = SHM / f"{prefix}{secrets.token_hex(6)}"
    path.write_bytes(bytes(4096))
    now_s = time.time()
    monkeypatch.setattr(stale, "time", type("Time", (), {"time": staticmethod(lambda: now_s + age_s)}))
    sweep(prefix)
    assert path.exists() == (age_s == 0)
    path.unlink(missing_ok=True)


def test_an_empty_one_too(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between shm_open and ftruncate."""
    path = SHM / f"{prefix}{secrets.token_hex(6)}"
    path.touch()
    sweep(prefix)
    assert path.exists()
    monkeypatch.setattr(stale, "UNFINISHED_S", -1.0)
    sweep(prefix)
    assert not path.exists()


# -------------------------------------------------------------------------------------------------------------- living


def test_a_living_instances_is_left(prefix: str) -> None:
    process, path = creator(prefix)
    sweep(prefix)
    assert path.exists()
    process.send_signal(signal.SIGSTOP)  # it lives all the same
    sweep(prefix)
    assert path.exists()
    killed(process)
    sweep(prefix)
    assert not path.exists()


def test_ones_own_is_left(prefix: str) -> None:
    segment = Segment.create(small_config(), 0)
    sweep(prefix)
    assert (SHM / segment.name).exists()
    segment.close()


def test_as_long_as_a_forked_child_lives_its_instance_does(prefix: str) -> None:
    """A scheduler that sits in a call to its device outlives its supervisor's SIGKILL."""
    fork = "child = os.fork()\nif child == 0:\n    os.close(1)\n    time.sleep(600)\nprint(child, flush=True)"
    process = program(prefix, f"made = create()\n{fork}\nprint(made.name, flush=True)\nsys.stdin.read()\n")
    assert process.stdout is not None
    child, path = int(process.stdout.readline()), SHM / process.stdout.readline().strip()
    process.kill()
    process.wait(30)
    sweep(prefix)
    assert path.exists()
    os.kill(child, signal.SIGKILL)
    process.communicate(timeout=30)
    wait_until(lambda: (sweep(prefix), not path.exists())[1], what="the child's end")


def test_an_executed_child_does_not_keep_it(prefix: str) -> None:
    """The resource tracker, gunicorn: they hold no lock, or a leftover could outlive all who use it."""
    start = "import subprocess; child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, close_fds=False)"
    process = program(prefix, f"made = create()\n{start}\nprint(child.pid, made.name, flush=True)\nsys.stdin.read()\n")
    assert process.stdout is not None
    child, name = process.stdout.readline().split()
    process.kill()
    process.wait(30)
    try:
        sweep(prefix)
        assert not (SHM / name).exists()
    finally:
        os.kill(int(child), signal.SIGKILL)
        process.communicate(timeout=30)


def test_what_is_not_ours_is_left(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale, "UNFINISHED_S", -1.0)
    head = layout.MAGIC.to_bytes(8, "little")
    stale_head = head + layout.FIRST_LOCKED_LAYOUT.to_bytes(8, "little")
    (tmp_path / "target").write_bytes(stale_head.ljust(4096, b"\0"))
    older, other, link, fifo, folder, odd = (SHM / f"{prefix}{secrets.token_hex(6)}{end}" for end in ("",) * 5 + ("x",))
    # Of a version whose living instances hold no lock.
    older.write_bytes((head + (layout.FIRST_LOCKED_LAYOUT - 1).to_bytes(8, "little")).ljust(4096, b"\0"))
    odd.touch()  # as one whose making was cut off, but it is named otherwise
    other.write_bytes(b"somebody else's data".ljust(4096, b"\0"))
    link.symlink_to(tmp_path / "target")
    os.mkfifo(fifo)
    folder.mkdir()
    sweep(prefix)
    assert (tmp_path / "target").exists()
    for path in (older, other, link, fifo, odd):
        assert os.path.lexists(path), path
        path.unlink()
    folder.rmdir()


def test_another_users_is_left(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process, path = creator(prefix)
    killed(process)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    sweep(prefix)
    assert path.exists()
    monkeypatch.undo()
    sweep(prefix)
    assert not path.exists()


def test_without_the_directory_there_is_nothing_to_do(tmp_path: Path) -> None:
    stale.remove_stale(str(tmp_path / "nowhere"), "ironbatch-")


# --------------------------------------------------------------------------------------------------------------- races

STARTER = """
rng = random.Random(int(sys.argv[2]))
for round in range(int(sys.argv[3])):
    made = create()
    path = "/dev/shm/" + made.name
    for _ in range(rng.randrange(20)):
        assert os.path.exists(path), "a living instance's segment was removed"
        time.sleep(rng.random() / 2000)
    assert made.header["magic"]
    if rng.random() < 0.3:  # left behind, by whoever is killed next
        child = os.fork()
        if child == 0:
            left = create()
            os.kill(os.getpid(), 9)
        os.waitpid(child, 0)
    assert os.path.exists(path), "a living instance's segment was removed"
    made.close()
    assert not os.path.exists(path)
"""


@pytest.mark.race
def test_many_starts_at_once_remove_what_is_stale_and_nothing_else(prefix: str) -> None:
    starters = [program(prefix, STARTER, str(seed), "60") for seed in random.sample(range(10**6), 6)]
    failures = []
    for process in starters:
        out, err = process.communicate(timeout=300)
        if process.returncode:
            failures.append(out + err)
    assert not failures, failures[0]
    sweep(prefix)
    assert not list(SHM.glob(f"{prefix}*"))


def test_the_control_without_locks_that_race_is_lost(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    """A creator that takes no lock looks like a dead one."""
    caplog.set_level(logging.ERROR)
    process, path = creator(prefix, "os.close(made._lock); made._lock = -1")
    sweep(prefix)
    assert not path.exists()
    killed(process)
