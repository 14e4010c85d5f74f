"""The handle of a node: what it refuses to open, and what becomes of it when the node or a client dies."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from ironbatch.driver import abi
from ironbatch.driver.ioctl import IoctlDevice
from ironbatch.driver.mount import abort_connection, find_mount
from ironbatch.errors import (
    AbiMismatch,
    DeviceFault,
    DeviceGone,
    DeviceTimeout,
    DeviceUnavailable,
    NotADevice,
)
from tests.driver.node_factory import Forked, NodeFactory
from tests.driver.node_process import needs_node, process_state
from tests.driver.records import step, submit
from tests.support import wait_until

SLOW = ("--step-latency-us", "60000000", "--longest-step-us", "60000000")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
NS_PER_MS = 1_000_000


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "device0")


# ------------------------------------------------------------------------------------------------- what is no device


def _socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


def _link_in_a_circle(path: str) -> None:
    os.symlink(path, path)


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda path: None, DeviceUnavailable, "there is no such node; load the device's driver, or start its server"),
        (os.mkdir, NotADevice, "is not an Ironbatch device but a directory"),
        (os.mkfifo, NotADevice, "is not an Ironbatch device but a FIFO"),
        (_socket, NotADevice, "is not an Ironbatch device but a socket"),
        (lambda path: Path(path).touch(), NotADevice, "is not an Ironbatch device: Inappropriate ioctl for device"),
        (lambda path: os.symlink("/dev/null", path), NotADevice, "Inappropriate ioctl for device"),
        (lambda path: os.symlink("/dev/urandom", path), NotADevice, "is not an Ironbatch device"),
        (_link_in_a_circle, DeviceUnavailable, "Too many levels of symbolic links"),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_no_device(
    path: str, make: Callable[[str], object], error: type[Exception], told: str, *, read_only: bool
) -> None:
    make(path)
    gc.collect()  # what other tests have left open
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error) as raised:
        IoctlDevice(path, read_only=read_only)
    assert type(raised.value) is error
    assert str(raised.value).startswith(f"{path} ")
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_path_with_a_nul() -> None:
    with pytest.raises(DeviceUnavailable, match="name a node"):
        IoctlDevice("a\0b")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.EROFS, "it is on a read-only file system; mount that read-write"),
        (errno.EBUSY, "all its contexts are in use; close another program"),
        (errno.EMFILE, "Too many open files; raise the limit of open files"),
        (errno.ENOTCONN, "its server has died; start it again (`ironbatch device --node "),
        (errno.EIO, "Input/output error; name a device node"),
    ],
)
def test_reasons_why_it_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, path: str, code: int, told: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(DeviceUnavailable) as raised:
        IoctlDevice(path)
    assert told in str(raised.value)
    assert raised.value.code == code


# ----------------------------------------------------------------------------------------------------- opening a node


@needs_node
@needs_root
def test_permission_denied_names_owner_group_and_mode(factory: NodeFactory, public_path: Path) -> None:
    factory.node(public_path, "--mode", "0640")
    told = factory.client("open_as_nobody", str(public_path)).line
    assert told.startswith(f"EACCES {public_path} can't be opened: permission denied to user ")
    assert "it belongs to user root and group root, with mode 0640; join the group root" in told


@needs_node
@needs_root
def test_mode_lets_others_in(factory: NodeFactory, public_path: Path) -> None:
    factory.node(public_path, "--mode", "0660", "--group", "65534")
    assert os.stat(public_path).st_gid == 65534
    assert factory.client("open_as_nobody", str(public_path)).line == "opened"
    os.chmod(public_path, 0o600)
    assert factory.client("open_as_nobody", str(public_path)).line.startswith("EACCES")


@needs_node
@needs_root
def test_memory_of_another_user_cannot_be_named(factory: NodeFactory, public_path: Path) -> None:
    """Passthrough is for all who may open the node; a name below /proc/PID/fd is for the same user only."""
    node = factory.node(public_path, "--mode", "0666", "--memory", "named")
    told = factory.client("open_as_nobody", str(public_path)).line
    assert told.startswith(f"EACCES {public_path} keeps its memory at /proc/{node.pid}/fd/")
    assert "which can't be opened: Permission denied; only processes of the node's user" in told


@needs_node
def test_memory_that_is_not_what_the_device_says(
    factory: NodeFactory, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory.node(path, "--memory", "named")
    (tmp_path / "other").write_bytes(b"other")
    true_open = os.open

    def other(name: str, flags: int) -> int:
        return true_open(str(tmp_path / "other") if name.startswith("/proc") else name, flags)

    monkeypatch.setattr(os, "open", other)
    with pytest.raises(DeviceUnavailable, match="another file is there: device, inode and size"):
        IoctlDevice(path)


@needs_node
def test_abi_mismatch_names_both_versions(factory: NodeFactory, path: str) -> None:
    factory.node(path, "--abi", "7.3")
    with pytest.raises(AbiMismatch, match=r"speaks version 7\.3 of the device ABI, and this is version 1\.0"):
        IoctlDevice(path)


@needs_node
def test_wrong_struct_size_is_no_call(factory: NodeFactory, path: str) -> None:
    factory.node(path)
    with IoctlDevice(path) as device:
        for size in (0, 8, 120, 136, 16376):
            request = abi.GET_INFO.request & ~(0x3FFF << 16) | size << 16
            with pytest.raises(OSError, match="Inappropriate ioctl") as raised:
                fcntl.ioctl(device.fileno(), request, bytearray(max(size, 1)))
            assert raised.value.errno == errno.ENOTTY
        assert device.free_blocks().total == 4096


@needs_node
def test_node_is_neither_read_nor_written_nor_resized(factory: NodeFactory, path: str) -> None:
    factory.node(path)
    with IoctlDevice(path) as device:
        before = bytes(device.memory)
        for act, code in (
            (lambda: os.read(device.fileno(), 8), errno.EINVAL),
            (lambda: os.pwrite(device.fileno(), b"x" * 8, 0), errno.EINVAL),
            (lambda: os.ftruncate(device.fileno(), 0), errno.EPERM),
            (lambda: os.ftruncate(device.fileno(), device.info.map_bytes + 1), errno.EPERM),
            (lambda: os.open(path, os.O_RDWR | os.O_TRUNC), errno.EPERM),
        ):
            with pytest.raises(OSError, match=re.escape(os.strerror(code))):
                act()
        os.fsync(device.fileno())
        assert os.fstatvfs(device.fileno()).f_bsize == 4096
        assert os.fstat(device.fileno()).st_size == device.info.map_bytes
        assert bytes(device.memory) == before
        with pytest.raises(OSError, match="Operation not supported"):
            os.getxattr(path, "user.x")


# --------------------------------------------------------------------------------------------------- signals and poll


@contextmanager
def alarms(interval_s: float) -> Iterator[list[float]]:
    """SIGALRM again and again. Gives when they came."""
    came: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(time.monotonic())

    before = signal.signal(signal.SIGALRM, note)
    signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
    try:
        yield came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@needs_node
def test_signals_neither_shorten_nor_lengthen_a_wait(factory: NodeFactory, path: str) -> None:
    factory.node(path, "--step-latency-us", "200000")
    with IoctlDevice(path) as device, alarms(0.01) as came:
        start_ns = time.monotonic_ns()
        batch = submit(device)
        with pytest.raises(DeviceTimeout):
            batch.wait(start_ns + 100 * NS_PER_MS)
        timed_out_ms = (time.monotonic_ns() - start_ns) / NS_PER_MS
        batch.wait()
        done_ms = (time.monotonic_ns() - start_ns) / NS_PER_MS
    assert len(came) >= 5
    assert 100 <= timed_out_ms < 180
    assert 200 <= done_ms < 300


@needs_node
def test_interrupted_call_says_so_to_whoever_makes_it_by_hand(factory: NodeFactory, path: str) -> None:
    factory.node(path, *SLOW)

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyError("stop")

    with IoctlDevice(path) as device:
        batch = submit(device)
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        try:
            with pytest.raises(KeyError, match="stop"):
                batch.wait()
        finally:
            signal.signal(signal.SIGALRM, before)
        assert device.free_blocks().free == 4096  # and the node goes on


@needs_node
def test_deadlines_are_kept_to_the_millisecond(factory: NodeFactory, path: str) -> None:
    factory.node(path, *SLOW)
    late_us = []
    with IoctlDevice(path) as device:
        batch = submit(device)
        for _ in range(30):
            deadline_ns = time.monotonic_ns() + 2 * NS_PER_MS
            with pytest.raises(DeviceTimeout):
                batch.wait(deadline_ns)
            late_us.append((time.monotonic_ns() - deadline_ns) / 1000)
    print(f"late by {sorted(late_us)[15]:.0f} us")
    assert min(late_us) >= 0
    assert sorted(late_us)[15] < 2000


@needs_node
def test_poll_wakes_when_all_is_over(factory: NodeFactory, path: str) -> None:
    factory.node(path, "--step-latency-us", "50000")
    with IoctlDevice(path) as device:
        poller = select.poll()
        poller.register(device.fileno(), select.POLLIN)
        assert poller.poll(0) == []
        batch = submit(device)
        start_ns = time.monotonic_ns()
        assert poller.poll(20_000) == [(device.fileno(), select.POLLIN)]
        assert (time.monotonic_ns() - start_ns) / NS_PER_MS >= 40
        batch.wait(0)
        submit(device)
        assert poller.poll(0) == []
        assert poller.poll(20_000) == [(device.fileno(), select.POLLIN)]


@needs_node
@pytest.mark.parametrize("trigger", [0, select.EPOLLET, select.EPOLLONESHOT], ids=["level", "edge", "once"])
def test_epoll_hears_of_every_batch(factory: NodeFactory, path: str, trigger: int) -> None:
    factory.node(path, "--step-latency-us", "3000")
    with IoctlDevice(path) as device, select.epoll() as poller:
        events = select.EPOLLIN | trigger
        poller.register(device.fileno(), events)
        for _ in range(6):
            batch = submit(device)
            if trigger == select.EPOLLONESHOT:
                poller.modify(device.fileno(), events)
            assert poller.poll(20) == [(device.fileno(), select.EPOLLIN)]
            batch.wait(0)


@needs_node
def test_poll_says_that_another_has_reset_it(factory: NodeFactory, path: str) -> None:
    factory.node(path, *SLOW)
    with IoctlDevice(path) as device, IoctlDevice(path) as other:
        submit(device)
        poller = select.poll()
        poller.register(device.fileno(), select.POLLIN)
        assert poller.poll(0) == []
        timer = threading.Timer(0.03, other.reset)
        timer.start()
        ((_, events),) = poller.poll(20_000)
        timer.join()
        assert events & select.POLLERR


@needs_node
@pytest.mark.parametrize("memory", ["passthrough", "named"])
def test_two_clients_each_have_their_own(factory: NodeFactory, path: str, memory: str) -> None:
    if memory == "passthrough" and os.geteuid() != 0:
        pytest.skip("passthrough needs root")
    factory.node(path, "--memory", memory, "--step-latency-us", "1000")
    with IoctlDevice(path) as first, IoctlDevice(path) as second:
        ours, theirs = first.claim_blocks(3), second.claim_blocks(5)
        assert (first.free_blocks().used_by_fd, second.free_blocks().used_by_fd) == (3, 5)
        batches = [submit(first, step([ours.first], [1])), submit(second, step([theirs.first], [2])), submit(first)]
        assert [batch.fence for batch in batches] == [1, 1, 2]
        for batch in batches:
            batch.wait()
        theirs.block(4)[:] = 77
        assert (first.memory[theirs.offset(4) : theirs.offset(4) + 64] == 77).all()
        mapping = second.memory
        second.close()  # with its mapping still there
        wait_until(lambda: first.free_blocks().free == 4096 - 3)
        assert mapping[theirs.start_offset + 4 * 64] == 77


# ------------------------------------------------------------------------------------------------------------- deaths


def wait_until_it_waits(client: Forked, path: str) -> None:
    """Return when a client sleeps in WAIT_FENCE, and the node knows."""
    call = f"{abi.WAIT_FENCE.request:#x}"
    wait_until(lambda: call in Path(f"/proc/{client.pid}/syscall").read_text(), what="its wait")
    with IoctlDevice(path) as other:
        other.free_blocks()  # asked after it, so read after it


@needs_node
def test_node_is_killed_while_a_client_waits(factory: NodeFactory, path: str) -> None:
    node = factory.node(path, *SLOW)
    device = IoctlDevice(path)
    device.claim_blocks(1).block(0)[:] = 42
    batch = submit(device)
    killed_ns: list[int] = []

    def kill() -> None:
        killed_ns.append(time.monotonic_ns())
        os.kill(node.pid, signal.SIGKILL)

    threading.Timer(0.05, kill).start()
    with pytest.raises(DeviceGone) as raised:
        batch.wait()
    took_ms = (time.monotonic_ns() - killed_ns[0]) / NS_PER_MS
    print(f"gone after {took_ms:.1f} ms")
    assert took_ms < 1000  # 100 on a machine that has nothing else to do
    assert raised.value.code in {errno.ECONNABORTED, errno.ENOTCONN}
    assert str(raised.value).startswith(f"{path} is gone: ")
    assert device.memory[device.info.kv_off] == 42  # memory says nothing about life
    for call in (device.free_blocks, device.reset, lambda: device.claim_blocks(1), lambda: submit(device)):
        with pytest.raises(DeviceGone):
            call()
    device.close()
    device.close()
    with pytest.raises(DeviceUnavailable, match="its server has died; start it again") as unopened:
        IoctlDevice(path)
    assert unopened.value.code == errno.ENOTCONN
    assert device.memory[device.info.kv_off] == 42

    factory.node(path)  # which clears the dead mount away
    with IoctlDevice(path) as other:
        assert other.info.boot_id != device.info.boot_id
        submit(other).wait()
        assert not other.memory[other.info.kv_off]


@needs_node
def test_client_is_killed_in_a_wait(factory: NodeFactory, path: str) -> None:
    factory.node(path, *SLOW)
    client = factory.client("wait_forever", path)
    assert client.line == "waits"
    with IoctlDevice(path) as device:
        assert device.free_blocks().free == 4096 - 5
        wait_until_it_waits(client, path)
        client.kill()
        wait_until(lambda: device.free_blocks().free == 4096)


@needs_node
@needs_root
def test_client_of_a_hung_node_is_freed_by_abort(factory: NodeFactory, path: str) -> None:
    node = factory.node(path, *SLOW)
    client = factory.client("wait_forever", path)
    wait_until_it_waits(client, path)
    node.freeze()
    client.send(signal.SIGKILL)
    wait_until(lambda: process_state(client.pid) == "D", what="an uninterruptible sleep")
    start_ns = time.monotonic_ns()
    assert abort_connection(path)
    wait_until(lambda: not client.is_alive)
    print(f"freed after {(time.monotonic_ns() - start_ns) / NS_PER_MS:.1f} ms")
    assert find_mount(path) is not None
    node.send(signal.SIGCONT)
    wait_until(lambda: not node.is_alive)
    assert find_mount(path) is None
    assert not os.path.exists(path)


@needs_node
@needs_root
def test_close_does_not_wait_for_a_hung_node(factory: NodeFactory, path: str) -> None:
    node = factory.node(path, *SLOW)
    with IoctlDevice(path) as device, IoctlDevice(path) as other:
        submit(device)
        node.freeze()
        device.close()
        node.send(signal.SIGCONT)
        wait_until(lambda: other.free_blocks().used_by_fd == 0)


# ------------------------------------------------------------------------------------------------------------- faults


@needs_node
def test_vanish(factory: NodeFactory, path: str) -> None:
    node = factory.node(path, "--inject", "vanish@2")
    with IoctlDevice(path) as device:
        submit(device).wait()
        with pytest.raises(DeviceGone):
            submit(device).wait()
    wait_until(lambda: not node.is_alive)


@needs_node
def test_hang(factory: NodeFactory, path: str) -> None:
    node = factory.node(path, "--inject", "hang@1")
    client = factory.client("wait_forever", path)
    wait_until(lambda: process_state(node.pid) == "T")
    assert abort_connection(path)
    wait_until(lambda: not client.is_alive)


@needs_node
def test_eio(factory: NodeFactory, path: str) -> None:
    factory.node(path, "--inject", "eio@1", "--memory", "named")
    with IoctlDevice(path) as device:
        with pytest.raises(DeviceFault, match="injected") as raised:
            submit(device).wait()
        assert raised.value.code == errno.EIO
        submit(device).wait()
