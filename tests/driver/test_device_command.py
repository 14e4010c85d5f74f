"""`ironbatch device`: its flags, its messages, its ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ironbatch.cli import main
from ironbatch.driver import abi, mount, options
from ironbatch.driver.ioctl import IoctlDevice
from ironbatch.driver.mount import abort_connection, find_mount
from ironbatch.driver.options import FLAGS
from tests.driver.node_factory import NodeFactory
from tests.driver.node_process import (
    END_S,
    NodeProcess,
    end_node,
    environment,
    needs_node,
    node_command,
    running_node,
    start_node,
)
from tests.driver.records import submit

Capture = pytest.CaptureFixture[str]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")  # so that what the command sets is undone
    monkeypatch.setenv("COLUMNS", "1000")


def problems(capsys: Capture, *flags: str, code: int = 2) -> list[str]:
    """What the command complains of, instead of serving."""
    assert main(["device", *flags]) == code
    out, err = capsys.readouterr()
    assert out == ""
    return [line.removeprefix("ironbatch: error: ") for line in err.splitlines()]


# -------------------------------------------------------------------------------------------------------------- flags


def test_help_lists_every_flag_with_its_default(capsys: Capture) -> None:
    assert main(["device", "--help"]) == 0
    out = capsys.readouterr().out
    for flag in FLAGS:
        metavar = f"[{flag.metavar}]" if flag.is_switch else flag.metavar
        entry = re.search(rf"^  {flag.text} {re.escape(metavar)}\s+(.*)$", out, re.MULTILINE)
        assert entry is not None, flag.text
        default = "" if flag.default is None else f" (default: {flag.default or 'none'})"
        assert entry[1] == flag.help + default
    assert "needs /dev/fuse" in out.lower()


def test_help_and_bad_values_import_nothing_heavy() -> None:
    program = (
        "import sys; from ironbatch.cli import main; main(['device', '--help']); main(['device', '--blocks', '0']);"
        "sys.exit(' '.join({'numpy', 'numba', 'falcon', 'uvloop', 'asyncio'} & sys.modules.keys()) or None)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment(), timeout=END_S
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--blocks", "0"], "--blocks: 0 is not between 1 and"),
        (["--blocks", "many"], "--blocks: 'many' is not a whole number; give one such as 64"),
        (["--blocks", "1" * 5000], "--blocks: '111"),
        (["--block-bytes", "6"], "--block-bytes: 6 is not a multiple of 4; use 8"),
        (["--ring-bytes", "5000"], "--ring-bytes: 5000 is not a multiple of 4096; use 8192"),
        (["--contexts", "-1"], "--contexts: -1 is not between 1 and 1024; use 1 or more"),
        (["--longest-step-us", "100"], "--longest-step-us: 100 is less than --step-latency-us 200"),
        (["--caps", "mmap,fly"], "--caps: 'fly' is no capability; use some of mmap, copy, zero, reset"),
        (["--seq-buckets", "4,2"], "--seq-buckets: 2 follows 4; put them in ascending order"),
        (["--token-buckets", "4,x"], "--token-buckets: 'x' is not a whole number"),
        (["--no-mix=maybe"], "--no-mix: 'maybe' is neither true nor false"),
        (["--memory", "shared"], "--memory: 'shared' is none of its values; use auto or passthrough or named"),
        (["--memory", "passthrough", "--caps", "copy"], "--memory: passthrough is how the capability mmap is had"),
        (["--mode", "rw"], "--mode: 'rw' is no mode; use three octal digits such as 0660"),
        (["--mode", "04755"], "--mode: '04755' is no mode"),
        (["--group", "no-such-group"], "--group: there is no group 'no-such-group'; name one that there is"),
        (["--inject", "fire"], "--inject: 'fire' is no fault; use some of lost-fence"),
        (["--inject", "eio@0"], "--inject: 'eio@0' names no batch"),
        (["--longest-step-us", "0"], "--longest-step-us: 0 is not between 1 and 600000000; use 1 or more"),
        (["--inject-rate", "2"], "--inject-rate: '2' is not between 0 and 1"),
        (["--inject-seed", "-1"], "--inject-seed: -1 is not between 0 and"),
        (["--abi", "two"], "--abi: 'two' is no version; use one such as 1.0"),
        (["--abi", "70000.0"], "--abi: (70000, 0) are not two numbers between 0 and 65535; use 1.0"),
        (["--node", ""], "--node: '' is no path; name a file to serve"),
        (["--blok", "4"], "'--blok' is no flag of device; did you mean --blocks?"),
        (["--workers", "4"], "'--workers' is no flag of device; "),
        (["now"], "'now' is no argument of device; `ironbatch device --help` lists those there are"),
    ],
)
def test_bad_value_is_one_line(flags: list[str], told: str, capsys: Capture) -> None:
    (line,) = problems(capsys, "--node", "/nonexistent/device0", *flags)
    assert line.startswith(told)


def test_all_bad_values_are_told(capsys: Capture) -> None:
    told = problems(capsys, "--blocks", "0", "--mode", "9", "--inject", "x", "--seq-buckets", "0")
    assert [line.split(":")[0].split()[0] for line in told] == [
        "--node",
        "--mode",
        "--blocks",
        "--seq-buckets",
        "--inject",
    ]


def test_values_are_read() -> None:
    import argparse  # noqa: PLC0415

    from ironbatch.driver.cli import add_arguments  # noqa: PLC0415

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sizes = ["--blocks", "7", "--caps", "copy,reset", "--no-mix", "--seq-buckets", "1,2,8", "--abi", "2.5"]
    access = ["--mode", "600", "--group", "12", "--allow-other", "--memory", "auto"]
    faults = ["--inject", "eio@3,hang", "--inject-rate", ".5"]
    read = options.NodeOptions.read(parser.parse_args(["--node", "n", *sizes, *access, *faults]))
    assert (read.path, read.mode, read.gid, read.is_for_all) == ("n", 0o600, 12, True)
    assert read.memory == "named"  # without mmap
    assert read.spec.caps == abi.CAP_COPY | abi.CAP_RESET
    assert (read.spec.blocks, read.spec.mixes, read.spec.seq_buckets, read.spec.abi) == (7, False, (1, 2, 8), (2, 5))
    assert read.faults.kinds == {"eio", "hang"}
    plain = options.NodeOptions.read(parser.parse_args(["--node", "n"]))
    assert (plain.memory, plain.mode, plain.gid, plain.spec.mixes) == ("auto", 0o660, os.getegid(), True)


# ------------------------------------------------------------------------------------------------------ a real process


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with running_node(tmp_path, "--blocks", "64", "--step-latency-us", "0") as found:
        yield found


@needs_node
def test_life_of_a_node(node: NodeProcess) -> None:
    assert re.fullmatch(
        rf"ironbatch device: serving {node.path} \(64 blocks of 64 bytes, memory by (passthrough|name)\)", node.line
    )
    with IoctlDevice(node.path) as device:
        assert bool(device.info.caps & abi.CAP_MMAP) == node.line.endswith("by passthrough)")
        submit(device).wait()
        second = subprocess.run(
            node_command(node.path), capture_output=True, text=True, check=False, env=environment(), timeout=60
        )
        assert second.returncode == 1
        assert second.stderr == (
            f"ironbatch: error: cannot mount {node.path}: a living node is mounted there; stop it, or choose another"
            " path (`fuser -v /dev/fuse` lists those that serve one)\n"
        )
        assert node.stop() == 0  # with a client that has it open
    assert find_mount(node.path) is None
    assert not Path(node.path).exists()
    assert node.process.stdout is not None
    assert node.process.stderr is not None
    assert (node.process.stdout.read(), node.process.stderr.read()) == ("", "")


@needs_node
@needs_root
def test_other_ends_of_a_node(tmp_path: Path) -> None:
    """Interrupted; unmounted from outside; cut off from its clients."""
    nodes = [start_node(tmp_path / f"device{k}") for k in range(3)]
    try:
        interrupted, unmounted, aborted = nodes
        interrupted.process.send_signal(signal.SIGINT)
        subprocess.run(["umount", unmounted.path], check=True, timeout=END_S)
        with IoctlDevice(aborted.path):
            assert abort_connection(aborted.path)
        assert [node.process.wait(END_S) for node in nodes] == [0, 0, 1]
        said = []
        for node in nodes:
            assert node.process.stdout is not None
            said.append(node.process.stdout.read())
            assert find_mount(node.path) is None
            assert not Path(node.path).exists()
        assert said == [
            "",
            f"ironbatch device: {unmounted.path} was unmounted\n",
            f"ironbatch device: {aborted.path}: its connection was aborted; start it again\n",
        ]
    finally:
        for node in nodes:
            end_node(node)


@needs_node
@needs_root
def test_successor_of_a_killed_node(factory: NodeFactory, tmp_path: Path) -> None:
    path = tmp_path / "device0"
    factory.node(path).kill()
    assert find_mount(str(path)) is not None
    factory.node(path)
    IoctlDevice(str(path)).close()


@needs_root
def test_no_dev_fuse_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(mount, "FUSE_DEVICE", str(tmp_path / "fuse"))
    (told,) = problems(capsys, "--node", str(tmp_path / "device0"), code=1)
    assert told.startswith(f"there is no {tmp_path}/fuse; load it (modprobe fuse), or give it to the container")
    assert os.listdir(tmp_path) == []


@needs_node
@needs_root
def test_more_memory_than_there_is_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}.get)
    (told,) = problems(capsys, "--node", str(tmp_path / "device0"), code=1)
    assert told.startswith("the device takes 8683520 bytes of memory, and this machine has 409600; lower --blocks")
    assert os.listdir(tmp_path) == []


def test_fences_that_may_be_late_are_warned_of(tmp_path: Path, capsys: Capture) -> None:
    """Two engines on one device would take each other's time for a lost fence, and reset it in turns."""
    flags = ("--step-latency-us", "300000", "--contexts", "2", "--max-in-flight", "1")
    place = str(tmp_path / "none" / "device0")
    warned, _ = problems(capsys, "--node", place, *flags, code=1)
    assert warned.startswith("ironbatch device: warning: --longest-step-us 500000: with 2 contexts that have 1 batches")
    assert "a fence may take 600000 us" in warned
    (_,) = problems(capsys, "--node", place, *flags, "--longest-step-us", "600000", code=1)


@needs_node
@pytest.mark.parametrize("limit", range(5, 14, 2))
def test_few_descriptors_are_one_line_or_enough(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "device0"
    command = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *node_command(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    assert process.stdout is not None
    node = NodeProcess(str(path), process, process.stdout.readline())
    try:
        if "serving" in node.line:
            assert node.stop() == 0
        else:
            assert node.line == "ironbatch: error: there are not enough file descriptors; raise the limit (ulimit -n)\n"
            assert process.wait(20) == 1
        assert process.stdout.read() == ""
    finally:
        end_node(node)


@needs_node
@needs_root
def test_reader_that_has_gone_leaves_no_mount(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    path = tmp_path / "device0"
    try:
        ran = subprocess.run(
            node_command(path), stdout=writer, stderr=subprocess.PIPE, check=False, env=environment(), timeout=60
        )
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")
    assert find_mount(str(path)) is None
    assert not path.exists()


NOBODY = 65534
AS_NOBODY: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}


def _user_problem() -> str:
    """Why an ordinary user can't serve a node here."""
    if os.geteuid() != 0:
        return "this is run by an ordinary user anyway"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed"
    if not os.path.exists(mount.FUSE_DEVICE) or os.stat(mount.FUSE_DEVICE).st_mode & 0o006 != 0o006:
        return f"{mount.FUSE_DEVICE} is not open to all users"
    try:
        subprocess.run([sys.executable, "-c", "import numba"], check=True, env=environment(), timeout=60, **AS_NOBODY)
    except (OSError, subprocess.SubprocessError):
        return f"{sys.executable} is not open to all users"
    return ""


_USER_PROBLEM = _user_problem()


@pytest.mark.skipif(bool(_USER_PROBLEM), reason=_USER_PROBLEM or "an ordinary user can")
def test_ordinary_user(public_path: Path) -> None:
    home = public_path.parent / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    path = home / "device0"
    cache = home / "cache"
    environ = environment() | {"IRONBATCH_CACHE_DIR": str(cache), "HOME": str(home)}
    process = subprocess.Popen(
        node_command(path, "--blocks", "64"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        **AS_NOBODY,
    )
    assert process.stdout is not None
    node = NodeProcess(str(path), process, process.stdout.readline())
    try:
        assert node.line == f"ironbatch device: serving {path} (64 blocks of 64 bytes, memory by name)\n"
        client = (
            "import sys; from ironbatch.driver.ioctl import IoctlDevice; d = IoctlDevice(sys.argv[1]);"
            " kv = d.claim_blocks(2); kv.block(0)[:] = 7; d.wait(d.copy_blocks(kv, [(0, 1)]), 2**62);"
            " print(kv.block(1).sum())"
        )
        ran = subprocess.run(
            [sys.executable, "-c", client, str(path)],
            capture_output=True,
            text=True,
            check=False,
            env=environ,
            **AS_NOBODY,
            timeout=240,
        )
        assert (ran.stdout, ran.stderr) == (f"{7 * 64}\n", "")
        assert node.stop() == 0
        assert find_mount(str(path)) is None
        assert not path.exists()
    finally:
        end_node(node)
