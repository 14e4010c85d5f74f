"""The node: a reference device behind a file in the file system, served through /dev/fuse by one thread."""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from ironbatch.driver import abi, fuse
from ironbatch.driver.fuse import Connection, Opcode, Request
from ironbatch.driver.reference import Pending, ReferenceDevice

ATTRIBUTES_VALID_S: Final = 1
"""So long the kernel need not ask for the node's owner and mode again."""

LONGEST_SLEEP_S: Final = 3600.0
_PAGE_BYTES: Final = 4096


class _Wait(NamedTuple):
    """An ioctl that is not answered yet."""

    context: int
    request: int
    argument: bytes
    deadline_ns: int


class Node:
    """Answers the kernel's requests for one mounted node. An open file is a context of the device.

    Args:
        connection: negotiated.
        device: what is behind the node.
        backing_id: of its memory, 0 if the node itself can't be mapped.
        mode: permission bits.
        gid: of the node's group; its owner is whoever runs this.
    """

    def __init__(
        self, connection: Connection, device: ReferenceDevice, *, backing_id: int, mode: int, gid: int
    ) -> None:
        self._connection = connection
        self._device = device
        self._backing_id = backing_id
        self._mode, self._uid, self._gid = mode, os.geteuid(), gid
        self._made_s = int(time.time())
        self._contexts: set[int] = set()
        self._waits: dict[int, _Wait] = {}  # by the number of the request that awaits its answer
        self._polls: dict[int, int] = {}  # contexts, by the handle that the kernel knows their pollers by
        # read and write go to us also where a mapping goes to the memory, and close asks us nothing: a node that hangs
        # shall not hang it.
        self._open_flags = fuse.OPEN_DIRECT_IO | fuse.OPEN_NO_FLUSH | (fuse.OPEN_PASSTHROUGH if backing_id else 0)
        self._handlers: dict[int, Callable[[Request], None]] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.SETATTR: self._setattr,
            Opcode.OPEN: self._open,
            Opcode.READ: self._refuse,
            Opcode.WRITE: self._refuse,
            Opcode.STATFS: self._statfs,
            Opcode.RELEASE: self._release,
            Opcode.FSYNC: self._agree,
            Opcode.FLUSH: self._agree,
            Opcode.ACCESS: self._agree,
            Opcode.DESTROY: self._agree,
            Opcode.IOCTL: self._ioctl,
            Opcode.POLL: self._poll,
            Opcode.INTERRUPT: self._interrupt,
        }

    @property
    def is_mappable(self) -> bool:
        """Whether clients map the node itself."""
        return self._backing_id != 0

    def serve(self, stop: int) -> None:
        """Answer requests until the file descriptor `stop` can be read.

        Raises:
            Disconnected: the mount is gone, or somebody has aborted its connection.
        """
        fds = [self._connection.fd, stop]
        while True:
            ready, _, _ = select.select(fds, [], [], self._timeout_s())
            if stop in ready:
                return
            self._advance()
            if ready:
                request = self._connection.read()
                if request is not None:
                    self.handle(request)

    def handle(self, request: Request) -> None:
        """Answer one request, whatever is in it."""
        handler = self._handlers.get(request.opcode)
        if handler is None:
            if request.opcode not in fuse.UNANSWERED:
                self._connection.reply_error(request.unique, errno.ENOSYS)
            return
        try:
            handler(request)
        except OSError as problem:
            self._fail(request, problem.errno or errno.EIO)
        except struct.error:  # it is shorter than its opcode should have it
            self._fail(request, errno.EINVAL)

    def _fail(self, request: Request, code: int) -> None:
        if request.opcode not in fuse.UNANSWERED:
            self._connection.reply_error(request.unique, code)

    # ------------------------------------------------------------------------------------------------------------ time

    def _timeout_s(self) -> float | None:
        """How long there is nothing to do unless a request comes; None: for ever."""
        due_ns = self._device.next_due_ns()
        if self._waits:
            first_ns = min(wait.deadline_ns for wait in self._waits.values())
            due_ns = first_ns if due_ns is None else min(due_ns, first_ns)
        if due_ns is None:
            return None
        return min(max(0.0, (due_ns - time.monotonic_ns()) / 1e9), LONGEST_SLEEP_S)

    def _advance(self) -> None:
        """Let the device do what is due, and answer those whose fence or deadline that was."""
        if self._device.next_due_ns() is not None and self._device.advance():
            self._tell_all()
        elif self._waits:
            now_ns = time.monotonic_ns()
            for unique, wait in list(self._waits.items()):
                if wait.deadline_ns <= now_ns:
                    self._ask_again(unique, wait)

    def _tell_all(self) -> None:
        """A fence was signalled, or the device was reset."""
        for unique, wait in list(self._waits.items()):
            self._ask_again(unique, wait)
        for handle, context in list(self._polls.items()):
            if self._device.poll_events(context):
                del self._polls[handle]
                self._connection.notify_poll(handle)

    def _ask_again(self, unique: int, wait: _Wait) -> None:
        try:
            answer = self._device.ioctl(wait.context, wait.request, wait.argument)
        except OSError as problem:
            del self._waits[unique]
            self._connection.reply_error(unique, problem.errno or errno.EIO)
            return
        if not isinstance(answer, Pending):
            del self._waits[unique]
            self._reply_ioctl(unique, answer)

    # ------------------------------------------------------------------------------------------------------- the device

    def _open(self, request: Request) -> None:
        flags, _ = fuse.OPEN_IN.unpack_from(request.body)
        context = self._device.open(writable=flags & os.O_ACCMODE != os.O_RDONLY)
        if self._connection.reply(request.unique, fuse.OPEN_OUT.pack(context, self._open_flags, self._backing_id)):
            self._contexts.add(context)
        else:
            self._device.release(context)  # whoever opened it was killed, and nobody will close it

    def _release(self, request: Request) -> None:
        context = self._context(fuse.RELEASE_IN.unpack_from(request.body)[0])
        self._contexts.remove(context)
        self._polls = {handle: other for handle, other in self._polls.items() if other != context}
        self._device.release(context)
        self._connection.reply(request.unique)

    def _ioctl(self, request: Request) -> None:
        handle, _, command, _, in_size, out_size = fuse.IOCTL_IN.unpack_from(request.body)
        context = self._context(handle)
        argument = bytes(request.body[fuse.IOCTL_IN.size : fuse.IOCTL_IN.size + in_size])
        if len(argument) != in_size:
            raise OSError(errno.EINVAL, "the argument is shorter than it says")
        answer = self._device.ioctl(context, command, argument or bytes(out_size))
        if isinstance(answer, Pending):
            self._waits[request.unique] = _Wait(context, command, argument, answer.deadline_ns)
            return
        self._reply_ioctl(request.unique, answer[:out_size])
        if command == abi.RESET.request:
            self._tell_all()

    def _reply_ioctl(self, unique: int, answer: bytes) -> None:
        self._connection.reply(unique, _IOCTL_SUCCESS + answer)

    def _poll(self, request: Request) -> None:
        handle, kernel_handle, flags, _ = fuse.POLL_IN.unpack_from(request.body)
        context = self._context(handle)
        found = self._device.poll_events(context)
        if flags & fuse.POLL_SCHEDULE_NOTIFY:  # also if there is something: an edge-triggered poller awaits the next
            self._polls[kernel_handle] = context
        self._connection.reply(request.unique, fuse.POLL_OUT.pack(found, 0))

    def _interrupt(self, request: Request) -> None:
        """A signal has come to somebody who waits. Of all others there is nothing to be interrupted."""
        (unique,) = fuse.INTERRUPT_IN.unpack_from(request.body)
        if self._waits.pop(unique, None) is not None:
            self._connection.reply_error(unique, errno.EINTR)

    def _context(self, handle: int) -> int:
        if handle not in self._contexts:
            raise OSError(errno.EBADF, "not open")
        return handle

    # --------------------------------------------------------------------------------------------------------- the file

    def _getattr(self, request: Request) -> None:
        self._connection.reply(request.unique, fuse.ATTR_OUT_HEAD.pack(ATTRIBUTES_VALID_S, 0, 0) + self._attributes())

    def _setattr(self, request: Request) -> None:
        """Owner and mode may change, as the kernel has checked; times count for nothing, and the size is what it is."""
        valid, _, _, size, *_, mode, _, uid, gid, _ = fuse.SETATTR_IN.unpack_from(request.body)
        if valid & fuse.SET_SIZE and size != self._device.spec.map_bytes:
            raise OSError(errno.EPERM, "the size is fixed")
        if valid & fuse.SET_MODE:
            self._mode = stat.S_IMODE(mode)
        if valid & fuse.SET_UID:
            self._uid = uid
        if valid & fuse.SET_GID:
            self._gid = gid
        self._getattr(request)

    def _attributes(self) -> bytes:
        size = self._device.spec.map_bytes
        times = (self._made_s,) * 3
        owner = (stat.S_IFREG | self._mode, 1, self._uid, self._gid)
        return fuse.ATTR.pack(fuse.ROOT_ID, size, size // 512, *times, 0, 0, 0, *owner, 0, _PAGE_BYTES, 0)

    def _statfs(self, request: Request) -> None:
        pages = self._device.spec.map_bytes // _PAGE_BYTES
        self._connection.reply(
            request.unique, fuse.STATFS_OUT.pack(pages, 0, 0, 1, 0, _PAGE_BYTES, 255, _PAGE_BYTES, 0)
        )

    def _lookup(self, request: Request) -> None:
        raise OSError(errno.ENOTDIR, "the root is a file")

    def _refuse(self, request: Request) -> None:
        raise OSError(errno.EINVAL, "a device is mapped, not read or written")

    def _agree(self, request: Request) -> None:
        self._connection.reply(request.unique)


_IOCTL_SUCCESS: Final = fuse.IOCTL_OUT.pack(0, 0, 0, 0)
