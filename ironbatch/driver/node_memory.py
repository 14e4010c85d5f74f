"""The memory that a node and its clients share: one anonymous file of a fixed size."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

import numpy as np

from ironbatch.driver import abi
from ironbatch.driver.fuse import Connection
from ironbatch.driver.options import AUTO, NAMED
from ironbatch.errors import StartError

_REMEDY = "lower --blocks, --block-bytes, --ring-bytes or --contexts"


class NodeMemory:
    """A memfd, mapped here as `array`, uint8[size_bytes].

    It can neither shrink nor grow: a page that has gone would kill whoever looks at it, with SIGBUS. It has no name in
    the file system, so that nothing is left behind when its makers are killed.

    Raises:
        StartError: there is not so much memory.
    """

    def __init__(self, size_bytes: int) -> None:
        there_is = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size_bytes > there_is:
            raise StartError(
                f"the device takes {size_bytes} bytes of memory, and this machine has {there_is}; {_REMEDY}"
            )
        self.fd = os.memfd_create("ironbatch-device", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.array = np.frombuffer(mmap.mmap(self.fd, size_bytes), np.uint8)
        except (OSError, ValueError) as problem:
            os.close(self.fd)
            if getattr(problem, "errno", None) == errno.EMFILE:  # mmap has its own descriptor
                raise
            raise StartError(
                f"{size_bytes} bytes of memory for the device can't be had: {problem}; {_REMEDY}"
            ) from None

    def packed_path(self) -> bytes:
        """What GET_MEM_PATH answers."""
        found = os.fstat(self.fd)
        path = f"/proc/{os.getpid()}/fd/{self.fd}".encode()
        return bytes(abi.GET_MEM_PATH.pack(st_dev=found.st_dev, st_ino=found.st_ino, size=found.st_size, path=path))

    def offer(self, connection: Connection, way: str, *, has_passthrough: bool) -> int:
        """Register it for passthrough. Returns the backing id, 0 if clients must open it by its name.

        Raises:
            StartError: passthrough is asked for, and there is none.
        """
        if way == NAMED:
            return 0
        reason = "the kernel grants none"
        if has_passthrough:
            try:
                return connection.open_backing(self.fd)
            except OSError as problem:
                reason = os.strerror(problem.errno or errno.EPERM)
        if way == AUTO:
            return 0
        raise StartError(
            f"--memory passthrough: {reason}; it needs Linux 6.9 and root: use --memory auto, or --memory named"
        )

    def close(self) -> None:
        """Let go of the file. Clients keep what they have mapped."""
        with contextlib.suppress(OSError):
            os.close(self.fd)
