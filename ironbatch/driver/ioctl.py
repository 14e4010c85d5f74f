"""A device behind a node in the file system: a real card's, or the reference node's; the calls are the same."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import stat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ironbatch.driver import abi
from ironbatch.driver.abi import Message
from ironbatch.driver.handle import DeviceHandle
from ironbatch.driver.mapping import map_file
from ironbatch.errors import DeviceUnavailable, NotADevice

_START: Final = "`ironbatch device --node PATH` makes one"
_OPEN_FLAGS: Final = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # a FIFO or a terminal must not hold us up
_OTHERS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
)


class IoctlDevice(DeviceHandle):
    """An open device node.

    Args:
        path: of the node, whatever kind of file it is: a character device, or the root of a FUSE mount.
        read_only: look at the device and its memory only; it takes no batches.

    Raises:
        DeviceUnavailable: it can't be opened; why, and what helps.
        NotADevice: something else stands there.
        AbiMismatch: it speaks another version.
    """

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        self.path = path
        self._is_read_only = read_only
        self._fd = _open_node(path, os.O_RDONLY if read_only else os.O_RDWR)
        super().__init__(path)

    def fileno(self) -> int:
        """For poll(2): readable when every batch of this handle is over, an error once the device was reset."""
        return self._fd

    def _call(self, message: Message, buffer: bytearray) -> None:
        if self._fd < 0:
            raise ValueError("I/O operation on a closed device")
        is_interrupted = True
        while is_interrupted:  # deadlines are absolute, so it is the same call
            try:
                fcntl.ioctl(self._fd, message.request, buffer)
                is_interrupted = False
            except InterruptedError:
                continue

    def _map(self) -> NDArray[np.uint8]:
        if self.info.caps & abi.CAP_MMAP:
            return self._map_open_file(self._fd, self.path)
        place = self._ask(abi.GET_MEM_PATH)
        path = os.fsdecode(place.path.rstrip(b"\0"))
        fd = self._open_memory(path)
        try:
            found = os.fstat(fd)
            wanted = (place.st_dev, place.st_ino, place.size)
            if (found.st_dev, found.st_ino, found.st_size) != wanted or found.st_size < self.info.map_bytes:
                raise DeviceUnavailable(
                    f"{self.path} keeps its memory at {path}, and another file is there: device, inode and size"
                    f" {found.st_dev}, {found.st_ino}, {found.st_size} instead of {wanted[0]}, {wanted[1]},"
                    f" {wanted[2]}; use a device of this PID namespace"
                )
            return self._map_open_file(fd, path)
        finally:
            os.close(fd)

    def _open_memory(self, path: str) -> int:
        flags = os.O_RDONLY if self._is_read_only else os.O_RDWR
        try:
            return os.open(path, flags | _OPEN_FLAGS)
        except OSError as problem:
            code = problem.errno or 0
            raise DeviceUnavailable(
                f"{self.path} keeps its memory at {path}, which can't be opened: {os.strerror(code)}; only processes of"
                " the node's user, in its PID namespace, may: run as that user, or the node as root (Linux 6.9 or"
                " newer), which makes the node itself mappable",
                code,
            ) from None

    def _map_open_file(self, fd: int, path: str) -> NDArray[np.uint8]:
        try:
            return map_file(fd, self.info.map_bytes, is_writable=not self._is_read_only)
        except OSError as problem:
            code = problem.errno or 0
            raise DeviceUnavailable(
                f"{self.info.map_bytes} bytes of {path} can't be mapped: {os.strerror(code)}; raise the limit (ulimit"
                " -v), or use a smaller device",
                code,
            ) from None

    def _let_go(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _close(fd)


# ------------------------------------------------------------------------------------------------------------- opening


def _open_node(path: str, access: int) -> int:
    try:
        fd = os.open(path, access | _OPEN_FLAGS)
    except OSError as problem:
        raise _unopened(path, problem.errno or 0) from None
    except ValueError as problem:  # a NUL in it
        raise DeviceUnavailable(f"{path!r} can't be opened: {problem}; name a node") from None
    try:
        mode = os.fstat(fd).st_mode
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except OSError as problem:
        _close(fd)
        raise _unopened(path, problem.errno or 0) from None
    for is_kind, kind in _OTHERS:
        if is_kind(mode):
            _close(fd)
            raise NotADevice(f"{path} is not an Ironbatch device but {kind}; {_START}")
    return fd


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # the node of a dead server complains even here, and is closed all the same
        os.close(fd)


def _unopened(path: str, code: int) -> DeviceUnavailable:
    """What open(2)'s errno means at a path."""
    if code in {errno.EISDIR, errno.ENXIO}:
        kind = "a directory" if code == errno.EISDIR else "a socket, or the node of a driver that is not loaded"
        return NotADevice(f"{path} is not an Ironbatch device but {kind}; {_START}", code)
    if code in {errno.ENOTCONN, errno.ECONNABORTED}:
        return DeviceUnavailable(
            f"{path} can't be opened: its server has died; start it again (`ironbatch device --node {path}`)", code
        )
    reason, remedy = os.strerror(code), f"name a device node; {_START}"
    if code in {errno.ENOENT, errno.ENOTDIR}:
        reason, remedy = "there is no such node", f"load the device's driver, or start its server; {_START}"
    elif code in {errno.EACCES, errno.EPERM}:
        reason, remedy = _permission_problem(path)
    elif code == errno.EROFS:
        reason, remedy = "it is on a read-only file system", "mount that read-write"
    elif code == errno.EBUSY:
        reason, remedy = "all its contexts are in use", "close another program that uses it, or raise --contexts"
    elif code in {errno.EMFILE, errno.ENFILE}:
        remedy = "raise the limit of open files (ulimit -n)"
    return DeviceUnavailable(f"{path} can't be opened: {reason}; {remedy}", code)


def _permission_problem(path: str) -> tuple[str, str]:
    """Reason and remedy, with the node's owner and mode if we may see them."""
    user = _user_name(os.geteuid())
    try:
        found = os.stat(path)
    except OSError:
        return (
            f"user {user} may not even look at it",
            "run as the user who has mounted it, or have it mounted for others too (as root, or with --allow-other)",
        )
    mode = stat.S_IMODE(found.st_mode)
    group = _group_name(found.st_gid)
    owner = f"it belongs to user {_user_name(found.st_uid)} and group {group}, with mode {mode:04o}"
    remedy = f"join the group {group}, or have its mode changed (--mode, --group)"
    return f"permission denied to user {user}: {owner}", remedy


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
