"""What the service manager is told, over a real socket and with a clock that stands still."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ironbatch.clock import FakeClock
from ironbatch.service_manager import MIN_BEAT_S, MIN_WATCHDOG_S, STATUS_EVERY_S, ServiceManager
from tests.shm.descriptors import open_descriptors

NS_PER_S = 1_000_000_000


class Listener:
    """The service manager's end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(0)

    def read(self) -> list[str]:
        """What has come since the last time."""
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    found = Listener(str(tmp_path / "notify") if request.param == "path" else f"@ironbatch-test-{os.getpid()}")
    yield found
    found.close()


@pytest.fixture(autouse=True)
def closed_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every manager of a test is closed at its end."""
    with contextlib.ExitStack() as stack:
        init = ServiceManager.__init__

        def noted(self: ServiceManager, *arguments: Any) -> None:
            init(self, *arguments)
            stack.enter_context(contextlib.closing(self))

        monkeypatch.setattr(ServiceManager, "__init__", noted)
        yield


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000 * NS_PER_S)


def manager_of(listener: Listener, clock: FakeClock, watchdog_s: float | None = 30) -> ServiceManager:
    environ = {"NOTIFY_SOCKET": listener.address}
    if watchdog_s is not None:
        environ |= {"WATCHDOG_USEC": f"{watchdog_s * 1e6:.0f}", "WATCHDOG_PID": str(os.getpid())}
    return ServiceManager.from_environ(environ, clock)


def test_a_life(listener: Listener, clock: FakeClock) -> None:
    manager = manager_of(listener, clock)
    manager.starting("compiling", limit_s=600)
    manager.starting("starting")
    manager.ready("serving")
    manager.reloading()
    manager.ready("serving")
    manager.stopping("told to stop", limit_s=310)
    assert listener.read() == [
        "STATUS=compiling\nEXTEND_TIMEOUT_USEC=600000000",
        "STATUS=starting",
        "READY=1\nSTATUS=serving",
        "RELOADING=1\nMONOTONIC_USEC=1000000000\nSTATUS=replacing the web workers",
        "READY=1\nSTATUS=serving",
        "STOPPING=1\nSTATUS=told to stop\nEXTEND_TIMEOUT_USEC=310000000",
    ]


def test_the_watchdog_is_fed_from_ready_until_the_stop_while_there_is_progress(
    listener: Listener, clock: FakeClock
) -> None:
    manager = manager_of(listener, clock)

    def told(*, is_making_progress: bool = True) -> list[str]:
        clock.advance_ns(10 * NS_PER_S)
        assert manager.due_in_s() == 0
        manager.beat("the same", is_making_progress=is_making_progress)
        return listener.read()

    manager.starting("the same")
    listener.read()
    assert told() == [], "it would start the watchdog before the service is ready"
    manager.ready("the same")
    assert listener.read() == ["READY=1"]
    assert told() == ["WATCHDOG=1"]
    assert told(is_making_progress=False) == []
    assert told() == ["WATCHDOG=1"]
    manager.reloading()
    listener.read()
    assert told() == ["STATUS=the same\nWATCHDOG=1"]
    manager.stopping("the same")
    assert listener.read() == ["STOPPING=1"]
    assert told() == [], "it would start the watchdog anew, over streams that may end"


@pytest.mark.parametrize(
    ("watchdog_s", "every_s"),
    [(30, 10), (12, 4), (6, 2), (3600, STATUS_EVERY_S), (None, STATUS_EVERY_S), (0, STATUS_EVERY_S)],
)
def test_when_a_beat_is_due(listener: Listener, clock: FakeClock, watchdog_s: float | None, every_s: float) -> None:
    manager = manager_of(listener, clock, watchdog_s)
    manager.ready("serving")
    listener.read()
    assert manager.due_in_s() == every_s
    clock.advance_ns(NS_PER_S)
    assert manager.due_in_s() == every_s - 1
    clock.advance_ns(3600 * NS_PER_S)
    assert manager.due_in_s() == 0
    manager.beat("serving", is_making_progress=True)
    assert manager.due_in_s() == every_s
    assert listener.read() == (["WATCHDOG=1"] if watchdog_s else [])


def test_a_status_is_told_once_and_is_one_line(listener: Listener, clock: FakeClock) -> None:
    manager = manager_of(listener, clock, None)
    for status in ("one\nREADY=1", "one READY=1", "two"):
        manager.beat(status, is_making_progress=True)
    assert listener.read() == ["STATUS=one READY=1", "STATUS=two"]


def test_its_variables_are_nobody_elses(listener: Listener, clock: FakeClock) -> None:
    environ = {
        "HOME": "/",
        "NOTIFY_SOCKET": listener.address,
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": "1",
        "LISTEN_PID": "1",
        "LISTEN_FDS": "2",
        "LISTEN_FDNAMES": "a:b",
    }
    ServiceManager.from_environ(environ, clock)
    assert environ == {"HOME": "/"}


def test_a_watchdog_of_another_process_is_not_fed(listener: Listener, clock: FakeClock) -> None:
    manager = ServiceManager.from_environ(
        {"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "6000000", "WATCHDOG_PID": str(os.getpid() + 1)}, clock
    )
    manager.ready("serving")
    assert manager.due_in_s() == STATUS_EVERY_S
    manager.beat("serving", is_making_progress=True)
    assert listener.read() == ["READY=1\nSTATUS=serving"]


def test_without_a_service_manager_it_does_nothing(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    before = open_descriptors()
    for environ in ({}, {"NOTIFY_SOCKET": ""}, {"WATCHDOG_USEC": "1000000"}):
        manager = ServiceManager.from_environ(environ, clock)
        manager.starting("starting", limit_s=1)
        manager.ready("serving")
        manager.reloading()
        manager.beat("serving", is_making_progress=True)
        manager.stopping("told to stop")
        assert manager.due_in_s() is None
    assert open_descriptors() == before
    assert not caplog.records


@pytest.mark.parametrize("address", ["vsock:2:1234", "relative", "-"])
def test_an_address_that_it_cannot_use_is_one_warning(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    manager = ServiceManager.from_environ({"NOTIFY_SOCKET": address}, clock)
    manager.ready("serving")
    (record,) = caplog.records
    assert repr(address) in record.message
    assert manager.due_in_s() is None


@pytest.mark.parametrize("address", ["/nowhere/at/all", "@nobody-listens-here", "/" + "x" * 200])
def test_a_message_that_cannot_be_sent_is_one_warning(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    manager = ServiceManager.from_environ({"NOTIFY_SOCKET": address}, clock)
    manager.ready("serving")
    manager.reloading()
    manager.stopping("told to stop")
    (record,) = caplog.records
    assert record.message.startswith("the service manager cannot be told: ")


def test_a_full_queue_holds_nobody_up_for_long(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ironbatch.service_manager.SEND_TIMEOUT_S", 0.01)
    listener = Listener(str(tmp_path / "notify"))
    manager = manager_of(listener, clock)
    while not caplog.records:
        manager.ready("serving")
    assert "cannot be told: timed out" in caplog.text
    listener.read()
    manager.stopping("told to stop")
    assert listener.read() == ["STOPPING=1\nSTATUS=told to stop"]
    listener.close()


def test_a_watchdog_too_short_for_a_busy_machine_is_told(
    listener: Listener, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    manager_of(listener, clock, MIN_WATCHDOG_S)
    assert not caplog.records
    manager = manager_of(listener, clock, 1.5)
    (record,) = caplog.records
    assert "1.5 s" in record.message
    assert f"WatchdogSec={MIN_WATCHDOG_S:g}" in record.message
    assert manager.due_in_s() == 0.5, "it is fed nevertheless"


def test_however_short_a_watchdog_is_this_process_does_more_than_feed_it(listener: Listener, clock: FakeClock) -> None:
    assert manager_of(listener, clock, 1e-6).due_in_s() == MIN_BEAT_S


@pytest.mark.parametrize("usec", ["-1", "1e6", "soon", "٣", str(2**64), "9" * 400, "9" * 5_000])
def test_a_watchdog_that_is_no_number_is_not_fed(
    listener: Listener, clock: FakeClock, caplog: pytest.LogCaptureFixture, usec: str
) -> None:
    manager = ServiceManager.from_environ({"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": usec}, clock)
    assert repr(usec)[:60] in caplog.text
    assert manager.due_in_s() == STATUS_EVERY_S
