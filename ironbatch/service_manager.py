"""The service manager that may have started this process, and what it is told: the protocol of sd_notify(3).

What systemd makes of it decides when which message may be sent (systemd.service(5), and service.c of systemd 252):

- The watchdog runs from READY=1 until the service stops, while it reloads too. A WATCHDOG=1 before or after would start
  it there and then, on a system that compiles or that lets its streams end; so there is none. TimeoutStartSec and
  TimeoutStopSec bound these times.
- A start or a reload ends with READY=1. Before the first, RELOADING=1 and STOPPING=1 mean nothing.
- NotifyAccess=main: only the main process is heard, so its children must not try. gunicorn would, with a READY=1 of its
  own, as soon as it finds NOTIFY_SOCKET.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

from ironbatch.clock import Clock

_log = logging.getLogger("ironbatch.supervisor")

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
"""What systemd says to its main process alone."""

BEATS_PER_WATCHDOG = 3
"""So that two may come late. sd_watchdog_enabled(3) asks for two."""

STATUS_EVERY_S = 10.0
"""How often the status is brought up to date where no watchdog asks for more."""

MIN_BEAT_S = 0.05
"""However short the watchdog's time is, this process has more to do than to beat."""

MAX_WATCHDOG_USEC = 2**64 - 1  # WATCHDOG_USEC is an unsigned word, and its highest value means "never"
MIN_WATCHDOG_S = 5.0
"""A busy machine may hold up any process for seconds, and what is not hung must not be killed."""

SEND_TIMEOUT_S = 1.0  # on a full queue; the supervisor has more to do than to wait for its reader
NS_PER_S = 1_000_000_000
US_PER_S = 1_000_000


class ServiceManager:
    """Tells it what state the service is in; without one, every method does nothing.

    A message that cannot be sent costs one warning, never the server.

    Args:
        address: NOTIFY_SOCKET's value, a path or `@` and an abstract name; None: there is nobody to tell.
        watchdog_s: seconds without a WATCHDOG=1 after which the service is killed; None: however many.
        clock: where "now" comes from; CLOCK_MONOTONIC, which systemd compares with its own.
    """

    def __init__(self, address: str | None, watchdog_s: float | None, clock: Clock) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        if address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.settimeout(SEND_TIMEOUT_S)
            self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._is_watched = False
        self._status = ""
        self._last_beat_ns = clock.now_ns()
        self._has_warned = False

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str], clock: Clock) -> ServiceManager:
        """The one that has started this process, if any. Removes its variables, which are no child's."""
        said = {name: environ.pop(name, "") for name in VARIABLES}
        address = said["NOTIFY_SOCKET"]
        if not address:
            return cls(None, None, clock)
        if address[0] not in "/@":
            _log.warning("the service manager is told nothing: NOTIFY_SOCKET is %r, not a path or @name", address)
            return cls(None, None, clock)
        return cls(address, _watchdog_s(said["WATCHDOG_USEC"], said["WATCHDOG_PID"]), clock)

    def starting(self, status: str, *, limit_s: float | None = None) -> None:
        """The start has come so far; from now it may take `limit_s`, if that is longer than it may take anyway."""
        self._send(*self._changed(status), *_extension(limit_s))

    def ready(self, status: str) -> None:
        """The service serves: for the first time, or again after a reload. From now on it is watched."""
        self._send("READY=1", *self._changed(status))
        self._is_watched = True
        self._last_beat_ns = self._clock.now_ns()

    def reloading(self) -> None:
        """A reload has begun; `ready` ends it."""
        microseconds = self._clock.now_ns() // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={microseconds}", *self._changed("replacing the web workers"))

    def stopping(self, status: str, *, limit_s: float | None = None) -> None:
        """The service ends, within `limit_s` if that is longer than it may take anyway. It is not watched any more."""
        self._is_watched = False
        self._send("STOPPING=1", *self._changed(status), *_extension(limit_s))

    def due_in_s(self) -> float | None:
        """Seconds until the next `beat`; None: never."""
        if self._socket is None:
            return None
        every_s = STATUS_EVERY_S
        if self._watchdog_s is not None:
            every_s = max(min(every_s, self._watchdog_s / BEATS_PER_WATCHDOG), MIN_BEAT_S)
        return max(every_s - (self._clock.now_ns() - self._last_beat_ns) / NS_PER_S, 0.0)

    def beat(self, status: str, *, is_making_progress: bool) -> None:
        """To be called when it is due. Without progress nobody feeds the watchdog."""
        self._last_beat_ns = self._clock.now_ns()
        feed = ["WATCHDOG=1"] if self._is_watched and is_making_progress and self._watchdog_s is not None else []
        self._send(*self._changed(status), *feed)

    def close(self) -> None:
        """Tell nobody anything more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _changed(self, status: str) -> list[str]:
        status = " ".join(status.split())  # a line feed would begin another assignment
        if status == self._status:
            return []
        self._status = status
        return [f"STATUS={status}"]

    def _send(self, *assignments: str) -> None:
        if self._socket is None or not assignments:
            return
        try:
            self._socket.sendto("\n".join(assignments).encode(), self._address or "")
        except OSError as problem:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the service manager cannot be told: %s; see NOTIFY_SOCKET", problem.strerror or problem)


def _extension(limit_s: float | None) -> list[str]:
    return [] if limit_s is None else [f"EXTEND_TIMEOUT_USEC={limit_s * US_PER_S:.0f}"]


def _watchdog_s(usec: str, pid: str) -> float | None:
    """The watchdog's time, or None if there is none or it is for another process (sd_watchdog_enabled(3))."""
    if not usec or (pid and pid != str(os.getpid())):
        return None
    is_number = usec.isascii() and usec.isdecimal() and len(usec) <= len(str(MAX_WATCHDOG_USEC))
    if not is_number or int(usec) > MAX_WATCHDOG_USEC:
        _log.warning("no watchdog is fed: WATCHDOG_USEC is %.60r, not a number of microseconds", usec)
        return None
    watchdog_s = int(usec) / US_PER_S
    if 0 < watchdog_s < MIN_WATCHDOG_S:
        _log.warning(
            "the watchdog's %g s are less than the %g s that a busy machine may hold up a healthy server;"
            " set WatchdogSec=%g or more",
            watchdog_s,
            MIN_WATCHDOG_S,
            MIN_WATCHDOG_S,
        )
    return watchdog_s or None
