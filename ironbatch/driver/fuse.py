"""The FUSE wire protocol, as much of it as a file system needs that is one regular file, the root.

Names and layouts are those of Linux's include/uapi/linux/fuse.h; its protocol is described in
Documentation/filesystems/fuse/. Nothing here knows about Ironbatch.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
from enum import IntEnum
from typing import Final, NamedTuple

MAJOR: Final = 7
OLDEST_MINOR: Final = 28
"""Linux 4.20: before it, a reader can't tell an aborted connection from one whose mount is gone."""

NEWEST_MINOR: Final = 40
"""Linux 6.9, the first with passthrough: what is newer we do not use."""

ROOT_ID: Final = 1

MAX_WRITE_BYTES: Final = 64 << 10
BUFFER_BYTES: Final = MAX_WRITE_BYTES + 8192
"""The kernel refuses to fill a smaller buffer than max_write and a header. A request is an ioctl's 16 KiB at most."""


class Opcode(IntEnum):
    """What a request asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    ACCESS = 34
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    BATCH_FORGET = 42


UNANSWERED: Final = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})
"""The kernel waits for no reply to these, and takes none."""

_ABORT_ERROR: Final = 1 << 21
_INIT_EXT: Final = 1 << 30
_PASSTHROUGH: Final = 1 << 37
_WANTED: Final = _ABORT_ERROR | _INIT_EXT

OPEN_DIRECT_IO: Final = 1 << 0
OPEN_NO_FLUSH: Final = 1 << 5
OPEN_PASSTHROUGH: Final = 1 << 7

SET_MODE: Final = 1 << 0
SET_UID: Final = 1 << 1
SET_GID: Final = 1 << 2
SET_SIZE: Final = 1 << 3

POLL_SCHEDULE_NOTIFY: Final = 1 << 0
_NOTIFY_POLL: Final = 1

_BACKING_OPEN: Final = 0x4010E501  # _IOW(229, 1, struct fuse_backing_map)

IN_HEADER: Final = struct.Struct("<IIQQIIIHH")  # len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding
OUT_HEADER: Final = struct.Struct("<IiQ")  # len, error, unique
INIT_IN: Final = struct.Struct("<IIII")  # major, minor, max_readahead, flags; then flags2 if INIT_EXT
# major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran, max_pages,
# map_alignment, flags2, max_stack_depth, unused
INIT_OUT: Final = struct.Struct("<IIIIHHIIHHII24x")
# ino, size, blocks, three times, their nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags
ATTR: Final = struct.Struct("<QQQQQQIIIIIIIIII")
ATTR_OUT_HEAD: Final = struct.Struct("<QII")  # attr_valid, attr_valid_nsec, dummy; then ATTR
# valid, padding, fh, size, lock_owner, three times, their nanoseconds, mode, unused, uid, gid, unused
SETATTR_IN: Final = struct.Struct("<IIQQQQQQIIIIIIII")
OPEN_IN: Final = struct.Struct("<II")  # flags, open_flags
OPEN_OUT: Final = struct.Struct("<QIi")  # fh, open_flags, backing_id
RELEASE_IN: Final = struct.Struct("<QIIQ")  # fh, flags, release_flags, lock_owner
# blocks, bfree, bavail, files, ffree, bsize, namelen, frsize, padding, spare
STATFS_OUT: Final = struct.Struct("<QQQQQIIII24x")
INTERRUPT_IN: Final = struct.Struct("<Q")  # unique of the request that is to end
IOCTL_IN: Final = struct.Struct("<QIIQII")  # fh, flags, cmd, arg, in_size, out_size; then in_size bytes
IOCTL_OUT: Final = struct.Struct("<iIII")  # result, flags, in_iovs, out_iovs; then at most out_size bytes
POLL_IN: Final = struct.Struct("<QQII")  # fh, kh, flags, events
POLL_OUT: Final = struct.Struct("<II")  # revents, padding
NOTIFY_POLL_OUT: Final = struct.Struct("<Q")  # kh
BACKING_MAP: Final = struct.Struct("<iIQ")  # fd, flags, padding

assert IN_HEADER.size == 40
assert OUT_HEADER.size == 16
assert INIT_OUT.size == 64
assert ATTR.size == 88
assert SETATTR_IN.size == 88
assert STATFS_OUT.size == 80
assert IOCTL_IN.size == 32
assert IOCTL_OUT.size == 16

_HIGHEST_ERRNO: Final = 511  # the kernel takes no reply with a larger one


class Disconnected(Exception):
    """The kernel has ended the connection: its mount is gone, or `is_aborted`: somebody has cut it (fusectl)."""

    def __init__(self, *, is_aborted: bool) -> None:
        super().__init__("the FUSE connection was aborted" if is_aborted else "the FUSE connection is gone")
        self.is_aborted = is_aborted


class TooOld(Exception):
    """The kernel speaks a FUSE protocol that is too old for us."""


class Request(NamedTuple):
    """One request. `body` is valid until the next is read; it may be shorter than its opcode should have it."""

    opcode: int
    unique: int
    body: memoryview


class Negotiated(NamedTuple):
    """What the kernel and we have agreed on."""

    minor: int
    has_passthrough: bool


class Connection:
    """One mounted file system's end of /dev/fuse. For one thread; `fd` is ours from now on, and not blocking."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._buffers = [self._buffer]

    def read(self) -> Request | None:
        """The next request, or None: there is none yet. Raises Disconnected."""
        while True:
            try:
                count = os.readv(self.fd, self._buffers)
            except BlockingIOError:
                return None
            except OSError as problem:
                if problem.errno == errno.ENOENT:  # it was interrupted while we read it
                    continue
                if problem.errno in {errno.ENODEV, errno.ECONNABORTED}:
                    raise Disconnected(is_aborted=problem.errno == errno.ECONNABORTED) from None
                raise
            if count < IN_HEADER.size:  # no kernel does this, and there is no number to answer to
                continue
            length, opcode, unique, *_ = IN_HEADER.unpack_from(self._buffer)
            return Request(opcode, unique, self._view[IN_HEADER.size : max(IN_HEADER.size, min(length, count))])

    def reply(self, unique: int, data: bytes = b"") -> bool:
        """Answer a request. Returns whether there is still somebody who waits for that."""
        return self._write(OUT_HEADER.pack(OUT_HEADER.size + len(data), 0, unique) + data)

    def reply_error(self, unique: int, code: int) -> None:
        """Answer a request with an errno. Nothing happens if nobody waits for it any more."""
        if not 0 < code <= _HIGHEST_ERRNO:
            code = errno.EIO
        self._write(OUT_HEADER.pack(OUT_HEADER.size, -code, unique))

    def notify_poll(self, handle: int) -> None:
        """Wake whoever polls: the kernel then asks for the events anew."""
        self._write(
            OUT_HEADER.pack(OUT_HEADER.size + NOTIFY_POLL_OUT.size, _NOTIFY_POLL, 0) + NOTIFY_POLL_OUT.pack(handle)
        )

    def negotiate(self, timeout_s: float = 10.0) -> Negotiated:
        """Answer INIT, the first request of all.

        Raises:
            TooOld: the kernel is; `str` says which protocol it speaks.
            Disconnected: the mount is already gone.
        """
        while (request := self.read()) is None:
            if not select.select([self.fd], [], [], timeout_s)[0]:
                raise Disconnected(is_aborted=False)
        if request.opcode != Opcode.INIT or len(request.body) < INIT_IN.size:
            raise TooOld(f"its first request is {request.opcode}, not INIT")
        major, minor, readahead, flags = INIT_IN.unpack_from(request.body)
        if major != MAJOR or minor < OLDEST_MINOR:
            self.reply_error(request.unique, errno.EPROTO)
            raise TooOld(f"it speaks FUSE {major}.{minor}, and {MAJOR}.{OLDEST_MINOR} is needed (Linux 4.20)")
        if flags & _INIT_EXT and len(request.body) >= INIT_IN.size + 4:
            flags |= int.from_bytes(request.body[INIT_IN.size : INIT_IN.size + 4], "little") << 32
        granted = flags & (_WANTED | _PASSTHROUGH)
        stack_depth = 1 if granted & _PASSTHROUGH else 0  # the backing file lies on no stacked file system
        answer = INIT_OUT.pack(
            MAJOR,
            min(minor, NEWEST_MINOR),
            readahead,
            granted & 0xFFFFFFFF,
            16,
            12,
            MAX_WRITE_BYTES,
            1,
            0,
            0,
            granted >> 32,
            stack_depth,
        )
        self.reply(request.unique, answer)
        return Negotiated(minor, bool(granted & _PASSTHROUGH))

    def open_backing(self, fd: int) -> int:
        """Register an open file whose pages a passthrough mapping shows. Returns its id.

        Raises:
            OSError: EPERM without CAP_SYS_ADMIN, others if the kernel can't do it.
        """
        # The id is what ioctl(2) returns, and Python returns that only for a buffer that it can write.
        backing_id: int = fcntl.ioctl(self.fd, _BACKING_OPEN, bytearray(BACKING_MAP.pack(fd, 0, 0)))
        return backing_id

    def close(self) -> None:
        """End the connection: whoever waits for an answer gets an error."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _write(self, message: bytes) -> bool:
        try:
            os.write(self.fd, message)
        except OSError:  # ENOENT: the request has ended meanwhile. ENODEV: the mount has; `read` will say so.
            return False
        return True
