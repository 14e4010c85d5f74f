"""The node: the suite of all devices through the real kernel, and what the kernel may ask of it beside."""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ironbatch.driver import abi, fuse
from ironbatch.driver.fuse import Connection, Disconnected, Opcode, Request, TooOld
from ironbatch.driver.handle import DeviceHandle
from ironbatch.driver.ioctl import IoctlDevice
from ironbatch.driver.node import Node
from ironbatch.driver.reference import ReferenceDevice
from ironbatch.driver.spec import DeviceSpec
from tests.driver.conformance import SMALL, Conformance, DeviceFactory
from tests.driver.node_factory import NodeFactory
from tests.driver.node_process import needs_node

OPCODES = [*Opcode, 5, 6, 12, 21, 22, 27, 31, 35, 43, 46, 47, 4096, 2**32 - 1]


class Served:
    """A node, and the handles on it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.handles: list[IoctlDevice] = []

    def open(self, *, read_only: bool = False) -> DeviceHandle:
        self.handles.append(IoctlDevice(self._path, read_only=read_only))
        return self.handles[-1]


def spec_flags(spec: dict[str, Any]) -> list[str]:
    """A spec's fields as flags of the command."""
    flags = []
    for name, value in spec.items():
        if name == "mixes":
            flags.append(f"--no-mix={str(not value).lower()}")
        elif name == "caps":
            flags.append("--caps=" + ",".join(word for word, bit in abi.CAPS.items() if value & bit))
        else:
            separator = "." if name == "abi" else ","
            text = separator.join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags.append(f"--{name.replace('_', '-')}={text}")
    return flags


@pytest.fixture(params=["passthrough", "named"])
def device_factory(request: pytest.FixtureRequest, factory: NodeFactory, tmp_path: Path) -> Iterator[DeviceFactory]:
    if request.param == "passthrough" and os.geteuid() != 0:
        pytest.skip("passthrough needs root")
    nodes: list[Served] = []

    def make(**spec: Any) -> Served:
        path = str(tmp_path / f"device{len(nodes)}")
        factory.node(path, "--memory", request.param, *spec_flags(spec))
        nodes.append(Served(path))
        return nodes[-1]

    yield make
    for node in nodes:
        for handle in node.handles:
            handle.close()


@needs_node
class TestNode(Conformance):
    pass


# ----------------------------------------------------------------------------------------- whatever the kernel may ask


class Wire(Connection):
    """No kernel: it keeps what it is told to write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_listened_to = True

    def _write(self, message: bytes) -> bool:
        self.written.append(message)
        return self.is_listened_to


class Bench:
    """A node without a kernel."""

    def __init__(self, **spec: Any) -> None:
        self.wire = Wire()
        given = DeviceSpec(**SMALL | spec)
        self.device = ReferenceDevice(given, np.zeros(given.map_bytes, np.uint8))
        self.node = Node(self.wire, self.device, backing_id=3, mode=0o640, gid=7)

    def ask(self, opcode: int, body: bytes = b"", unique: int = 9) -> tuple[int, bytes] | None:
        """The errno and the data of the answer, if there is one at once."""
        self.wire.written.clear()
        self.node.handle(Request(opcode, unique, memoryview(body)))
        if not self.wire.written:
            return None
        (message,) = self.wire.written
        length, error, answered = fuse.OUT_HEADER.unpack_from(message)
        assert (length, answered) == (len(message), unique)
        return -error, message[fuse.OUT_HEADER.size :]

    def open(self, flags: int = os.O_RDWR) -> int:
        answer = self.ask(Opcode.OPEN, fuse.OPEN_IN.pack(flags, 0))
        assert answer is not None
        assert answer[0] == 0
        handle, open_flags, backing_id = fuse.OPEN_OUT.unpack(answer[1])
        assert open_flags & fuse.OPEN_PASSTHROUGH
        assert backing_id == 3
        return int(handle)

    def call(self, handle: int, message: abi.Message, unique: int = 9, **fields: int) -> tuple[int, bytes] | None:
        argument = bytes(message.pack(**fields))
        head = fuse.IOCTL_IN.pack(handle, 0, message.request, 0, len(argument), message.size)
        return self.ask(Opcode.IOCTL, head + argument, unique)


@pytest.mark.parametrize("opcode", OPCODES)
@pytest.mark.parametrize("body", [b"", b"\0", b"\0" * 7, b"\xff" * 24, b"\xff" * 200, b"\0" * 200])
def test_no_request_is_too_odd(opcode: int, body: bytes) -> None:
    bench = Bench()
    answer = bench.ask(opcode, body)
    assert (answer is None) == (opcode in fuse.UNANSWERED)
    if answer is not None and opcode not in set(Opcode):
        assert answer == (errno.ENOSYS, b"")
    handle = bench.open()
    assert bench.ask(Opcode.GETATTR) is not None
    assert bench.ask(Opcode.RELEASE, fuse.RELEASE_IN.pack(handle, 0, 0, 0)) == (0, b"")


def test_requests_with_a_handle_that_is_none() -> None:
    bench = Bench()
    assert bench.call(0, abi.QUERY_FREE_BLOCKS) == (errno.EBADF, b"")
    assert bench.ask(Opcode.POLL, fuse.POLL_IN.pack(2**64 - 1, 0, 1, 1)) == (errno.EBADF, b"")
    assert bench.ask(Opcode.RELEASE, fuse.RELEASE_IN.pack(5, 0, 0, 0)) == (errno.EBADF, b"")


def test_argument_that_is_shorter_than_it_says() -> None:
    bench = Bench()
    head = fuse.IOCTL_IN.pack(bench.open(), 0, abi.CLAIM_BLOCKS.request, 0, 16, 16)
    assert bench.ask(Opcode.IOCTL, head + bytes(15)) == (errno.EINVAL, b"")


def test_answer_is_never_longer_than_its_room() -> None:
    bench = Bench()
    head = fuse.IOCTL_IN.pack(bench.open(), 0, abi.QUERY_FREE_BLOCKS.request, 0, 0, 4)
    assert bench.ask(Opcode.IOCTL, head) == (0, fuse.IOCTL_OUT.pack(0, 0, 0, 0) + (16).to_bytes(4, "little"))


def test_open_that_nobody_waits_for_leaves_no_context_behind() -> None:
    bench = Bench(contexts=1)
    bench.wire.is_listened_to = False
    bench.ask(Opcode.OPEN, fuse.OPEN_IN.pack(os.O_RDWR, 0))
    bench.wire.is_listened_to = True
    bench.open()


def test_attributes() -> None:
    bench = Bench()
    answer = bench.ask(Opcode.GETATTR)
    assert answer is not None
    valid_s, _, _ = fuse.ATTR_OUT_HEAD.unpack_from(answer[1])
    ino, size, *_, mode, links, uid, gid, _, _, _ = fuse.ATTR.unpack_from(answer[1], fuse.ATTR_OUT_HEAD.size)
    assert valid_s == 1
    assert (ino, size, links) == (1, bench.device.spec.map_bytes, 1)
    assert (mode, uid, gid) == (stat.S_IFREG | 0o640, os.geteuid(), 7)


def test_owner_and_mode_may_change_and_the_size_may_not() -> None:
    bench = Bench()

    def change(valid: int, size: int = 0, mode: int = 0, uid: int = 0, gid: int = 0) -> tuple[int, bytes] | None:
        body = fuse.SETATTR_IN.pack(valid, 0, 0, size, 0, 0, 0, 0, 0, 0, 0, mode, 0, uid, gid, 0)
        return bench.ask(Opcode.SETATTR, body)

    answer = change(fuse.SET_MODE | fuse.SET_UID | fuse.SET_GID, mode=stat.S_IFREG | 0o600, uid=11, gid=12)
    assert answer is not None
    assert fuse.ATTR.unpack_from(answer[1], fuse.ATTR_OUT_HEAD.size)[9:13] == (stat.S_IFREG | 0o600, 1, 11, 12)
    assert change(fuse.SET_SIZE) == (errno.EPERM, b"")
    same = change(fuse.SET_SIZE, size=bench.device.spec.map_bytes)
    assert same is not None
    assert same[0] == 0


def test_interrupt_ends_a_wait_and_nothing_else() -> None:
    bench = Bench(step_latency_us=60_000_000, longest_step_us=60_000_000)
    handle = bench.open()
    assert bench.call(handle, abi.SUBMIT_BATCH, deadline_ns=abi.NO_DEADLINE) is not None
    assert bench.call(handle, abi.WAIT_FENCE, unique=77, fence=1, deadline_ns=abi.NO_DEADLINE) is None
    assert bench.ask(Opcode.INTERRUPT, fuse.INTERRUPT_IN.pack(76), unique=76 | 1) is None
    assert bench.ask(Opcode.INTERRUPT, fuse.INTERRUPT_IN.pack(77), unique=77) == (errno.EINTR, b"")
    assert bench.ask(Opcode.INTERRUPT, fuse.INTERRUPT_IN.pack(77), unique=77) is None


def test_reset_answers_those_who_wait() -> None:
    bench = Bench(step_latency_us=60_000_000, longest_step_us=60_000_000)
    waiting, resetting = bench.open(), bench.open()
    bench.call(waiting, abi.SUBMIT_BATCH, deadline_ns=abi.NO_DEADLINE)
    assert bench.call(waiting, abi.WAIT_FENCE, unique=77, fence=1, deadline_ns=abi.NO_DEADLINE) is None
    body = fuse.POLL_IN.pack(waiting, 4711, fuse.POLL_SCHEDULE_NOTIFY, select.POLLIN)
    assert bench.ask(Opcode.POLL, body) == (0, fuse.POLL_OUT.pack(0, 0))
    argument = bytes(abi.RESET.pack())
    head = fuse.IOCTL_IN.pack(resetting, 0, abi.RESET.request, 0, len(argument), len(argument))
    bench.wire.written.clear()
    bench.node.handle(Request(Opcode.IOCTL, 78, memoryview(head + argument)))
    reset, wait, notice = bench.wire.written
    assert fuse.OUT_HEADER.unpack_from(reset)[1:] == (0, 78)
    assert fuse.OUT_HEADER.unpack_from(wait)[1:] == (0, 77)
    status = abi.WAIT_FENCE.unpack(wait[fuse.OUT_HEADER.size + fuse.IOCTL_OUT.size :]).status
    assert status == -errno.ECANCELED
    assert notice == fuse.OUT_HEADER.pack(24, 1, 0) + struct.pack("<Q", 4711)


# -------------------------------------------------------------------------------------------------------- the protocol


class Pipe:
    """Both ends of a connection whose kernel is the test."""

    def __init__(self) -> None:
        import socket  # noqa: PLC0415

        ours, self.kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection = Connection(ours.detach())

    def send(self, opcode: int, body: bytes, unique: int = 1) -> None:
        self.kernel.send(fuse.IN_HEADER.pack(fuse.IN_HEADER.size + len(body), opcode, unique, 1, 0, 0, 0, 0, 0) + body)

    def answer(self) -> tuple[int, bytes]:
        message = self.kernel.recv(65536)
        return -fuse.OUT_HEADER.unpack_from(message)[1], message[fuse.OUT_HEADER.size :]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.connection.close()
    made.connection.close()
    made.kernel.close()


INIT_EXT = 1 << 30
PASSTHROUGH2 = 1 << 5  # in flags2


@pytest.mark.parametrize(
    ("minor", "flags", "flags2", "has_passthrough"),
    [(28, 0, None, False), (38, INIT_EXT, 0, False), (45, INIT_EXT, PASSTHROUGH2, True), (45, 0, PASSTHROUGH2, False)],
)
def test_negotiation(pipe: Pipe, minor: int, flags: int, flags2: int | None, *, has_passthrough: bool) -> None:
    body = fuse.INIT_IN.pack(7, minor, 4096, flags) + (b"" if flags2 is None else flags2.to_bytes(4, "little"))
    pipe.send(Opcode.INIT, body)
    assert pipe.connection.negotiate() == (minor, has_passthrough)
    error, data = pipe.answer()
    assert error == 0
    major, said, _, granted, _, _, max_write, _, _, _, granted2, depth = fuse.INIT_OUT.unpack(data)
    assert (major, said) == (7, min(minor, 40))
    assert granted & ~flags == 0
    assert (granted2, depth) == ((PASSTHROUGH2, 1) if has_passthrough else (0, 0))
    assert max_write + 4096 <= fuse.BUFFER_BYTES


@pytest.mark.parametrize("version", [(7, 27), (8, 0), (6, 45)])
def test_negotiation_with_another_protocol(pipe: Pipe, version: tuple[int, int]) -> None:
    pipe.send(Opcode.INIT, fuse.INIT_IN.pack(*version, 0, 0))
    with pytest.raises(TooOld, match=rf"FUSE {version[0]}\.{version[1]}, and 7\.28"):
        pipe.connection.negotiate()
    assert pipe.answer() == (errno.EPROTO, b"")


@pytest.mark.parametrize(("opcode", "body"), [(Opcode.GETATTR, bytes(16)), (Opcode.INIT, bytes(8))])
def test_negotiation_with_nonsense(pipe: Pipe, opcode: int, body: bytes) -> None:
    pipe.send(opcode, body)
    with pytest.raises(TooOld):
        pipe.connection.negotiate()


def test_negotiation_with_nobody(pipe: Pipe) -> None:
    with pytest.raises(Disconnected):
        pipe.connection.negotiate(timeout_s=0.01)


def test_short_and_cut_off_requests(pipe: Pipe) -> None:
    pipe.kernel.send(b"\0" * 39)  # no header
    pipe.kernel.send(fuse.IN_HEADER.pack(4000, Opcode.OPEN, 5, 1, 0, 0, 0, 0, 0) + b"abc")  # longer than it is
    pipe.kernel.send(fuse.IN_HEADER.pack(3, Opcode.OPEN, 6, 1, 0, 0, 0, 0, 0) + b"abc")  # shorter than its header
    for unique, body in ((5, b"abc"), (6, b"")):
        request = pipe.connection.read()
        assert request is not None
        assert (request.opcode, request.unique, bytes(request.body)) == (Opcode.OPEN, unique, body)
    assert pipe.connection.read() is None


@pytest.mark.parametrize("code", [0, -5, 512, 99999])
def test_errno_that_the_kernel_would_not_take(pipe: Pipe, code: int) -> None:
    pipe.connection.reply_error(1, code)
    assert pipe.answer() == (errno.EIO, b"")


def test_answer_to_a_kernel_that_has_gone(pipe: Pipe) -> None:
    pipe.kernel.close()
    assert not pipe.connection.reply(1)


@pytest.mark.parametrize(("code", "is_aborted"), [(errno.ENODEV, False), (errno.ECONNABORTED, True)])
def test_end_of_a_connection(pipe: Pipe, monkeypatch: pytest.MonkeyPatch, code: int, *, is_aborted: bool) -> None:
    monkeypatch.setattr(os, "readv", _failing(errno.ENOENT, code))
    with pytest.raises(Disconnected) as end:
        pipe.connection.read()
    assert end.value.is_aborted == is_aborted


def test_read_that_fails_otherwise(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readv", _failing(errno.EINVAL))
    with pytest.raises(OSError, match="Invalid argument"):
        pipe.connection.read()


def _failing(*codes: int) -> Callable[..., int]:
    """Fails with one after the other."""
    left = list(codes)

    def fail(*_: object) -> int:
        code = left.pop(0)
        raise OSError(code, os.strerror(code))

    return fail
