"""Whether a client takes what is written to it, as the kernel knows.

The transport's own buffer does not tell: it only holds what the socket's has no room for, and that is megabytes. A
reader of a kilobyte a second would look dead for many minutes.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
import termios
from typing import Any

BYTES_ACKED = slice(120, 128)  # of struct tcp_info (linux/tcp.h): bytes that the peer has acknowledged, since Linux 4.1


class WriteProgress:
    """Of one connection. It knows as much as it is asked: `stalled_ns` compares with the question before.

    Args:
        transport: whose buffer holds what the socket does not take.
        now_ns: the time.
    """

    __slots__ = ("_acked", "_since_ns", "_socket", "_transport", "_unsent_bytes")

    def __init__(self, transport: Any, now_ns: int) -> None:
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._acked = 0
        self._unsent_bytes = 0
        self._since_ns = now_ns

    def stalled_ns(self, now_ns: int) -> int:
        """For how long something has waited of which the client has taken nothing; 0 if nothing waits."""
        unsent_bytes = self._transport.get_write_buffer_size() + _queued_bytes(self._socket)
        if unsent_bytes == 0:
            self._unsent_bytes, self._since_ns = 0, now_ns
            return 0
        acked = _acked_bytes(self._socket)
        is_first = self._unsent_bytes == 0
        if is_first or acked != self._acked or unsent_bytes < self._unsent_bytes:
            self._since_ns = now_ns
        self._acked, self._unsent_bytes = acked, unsent_bytes
        return now_ns - self._since_ns

    def forget_unsent(self) -> None:
        """The connection is about to be closed: the kernel shall not keep what it holds, and try for minutes more.

        The client then sees a reset, and cannot take what it has for a whole body.
        """
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _queued_bytes(connection: Any) -> int:
    """Bytes in the socket's buffer that the peer has not acknowledged (SIOCOUTQ of tcp(7), the number of TIOCOUTQ)."""
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:
        return 0
    return int.from_bytes(answer, sys.byteorder)


def _acked_bytes(connection: Any) -> int:
    """Bytes that the peer has acknowledged in all; 0 where that is not known, as of a Unix socket."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED.stop)
    except OSError:
        return 0
    return int.from_bytes(info[BYTES_ACKED], sys.byteorder)
