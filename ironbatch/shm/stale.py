"""Segments that nobody will remove any more: their instance and its resource tracker were killed, or the power failed.

A creator holds a lock (flock(2)) on its segment's file, and processes that are forked from it share the lock. The
kernel drops it when the last of them has ended, whatever they died of. So whoever gets the lock has the proof that
nobody lives: pids and times would prove nothing, in another container least of all.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import struct
import time

from ironbatch import layout

_log = logging.getLogger("ironbatch.shm")

UNFINISHED_S = 60.0
"""Between its making and the lock a segment is nobody's, for microseconds; one without a magic is left for so long."""

_HEAD = struct.Struct("<qq")  # magic, layout version

_TOKEN = re.compile("[0-9a-f]{12}")
"""What a segment's name has behind the prefix; a file that is named otherwise is somebody else's."""


def hold(path: str) -> int:
    """Lock a segment's file, which this process has just made. Returns the descriptor that holds the lock.

    Waits for somebody who looks at the file in just this moment. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_stale(directory: str, prefix: str) -> None:
    """Remove this user's segments whose instance is dead; each is logged. Never a living one's."""
    with contextlib.suppress(OSError):  # no such directory: making a segment says so
        for name in os.listdir(directory):
            if name.startswith(prefix) and _TOKEN.fullmatch(name.removeprefix(prefix)):
                _remove_if_stale(f"{directory}/{name}")


def _remove_if_stale(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # another user's, or gone
        return
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_stale(descriptor, status):
            os.unlink(path)
            size_mib = status.st_size / 2**20
            _log.warning("removed %s (%.1f MiB), which an instance that was killed has left behind", path, size_mib)
    except OSError:  # it is locked by its instance, or another start has removed it
        pass
    finally:
        os.close(descriptor)


def _is_stale(descriptor: int, status: os.stat_result) -> bool:
    """Whether a segment whose lock this process holds is an instance's that has ended."""
    head = os.pread(descriptor, _HEAD.size, 0).ljust(_HEAD.size, b"\0")
    magic, version = _HEAD.unpack(head)
    if magic == layout.MAGIC:
        return bool(version >= layout.FIRST_LOCKED_LAYOUT)
    return magic == 0 and time.time() - status.st_ctime > UNFINISHED_S
