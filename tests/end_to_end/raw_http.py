"""Raw bytes to a whole server, and what comes back."""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import dataclass

DEADLINE_S = 60.0


@dataclass
class Reply:
    """All that came until the server hung up. `was_reset`: it did so by a reset."""

    received: bytes
    was_reset: bool = False

    @property
    def statuses(self) -> list[int]:
        """Of all answers, interim ones aside."""
        found = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d\d\d) ", self.received)]
        return [status for status in found if status >= 200]

    @property
    def status(self) -> int:
        """Of the only answer."""
        (status,) = self.statuses
        return status

    @property
    def head(self) -> bytes:
        """Of the last answer, in lower case."""
        return self.received[self.received.rindex(b"HTTP/1.") :].partition(b"\r\n\r\n")[0].lower()

    @property
    def error(self) -> str:
        """The type of the last answer's error."""
        error_type: str = json.loads(self.received[self.received.rindex(b"\r\n\r\n") + 4 :])["error"]["type"]
        return error_type


def connect(port: int) -> socket.socket:
    """A connection of which no step takes longer than the deadline."""
    return socket.create_connection(("127.0.0.1", port), DEADLINE_S)


def read_to_end(connection: socket.socket) -> Reply:
    """Until the server hangs up, which it must before the deadline."""
    parts = []
    deadline = time.monotonic() + DEADLINE_S
    try:
        while part := connection.recv(1 << 20):
            parts.append(part)
            assert time.monotonic() < deadline, "the server goes on and on"
    except ConnectionError:
        return Reply(b"".join(parts), was_reset=True)
    return Reply(b"".join(parts))


def exchange(port: int, sent: bytes, *, shuts: bool = False) -> Reply:
    """Send, perhaps say that no more will come, and read to the end."""
    with connect(port) as connection:
        try:
            connection.sendall(sent)
            if shuts:
                connection.shutdown(socket.SHUT_WR)
        except ConnectionError:  # refused already; the answer may be there
            pass
        return read_to_end(connection)


def post(body: bytes, *headers: str, version: str = "1.1") -> bytes:
    """POST /generate."""
    lines = [f"POST /generate HTTP/{version}", "Host: test", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def get(target: str, *headers: str, version: str = "1.1") -> bytes:
    """GET."""
    return "\r\n".join([f"GET {target} HTTP/{version}", "Host: test", *headers, "", ""]).encode()
