"""What `ironbatch serve` tells a service manager, and when: the other end is a test's socket in systemd's place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ironbatch.config import Config
from ironbatch.draining import STOP_BEYOND_DRAIN_S
from tests.end_to_end.notifications import Notifications
from tests.end_to_end.server import Server, command, running, segments_of, wait_until

pytestmark = pytest.mark.end_to_end

WATCHDOG_USEC = "600000"  # three beats, 0.2 s apart
SLOW_START = '''
"""A mock that starts when a file is there."""
import os, time
from ironbatch.backends.mock import MockBackend

class SlowStart(MockBackend):
    def start(self, kv, limits):
        while not os.path.exists({gate!r}):
            time.sleep(0.01)
'''


@pytest.fixture
def notifications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notifications]:
    path = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    monkeypatch.setenv("WATCHDOG_USEC", WATCHDOG_USEC)
    found = Notifications(path)
    yield found
    found.close()


def install_slow_start(directory: Path, gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip would: a module, and the entry point that names it."""
    (directory / "slowstart.py").write_text(SLOW_START.format(gate=str(gate)))
    info = directory / "slowstart-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slowstart\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ironbatch.backends]\nslowstart = slowstart:SlowStart\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")])))


def note_who_knows(directory: Path) -> None:
    """Each Python program that finds NOTIFY_SOCKET leaves a file: gunicorn, for one, would say READY=1 in its own time.

    (A process that has named itself has no readable /proc/PID/environ left.)
    """
    code = f"import os; 'NOTIFY_SOCKET' in os.environ and open(f'{directory}/{{os.getpid()}}.knows', 'w').close()"
    (directory / "sitecustomize.py").write_text(code)


def test_ready_is_said_when_health_is_200_and_a_backend_that_starts_is_no_reason_to_be_killed(
    notifications: Notifications, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, log = tmp_path / "gate", tmp_path / "log"
    install_slow_start(tmp_path, gate, monkeypatch)
    note_who_knows(tmp_path)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    words, environ = command("serve", {"addr": f"127.0.0.1:{port}", "backend": "slowstart"})
    with log.open("wb") as output:
        process = subprocess.Popen(words, env=environ, cwd="/", stdout=output, stderr=output)
    server = Server(process, port, [], "")

    def health() -> int:
        try:
            return server.get("/health")[0]
        except OSError:
            return 0

    try:
        wait_until(lambda: health() == 503, "an answer of a server that is not ready", 120)
        notifications.wait_for("STATUS=not serving yet: the scheduler is starting")
        assert notifications.count("READY=1") == notifications.count("WATCHDOG=1") == 0
        assert "serving on" not in log.read_text()
        gate.touch()
        notifications.wait_for("READY=1")
        assert health() == 200
        assert ["READY=1", f"STATUS=serving on http://127.0.0.1:{port}"] in notifications.messages
        notifications.wait_for("WATCHDOG=1", 3)
        assert f"serving on http://127.0.0.1:{port}\n" in log.read_text()

        # The next scheduler's backend takes longer to start than any step may: /health tells, the watchdog is fed.
        gate.unlink()
        server.scheduler().kill()
        notifications.wait_for("STATUS=not serving: the scheduler has made no progress")
        assert health() == 503
        notifications.wait_for("WATCHDOG=1", 3, since=len(notifications.messages))
        gate.touch()
        restarted = f"STATUS=serving on http://127.0.0.1:{port}; restarts of the scheduler: 1"
        notifications.wait_for(restarted, since=len(notifications.messages))
        assert health() == 200

        (server.segment,) = segments_of(process.pid)
        assert server.stop() == 0
        server.assert_nothing_left()
        assert notifications.senders == {process.pid}
        assert [path.name for path in tmp_path.glob("*.knows")] == [f"{process.pid}.knows"]
    finally:
        process.kill()
        process.wait()
        print(log.read_text())


def test_a_scheduler_that_hangs_starves_the_watchdog_and_one_that_dies_does_not(notifications: Notifications) -> None:
    with running() as server:
        notifications.wait_for("WATCHDOG=1")
        assert "0.6 s are less than the 5 s" in "".join(server.output)
        scheduler = server.scheduler()
        scheduler.suspend()
        stalled = "STATUS=not serving: the scheduler has made no progress"
        notifications.wait_for(stalled)
        since = len(notifications.messages)
        notifications.wait_for(stalled, 4, since)  # more beats than the watchdog waits for
        assert notifications.count("WATCHDOG=1", since) == 0
        scheduler.resume()
        notifications.wait_for("WATCHDOG=1", 2, since)

        scheduler.kill()
        since = len(notifications.messages)
        notifications.wait_for("WATCHDOG=1", 3, since)
        assert notifications.count(stalled, since) == 0
        assert notifications.count("READY=1") == 1
        assert notifications.senders == {server.process.pid}


def test_a_reload_ends_when_new_workers_serve_and_nothing_is_fed_after_the_stop(notifications: Notifications) -> None:
    with running() as server:
        notifications.wait_for("READY=1")
        old = {worker.pid for worker in server.processes("web worker")}
        since = len(notifications.messages)
        server.process.send_signal(signal.SIGHUP)
        notifications.wait_for("RELOADING=1", 1, since)
        (message,) = [message for message in notifications.messages[since:] if "RELOADING=1" in message]
        assert message[1].startswith("MONOTONIC_USEC=")
        notifications.wait_for("READY=1", 1, since)
        assert len({worker.pid for worker in server.processes("web worker")} - old) == 2
        assert server.is_healthy()
        since = len(notifications.messages)
        assert server.stop() == 0
        notifications.wait_for("STOPPING=1", 1, since)
        notifications.receive()
        stop = next(k for k, message in enumerate(notifications.messages) if "STOPPING=1" in message)
        assert notifications.count("WATCHDOG=1", stop) == 0
        assert "STATUS=told to stop; running streams may end" in notifications.messages[stop]
        (extension,) = [word for word in notifications.messages[stop] if word.startswith("EXTEND_TIMEOUT_USEC=")]
        assert int(extension.partition("=")[2]) > (Config().drain_timeout_s + STOP_BEYOND_DRAIN_S) * 10**6


def test_a_start_that_fails_says_why(
    notifications: Notifications, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_slow_start(tmp_path, tmp_path, monkeypatch)
    module = tmp_path / "slowstart.py"
    module.write_text(module.read_text() + "        1 / 0\n")
    words, environ = command("serve", {"backend": "slowstart"})
    done = subprocess.run(words, env=environ, cwd="/", capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    notifications.wait_for("STATUS=the scheduler cannot start")
    assert notifications.count("READY=1") == 0


def test_a_service_manager_that_cannot_be_told_costs_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    monkeypatch.setenv("WATCHDOG_USEC", WATCHDOG_USEC)
    with running(workers=1) as server:
        assert server.stop(signal.SIGINT) == 0
        warnings = [line for line in server.output if "service manager" in line]
        assert len(warnings) == 1, warnings
