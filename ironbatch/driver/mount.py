"""Mounting a node on a file: as root by mount(2), as another user through fusermount3.

What may meet a node that does not answer looks in /proc/self/mountinfo only: a stat(2) of such a path never ends.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import select
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from ironbatch.errors import DeviceUnavailable, StartError
from ironbatch.limits import quoted

_log = logging.getLogger("ironbatch.scheduler")

FUSE_DEVICE: Final = "/dev/fuse"
SOURCE: Final = "ironbatch"
FILE_SYSTEM: Final = "fuse.ironbatch"
CONNECTIONS: Final = "/sys/fs/fuse/connections"
MOUNTINFO: Final = "/proc/self/mountinfo"

PROBE_S: Final = 2.0
"""A node that has not answered in this time is taken for a living one that hangs."""

FUSERMOUNT_S: Final = 10.0
LOCK_S: Final = 5.0

_NOSUID, _NODEV = 2, 4  # include/uapi/linux/mount.h
_FORCE, _DETACH, _NOFOLLOW = 1, 2, 8  # umount2(2)
_MOST_LINKS: Final = 40

_libc = ctypes.CDLL(None, use_errno=True)


class Mount(NamedTuple):
    """One line of mountinfo."""

    device_minor: int
    path: str
    file_system: str


class MountedNode:
    """A node's mount. `fd` is its end of /dev/fuse; `unmount` leaves the place as it was found.

    By then a successor may serve at the same path, if this node was given up: its mount is left alone.
    """

    def __init__(self, path: str, fd: int, *, helper: str | None, made_file: bool, device_minor: int) -> None:
        self.path = path
        self.fd = fd
        self._helper = helper
        self._made_file = made_file
        self._device_minor = device_minor

    def find(self) -> str | None:
        """Where it is mounted, which is elsewhere if a folder above it was renamed; None: nowhere any more."""
        if self._is_connected():
            return next((mount.path for mount in _mounts() if mount.device_minor == self._device_minor), None)
        # Our minor is free by now, and may be a living successor's.
        return self.path if find_mount(self.path) is not None and _is_dead(self.path) else None

    def unmount(self) -> None:
        """Take the mount away, also from under its users, and the file if we have made it. Never raises."""
        # Without a descriptor or a process left, it stays, and is dead: the next start takes it away.
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._unmount()

    def _unmount(self) -> None:
        path = self.find()
        if path is not None:
            if self._helper is None:
                _umount(path, _DETACH | _NOFOLLOW)
            else:
                _run_helper(self._helper, ["-u", "-q", "-z", "--", path])
        path = path or self.path
        with _locked_folder(path):
            if self._made_file and find_mount(path) is None:
                _remove_empty(path)

    def _is_connected(self) -> bool:
        """Whether the kernel still asks us anything."""
        poller = select.poll()
        poller.register(self.fd, 0)  # POLLERR comes unasked
        return not poller.poll(0)


# ------------------------------------------------------------------------------------------------------------- mounting


def mount_node(path: str, *, is_for_all: bool = False) -> MountedNode:
    """Mount a file system at `path`, which is a file; it is made if it is missing.

    Args:
        path: of the node.
        is_for_all: also as an ordinary user, let others in (fusermount3 asks for user_allow_other in /etc/fuse.conf).

    Raises:
        StartError: one line that says what is in the way, and what helps.
    """
    path = _resolved(path)
    helper = None if os.geteuid() == 0 else shutil.which("fusermount3")
    with _locked_folder(path):
        _clear_the_way(path)
        made_file = _make_file(path)
        try:
            fd = _mount_as_root(path) if os.geteuid() == 0 else _mount_by_helper(helper, path, is_for_all=is_for_all)
        except BaseException:
            if made_file:
                _remove_empty(path)
            raise
        mount = find_mount(path)
    minor = -1 if mount is None else mount.device_minor
    return MountedNode(path, fd, helper=helper, made_file=made_file, device_minor=minor)


@contextlib.contextmanager
def _locked_folder(path: str) -> Iterator[None]:
    """Hold the node's folder against nodes that start or end there. Who holds it for longer is none, and is ignored."""
    fd = -1
    with contextlib.suppress(OSError):  # where we may not look, we may not make a node either, and hear of it
        fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline_s = time.monotonic() + LOCK_S
    try:
        while fd >= 0 and not _try_lock(fd) and time.monotonic() < deadline_s:
            time.sleep(0.005)
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _clear_the_way(path: str) -> None:
    """Unmount what a killed predecessor has left behind. Raises StartError if there is something alive."""
    for _ in range(_MOST_LINKS):  # several mounts may lie upon each other
        mount = find_mount(path)
        if mount is None:
            return
        if not mount.file_system.startswith("fuse"):
            raise StartError(f"cannot mount {path}: a {mount.file_system} is mounted there; choose another path")
        if not _is_dead(path):
            raise StartError(
                f"cannot mount {path}: a living node is mounted there; stop it, or choose another path"
                f" (`fuser -v {FUSE_DEVICE}` lists those that serve one)"
            )
        if not _detach(path):
            raise StartError(
                f"cannot mount {path}: the mount of a dead node is there, and it can't be taken away; run as root:"
                f" umount -l {path}"
            )
    raise StartError(f"cannot mount {path}: too many dead mounts lie upon each other there; choose another path")


def _is_dead(path: str) -> bool:
    """Whether nobody serves the mount at `path` any more. Asked by a child, since a node that hangs would hang it."""
    program = "import os, sys\ntry: os.statvfs(sys.argv[1])\nexcept OSError as problem: sys.exit(problem.errno)"
    try:  # statvfs is always asked of the server, never of a cache
        asked = subprocess.run([sys.executable, "-I", "-S", "-c", program, path], check=False, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode in {errno.ENOTCONN, errno.ECONNABORTED}


def _make_file(path: str) -> bool:
    """Whether there was none. Raises StartError if what is there is no regular file."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise StartError(
                f"cannot mount {path}: it is no regular file; name a file, or a path where there is none"
            ) from None
        if os.stat(path).st_size:
            raise StartError(
                f"cannot mount {path}: it is a file with content, which the node would hide; name an empty file, or a"
                " path where there is none"
            ) from None
        return False
    except OSError as problem:
        raise StartError(
            f"cannot make {path}: {os.strerror(problem.errno or 0)}; name a file in a folder that exists and is"
            " writable"
        ) from None
    return True


def _mount_as_root(path: str) -> int:
    try:
        fd = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as problem:
        raise StartError(_fuse_problem(problem.errno or 0)) from None
    options = f"fd={fd},rootmode=100000,user_id={os.geteuid()},group_id={os.getegid()},allow_other,default_permissions"
    failed = _libc.mount(SOURCE.encode(), os.fsencode(path), FILE_SYSTEM.encode(), _NOSUID | _NODEV, options.encode())
    if failed:
        code = ctypes.get_errno()
        os.close(fd)
        raise StartError(_mount_problem(path, code))
    return fd


def _mount_by_helper(helper: str | None, path: str, *, is_for_all: bool) -> int:
    """Have fusermount3 mount it; it sends the open /dev/fuse over a socket. (libfuse's lib/mount.c)"""
    if helper is None:
        raise StartError(
            f"cannot mount {path}: only root may, and fusermount3, which helps others, is not installed; install the"
            " package fuse3, or run it as root"
        )
    options = f"fsname={SOURCE},subtype={SOURCE},default_permissions" + (",allow_other" if is_for_all else "")
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, its:
        environ = os.environ | {"_FUSE_COMMFD": str(its.fileno())}
        ran = _run_helper(helper, ["-o", options, "--", path], environ=environ, keeps=its.fileno())
        if ran.returncode:
            told = " ".join(ran.stderr.split()) or f"exit code {ran.returncode}"
            raise StartError(f"cannot mount {path}: {told}; {_helper_remedy(told)}, or run it as root")
        ours.settimeout(FUSERMOUNT_S)
        fds = array.array("i")
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: fds.itemsize])
    if not fds:
        raise StartError(f"cannot mount {path}: {helper} has sent no file descriptor; run it as root")
    return fds[0]


def _run_helper(
    helper: str, arguments: list[str], environ: dict[str, str] | None = None, keeps: int | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helper, *arguments],
        env=environ,
        pass_fds=() if keeps is None else (keeps,),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=FUSERMOUNT_S,
    )


def _helper_remedy(told: str) -> str:
    if "allow_other" in told:
        return "leave out --allow-other, or write user_allow_other into /etc/fuse.conf"
    return f"{FUSE_DEVICE} must be there (modprobe fuse) and open to this user (join the group that owns it)"


def _fuse_problem(code: int) -> str:
    if code in {errno.ENOENT, errno.ENODEV, errno.ENXIO}:
        return (
            f"there is no {FUSE_DEVICE}; load it (modprobe fuse), or give it to the container (--device {FUSE_DEVICE})"
        )
    return f"{FUSE_DEVICE} can't be opened: {os.strerror(code)}; give it to the container (--device {FUSE_DEVICE})"


def _mount_problem(path: str, code: int) -> str:
    if code == errno.EPERM:
        return f"cannot mount {path}: CAP_SYS_ADMIN is missing; give it to the container (--cap-add SYS_ADMIN)"
    if code == errno.ENODEV:
        return f"cannot mount {path}: the kernel knows no FUSE; load it (modprobe fuse)"
    return f"cannot mount {path}: {os.strerror(code)}; try another path"


# ----------------------------------------------------------------------------------------------- finding and unmounting


def find_mount(path: str, mountinfo: str = MOUNTINFO) -> Mount | None:
    """The topmost mount at exactly this path, found without touching the file system there."""
    path = _resolved(path)
    found = None
    for mount in _mounts(mountinfo):
        if mount.path == path:
            found = mount
    return found


def _mounts(mountinfo: str = MOUNTINFO) -> Iterator[Mount]:
    """All that this process sees, in the order in which they lie upon each other."""
    with open(mountinfo, "rb") as lines:
        for line in lines:
            fields = line.split(b" ")
            minor = int(fields[2].split(b":")[1])
            yield Mount(minor, os.fsdecode(_unescaped(fields[4])), fields[fields.index(b"-") + 1].decode())


def abort_connection(path: str, connections: str = CONNECTIONS) -> bool:
    """Free whoever is stuck in a call on a node that hangs: all calls on it fail from now on, with DeviceGone.

    Does not touch the file system at `path`, so it can't get stuck itself. A node that is not in use may be
    unmounted too.

    Args:
        path: of the node.
        connections: where fusectl is mounted, if it is.

    Returns:
        Whether there is a FUSE mount to be aborted.

    Raises:
        DeviceUnavailable: there is, but this user may not.
    """
    mount = find_mount(path)
    if mount is None or not mount.file_system.startswith("fuse"):
        return False
    with contextlib.suppress(OSError), open(f"{connections}/{mount.device_minor}/abort", "wb") as abort:
        abort.write(b"1")
        return True
    # It says EBUSY, since the node is in use, but before that it has aborted the connection.
    code = _umount(mount.path, _FORCE | _NOFOLLOW)
    if code in {0, errno.EBUSY}:
        return True
    if code in {errno.EINVAL, errno.ENOENT}:  # it was unmounted meanwhile
        return False
    raise DeviceUnavailable(
        f"the connection of {mount.path} can't be aborted: {os.strerror(code)}; kill the server that hangs, or as root:"
        f" umount -f {mount.path}",
        code,
    )


@contextlib.contextmanager
def aborted_if_hung(path: str, patience_s: float) -> Iterator[None]:
    """Have a node's connection aborted if what is done meanwhile takes longer: what it is stuck in then fails.

    Nobody else may look after whoever opens a device: it cannot be told from one that takes its time.

    Args:
        path: of the node; empty: nothing is done.
        patience_s: 0: without end.
    """
    if not path or not patience_s:
        yield
        return

    def abort() -> None:
        try:
            if abort_connection(path):
                _log.error("%s has not answered for %g s: its connection was aborted; start it again", path, patience_s)
        except (DeviceUnavailable, OSError) as problem:
            _log.error("%s", problem)

    timer = threading.Timer(patience_s, abort)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _detach(path: str) -> bool:
    """Whether a dead mount could be taken away."""
    if _umount(path, _DETACH | _NOFOLLOW) == 0:
        return True
    helper = shutil.which("fusermount3")
    return helper is not None and _run_helper(helper, ["-u", "-q", "-z", "--", path]).returncode == 0


def _umount(path: str, flags: int) -> int:
    """The errno, 0 for none."""
    return ctypes.get_errno() if _libc.umount2(os.fsencode(path), flags) else 0


def _remove_empty(path: str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode) and not os.lstat(path).st_size:
            os.unlink(path)


def _resolved(path: str) -> str:
    """Absolute, without symbolic links, as mountinfo has it. Asks a node at the path itself nothing.

    readlink(2) of a mounted file fails at once, from what the kernel knows; lstat(2) would ask its server.
    """
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path.rstrip("/"))
        path = os.path.join(os.path.realpath(folder or "."), name)
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:
            return path
    raise StartError(f"{quoted(path)} leads through too many symbolic links; name the file itself")


def _unescaped(field: bytes) -> bytes:
    """Spaces and the like are octal in mountinfo."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)
