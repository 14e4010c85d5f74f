"""Mounts: how they are found, made, cleared away, and cut off from a node that hangs."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ironbatch.driver import mount
from ironbatch.driver.fuse import STATFS_OUT, UNANSWERED, Connection, Disconnected, Opcode
from ironbatch.driver.mount import MountedNode, abort_connection, aborted_if_hung, find_mount, mount_node
from ironbatch.errors import DeviceUnavailable, StartError
from tests.driver.node_process import clear_mount, needs_node
from tests.support import wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount by itself")

MOUNTINFO = r"""22 1 0:20 / / rw,relatime shared:1 - overlay overlay rw
45 27 0:40 / /run/ib/device0 rw,nosuid shared:7 master:3 - fuse.ironbatch ironbatch rw,user_id=0
46 27 0:41 / /run/ib/a\040b\134c rw,nosuid - fuse.ironbatch ironbatch rw,user_id=0
47 45 0:42 / /run/ib/device0 rw,nosuid - tmpfs none rw
"""


# ------------------------------------------------------------------------------------------------------- without a node


@pytest.fixture
def mountinfo(tmp_path: Path) -> str:
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    return str(tmp_path / "mountinfo")


def test_topmost_mount_is_found(mountinfo: str) -> None:
    assert find_mount("/run/ib/device0", mountinfo) == (42, "/run/ib/device0", "tmpfs")


def test_escaped_path_is_found(mountinfo: str) -> None:
    assert find_mount("/run/ib/a b\\c", mountinfo) == (41, "/run/ib/a b\\c", "fuse.ironbatch")


def test_what_is_below_a_mount_is_none(mountinfo: str) -> None:
    assert find_mount("/run/ib", mountinfo) is None
    assert find_mount("/run/ib/device0/x", mountinfo) is None


def test_relative_path_and_link_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_text(f"45 27 0:40 / {tmp_path}/real/device0 rw - fuse.ironbatch ironbatch rw\n")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "device").symlink_to("link/device0")
    monkeypatch.chdir(tmp_path)
    for path in ("real/device0", "./link/../real/device0", "device", f"{tmp_path}/link/device0"):
        found = find_mount(path, "mountinfo")
        assert found is not None, path
        assert found.path == f"{tmp_path}/real/device0"


def test_circle_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(StartError, match="too many symbolic links"):
        find_mount(str(tmp_path / "a"))


def test_nothing_to_abort(tmp_path: Path) -> None:
    assert not abort_connection(str(tmp_path / "nothing"))
    assert not abort_connection("/")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.mkdir(), "no regular file"),
        (os.mkfifo, "no regular file"),
        (lambda path: path.write_text("precious"), "a file with content"),
    ],
)
def test_what_is_no_place_for_a_node(tmp_path: Path, make: object, told: str) -> None:
    path = tmp_path / "device0"
    make(path)  # type: ignore[operator]
    with pytest.raises(StartError, match=told):
        mount_node(str(path))
    assert path.exists()


def test_folder_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file or directory; name a file in a folder that exists"):
        mount_node(str(tmp_path / "no" / "device0"))


@pytest.mark.parametrize("device", ["missing", "closed"])
@needs_root
def test_dev_fuse_that_is_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    (tmp_path / "closed").symlink_to("closed")  # ELOOP, for root may open all that is there
    monkeypatch.setattr(mount, "FUSE_DEVICE", str(tmp_path / device))
    with pytest.raises(StartError, match=r"modprobe fuse" if device == "missing" else r"can't be opened") as raised:
        mount_node(str(tmp_path / "device0"))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "device0").exists()


def test_ordinary_user_without_a_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(StartError, match="fusermount3, which helps others, is not installed"):
        mount_node(str(tmp_path / "device0"))
    assert not (tmp_path / "device0").exists()


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (
            "failed to open /dev/fuse: Permission denied",
            "/dev/fuse must be there (modprobe fuse) and open to this user",
        ),
        ("option allow_other only allowed if 'user_allow_other' is set in /etc/fuse.conf", "leave out --allow-other"),
        ("", "exit code 1; /dev/fuse must be there"),
    ],
)
def test_helper_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, remedy: str) -> None:
    helper = tmp_path / "fusermount3"
    helper.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    helper.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: str(helper))
    with pytest.raises(StartError, match=re.escape(remedy)) as raised:
        mount_node(str(tmp_path / "device0"))
    assert said in str(raised.value)
    assert not (tmp_path / "device0").exists()


def test_helper_sends_the_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "fusermount3"
    helper.write_text(
        "#!/usr/bin/env python3\n"
        "import os, socket, sys\n"
        f"open({str(tmp_path / 'said')!r}, 'w').write(' '.join(sys.argv[1:]))\n"
        "ours = socket.socket(fileno=int(os.environ['_FUSE_COMMFD']))\n"
        "socket.send_fds(ours, [b'\\0'], [os.open('/dev/null', os.O_RDWR)])\n"
    )
    helper.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: str(helper))
    path = str(tmp_path / "device0")
    mounted = mount_node(path, is_for_all=True)
    try:
        assert os.fstat(mounted.fd).st_rdev == os.stat(os.devnull).st_rdev
        assert not os.get_inheritable(mounted.fd)
    finally:
        os.close(mounted.fd)
    options = "fsname=ironbatch,subtype=ironbatch,default_permissions,allow_other"
    assert (tmp_path / "said").read_text() == f"-o {options} -- {path}"


# --------------------------------------------------------------------------------------------------------- with a mount


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[MountedNode]:
    """A mount that nobody serves yet."""
    found = mount_node(str(tmp_path / "device0"))
    connection = Connection(found.fd)
    yield found
    connection.close()
    clear_mount(found.path)


@needs_node
@needs_root
def test_file_is_made_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "device0"
    made = mount_node(str(path))
    assert made.find() == str(path)
    made.unmount()
    os.close(made.fd)
    assert made.find() is None
    assert not path.exists()


@needs_node
@needs_root
def test_renamed_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    made = mount_node(str(tmp_path / "old" / "device0"))
    (tmp_path / "old").rename(tmp_path / "new")
    assert made.find() == str(tmp_path / "new" / "device0")
    made.unmount()
    os.close(made.fd)
    assert find_mount(str(tmp_path / "new" / "device0")) is None
    assert not list((tmp_path / "new").iterdir())


@needs_node
@needs_root
def test_file_that_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "device0"
    path.touch(0o640)
    made = mount_node(str(path))
    made.unmount()
    made.unmount()
    os.close(made.fd)
    assert path.stat().st_mode & 0o777 == 0o640


@needs_node
@needs_root
def test_dead_mounts_are_cleared_away(tmp_path: Path) -> None:
    path = tmp_path / "device0"
    first = mount_node(str(path))
    os.close(first.fd)  # as if its server had been killed
    with pytest.raises(OSError, match="not connected") as raised:
        os.statvfs(path)
    assert raised.value.errno == errno.ENOTCONN
    second = mount_node(str(path))
    os.close(second.fd)
    second.unmount()
    assert find_mount(str(path)) is None
    assert path.exists()  # the first one has made it, and nobody knows


def _abort(given_up: MountedNode) -> None:
    assert abort_connection(given_up.path)


def _detach_under_a_client(given_up: MountedNode) -> None:
    """Its file system lives on, out of sight, while the folder descriptor that is opened here does."""
    subprocess.run(["umount", "-l", given_up.path], check=True, timeout=10)


@needs_node
@needs_root
@pytest.mark.parametrize("give_up", [_abort, _detach_under_a_client])
def test_successor_s_mount_and_file_outlive_the_predecessor(
    tmp_path: Path, give_up: Callable[[MountedNode], None]
) -> None:
    path = tmp_path / "device0"
    first = mount_node(str(path))
    held = os.open(path, os.O_PATH) if give_up is _detach_under_a_client else os.open(tmp_path, os.O_PATH)
    give_up(first)
    second = mount_node(str(path))
    connection = Connection(second.fd)
    answers = threading.Thread(target=_answer_statfs, args=(connection,))
    answers.start()
    try:
        assert first.find() is None
        first.unmount()
        assert second.find() == str(path)
        assert "device0" in os.listdir(tmp_path)
    finally:
        os.close(held)
        second.unmount()
        answers.join(20)
        connection.close()
        os.close(first.fd)
    assert find_mount(str(path)) is None


def _answer_statfs(connection: Connection) -> None:
    """A node that answers whether it lives, until it is unmounted."""
    connection.negotiate()
    with contextlib.suppress(Disconnected):
        while True:
            request = connection.read()
            if request is not None and request.opcode == Opcode.STATFS:
                connection.reply(request.unique, STATFS_OUT.pack(1, 0, 0, 1, 0, 4096, 255, 4096, 0))
            elif request is not None and request.opcode not in UNANSWERED:
                connection.reply_error(request.unique, errno.ENOSYS)


@needs_node
@needs_root
def test_only_one_of_several_that_start_at_once_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount, "PROBE_S", 0.5)
    path = str(tmp_path / "device0")
    made: list[MountedNode] = []
    told: list[str] = []

    def start() -> None:
        try:
            made.append(mount_node(path))
        except StartError as problem:
            told.append(str(problem))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1
    assert len(told) == 5
    assert all("a living node is mounted there" in line for line in told)
    made[0].unmount()
    os.close(made[0].fd)
    assert find_mount(path) is None


@needs_node
@needs_root
def test_mount_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "device0"
    path.touch()
    subprocess.run(["mount", "--bind", str(path), str(path)], check=True, timeout=10)
    try:
        with pytest.raises(StartError, match="is mounted there; choose another path"):
            mount_node(str(path))
        assert not abort_connection(str(path))
    finally:
        subprocess.run(["umount", str(path)], check=True, timeout=10)


@needs_node
@needs_root
def test_mount_that_hangs_counts_as_alive(mounted: MountedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers, so asking it would never end; and it may be somebody's who will go on."""
    monkeypatch.setattr(mount, "PROBE_S", 0.2)
    with pytest.raises(StartError, match="a living node is mounted there; stop it"):
        mount_node(mounted.path)


@needs_node
@needs_root
def test_abort_by_force(mounted: MountedNode) -> None:
    """Whoever waits for an answer is freed."""
    connection = Connection(os.dup(mounted.fd))
    connection.negotiate()
    with subprocess.Popen(["stat", "-f", mounted.path], stderr=subprocess.PIPE, text=True) as stuck:
        wait_until(lambda: (request := connection.read()) is not None and request.opcode == Opcode.STATFS)
        connection.close()
        assert abort_connection(mounted.path, connections="/nonexistent")
        _, told = stuck.communicate(timeout=10)
    assert stuck.returncode == 1
    assert "not connected" in told or "connection abort" in told


@needs_node
@needs_root
def test_whoever_opens_a_node_that_hangs_is_freed(mounted: MountedNode) -> None:
    connection = Connection(os.dup(mounted.fd))
    connection.negotiate()
    start_s = time.monotonic()
    with pytest.raises(OSError, match=r"not connected|connection abort"), aborted_if_hung(mounted.path, 0.3):
        os.open(mounted.path, os.O_RDWR)
    assert 0.3 <= time.monotonic() - start_s < 20
    connection.close()


@needs_node
@needs_root
@pytest.mark.parametrize("patience_s", [0, 20])
def test_whoever_is_served_in_time_aborts_nothing(mounted: MountedNode, patience_s: float) -> None:
    with aborted_if_hung(mounted.path, patience_s):
        pass
    assert [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)] == []
    assert mounted.find() == mounted.path


@needs_node
@needs_root
def test_abort_by_fusectl(mounted: MountedNode, tmp_path: Path) -> None:
    found = find_mount(mounted.path)
    assert found is not None
    connections = tmp_path / "connections"
    connections.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "none", str(connections)], check=True, timeout=10)
    try:
        assert (connections / str(found.device_minor)).is_dir()
        assert abort_connection(mounted.path, str(connections))
    finally:
        subprocess.run(["umount", str(connections)], check=True, timeout=10)
    with pytest.raises(OSError, match="not connected"):
        os.statvfs(mounted.path)


def test_abort_that_is_not_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = mount.Mount(40, str(tmp_path / "device0"), "fuse.ironbatch")
    monkeypatch.setattr(mount, "find_mount", lambda path: found)
    monkeypatch.setattr(mount, "_umount", lambda path, flags: errno.EPERM)
    with pytest.raises(DeviceUnavailable, match="can't be aborted: Operation not permitted; kill the server"):
        abort_connection("device0", connections=str(tmp_path))
