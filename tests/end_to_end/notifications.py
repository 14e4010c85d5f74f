"""The service manager's end of sd_notify(3): a socket that receives what a server says, and who has said it."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

SCM_CREDENTIALS = 2  # socket module: not before Python 3.14
TIMEOUT_S = 120.0  # a start may compile


class Notifications:
    """All messages so far, as lists of assignments, and the processes that sent them."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))
        self._socket.settimeout(0.05)
        self.messages: list[list[str]] = []
        self.senders: set[int] = set()

    def receive(self) -> None:
        """Take in what has come; wait for a moment if nothing has."""
        try:
            text, ancillary, _, _ = self._socket.recvmsg(4096, 256)
        except TimeoutError:
            return
        self.messages.append(text.decode().split("\n"))
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, SCM_CREDENTIALS):
                self.senders.add(struct.unpack("3i", data[:12])[0])

    def count(self, assignment: str, since: int = 0) -> int:
        """How many messages say this; an assignment may be cut short, such as `STATUS=serving`."""
        return sum(any(line.startswith(assignment) for line in message) for message in self.messages[since:])

    def wait_for(self, assignment: str, count: int = 1, since: int = 0) -> None:
        """Until that many messages from number `since` on say this."""
        self.wait_until(lambda: self.count(assignment, since) >= count, f"{count} x {assignment}")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Receive until `condition()` is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {TIMEOUT_S} s; {self.messages}"
            self.receive()

    def close(self) -> None:
        """Let later messages fail."""
        self._socket.close()
