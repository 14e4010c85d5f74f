"""Writing lines to a descriptor that may be anything, without waiting for whoever reads it."""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Callable
from typing import Final

PATIENCE_MS: Final = 50
"""How long a line waits for a reader that is behind. One that has not come by then is not waited for again."""


class LineWriter:
    """Writes whole lines to a descriptor that other processes write to as well, and does not wait for its reader.

    A descriptor's O_NONBLOCK is shared with everybody who has inherited it, and not ours to set. So a pipe or a
    terminal is opened anew, and a socket asked not to wait in each call. Files are written as they are.

    Args:
        descriptor: stays open, and may be closed already: then every line is lost.
    """

    def __init__(self, descriptor: int) -> None:
        self._is_behind = False
        self._is_torn = False
        self._own_descriptor = _reopened(descriptor)
        self._socket: socket.socket | None = None
        self._descriptor = descriptor if self._own_descriptor is None else self._own_descriptor
        self._write = self._way_out()

    def try_write(self, line: str) -> bool:
        """Write a line, whose end is added. False: it is lost, or its end is."""
        # A line that was cut must not swallow the beginning of the next.
        data = (b"\n" if self._is_torn else b"") + line.encode("utf-8", "backslashreplace") + b"\n"
        rest = data
        while rest:
            try:
                rest = rest[self._write(rest) :]
            except BlockingIOError:
                if self._is_behind or not self._wait():
                    self._is_behind = True
                    break
            except OSError:
                break
        else:
            self._is_behind = self._is_torn = False
            return True
        self._is_torn |= len(rest) < len(data)
        return False

    def close(self) -> None:
        """Close what it has opened itself."""
        if self._socket is not None:
            self._socket.close()
        if self._own_descriptor is not None:
            os.close(self._own_descriptor)
            self._own_descriptor = None
            self._descriptor = -1

    def _way_out(self) -> Callable[[bytes], int]:
        try:
            mode = os.fstat(self._descriptor).st_mode
            if stat.S_ISSOCK(mode):
                self._socket = socket.socket(fileno=os.dup(self._descriptor))
                return self._without_waiting
        except OSError:
            return self._plain
        may_block = self._own_descriptor is None and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode))
        return self._carefully if may_block else self._plain

    def _without_waiting(self, data: bytes) -> int:
        assert self._socket is not None
        return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _plain(self, data: bytes) -> int:
        return os.write(self._descriptor, data)

    def _carefully(self, data: bytes) -> int:
        """For a pipe that could not be opened anew, being another user's: what poll(2) says that there is room for."""
        if not self._wait(0):
            raise BlockingIOError
        return os.write(self._descriptor, data[: select.PIPE_BUF])

    def _wait(self, timeout_ms: int = PATIENCE_MS) -> bool:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        return bool(poller.poll(timeout_ms))


def _reopened(descriptor: int) -> int | None:
    """A pipe or a terminal as a descriptor of our own that does not block; None where that can't be had."""
    try:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
            return None
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:
        return None
