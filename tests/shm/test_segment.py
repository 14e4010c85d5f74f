"""The segment's life: who makes it, who may remove it, and what is left when somebody dies."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ironbatch import layout
from ironbatch.errors import StartError
from ironbatch.shm import segment as segment_module
from ironbatch.shm.segment import Segment
from tests.shm.descriptors import open_descriptors
from tests.support import small_config, wait_until

SHM = Path("/dev/shm")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def segment(prefix: str) -> Iterator[Segment]:
    found = Segment.create(small_config(), 4711)
    yield found
    found.close()


def python(program: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A Python of its own, with our package; its output is text."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("IRONBATCH_INTERNAL")}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, env=environ, **options)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


# --------------------------------------------------------------------------------------------------- create, attach


def test_a_new_segment_is_ours_alone(segment: Segment, prefix: str) -> None:
    path = SHM / segment.name
    assert segment.name.startswith(prefix)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == segment.header["segment_bytes"]


def test_its_name_is_ironbatchs_and_its_own() -> None:
    first, second = Segment.create(small_config(), 0), Segment.create(small_config(), 0)
    assert first.name != second.name
    assert {first.name[:10], second.name[:10]} == {"ironbatch-"}
    first.close()
    second.close()


def test_all_its_pages_are_reserved(segment: Segment) -> None:
    status = (SHM / segment.name).stat()
    assert status.st_blocks * 512 >= status.st_size


def test_what_the_header_says(segment: Segment) -> None:
    config = small_config()
    header = segment.header
    sizes = {"num_slots": config.num_slots, "num_lanes": config.num_lanes, "max_model_len": config.max_model_len}
    where = layout.offsets(**sizes)
    assert {name: header[name] for name in sizes} == sizes
    assert header["magic"] == layout.MAGIC
    assert header["layout_version"] == layout.LAYOUT_VERSION
    assert header["segment_bytes"] == where.total
    for table in ("lanes", "entries", "slots", "tokens", "metrics"):
        assert header[f"{table}_offset"] == getattr(where, table)
    assert header["max_request_tokens"] == config.max_request_tokens
    assert header["created_ns"] == 4711
    assert header["scheduler_ready"] == header["draining"] == header["epoch"] == 0
    assert segment.metrics[0]["kv_blocks_total"] == segment.metrics[0]["kv_blocks_free"] == config.total_kv_blocks


def test_everything_else_is_zero(segment: Segment) -> None:
    assert not segment.slots.view(np.uint8).any()
    assert not segment.lanes.view(np.uint8).any()
    assert not segment.tokens.any()


def test_the_tables_have_their_shapes_and_do_not_touch(segment: Segment) -> None:
    config = small_config()
    assert segment.lanes.shape == (config.num_lanes,)
    assert segment.slots.shape == (config.num_slots,)
    assert segment.metrics.shape == (1 + config.num_lanes,)
    assert segment.tokens.shape == (config.num_slots, layout.token_row_tokens(config.max_model_len))
    starts = [table.ctypes.data for table in (segment.lanes, segment.slots, segment.tokens, segment.metrics)]
    ends = [table.ctypes.data + table.nbytes for table in (segment.lanes, segment.slots, segment.tokens)]
    assert starts == sorted(starts)
    assert starts[0] == segment.address + layout.HEADER.itemsize
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=True))
    assert starts[3] + segment.metrics.nbytes == segment.address + segment.header["segment_bytes"]
    assert all(start % layout.CACHE_LINE_BYTES == 0 for start in starts)


def test_who_attaches_sees_the_same_words(segment: Segment) -> None:
    other = Segment.attach(segment.name)
    other.slots[3]["seed"] = 99
    other.tokens[-1, -1] = 7
    segment.lanes[1]["tail"] = 5
    segment.header["epoch"] = 2
    assert segment.slots[3]["seed"] == 99
    assert segment.tokens[-1, -1] == 7
    assert other.lanes[1]["tail"] == 5
    assert other.header["epoch"] == 2
    assert other.address != segment.address
    other.populate()
    other.close()
    assert (SHM / segment.name).exists()
    assert segment.slots[3]["seed"] == 99


def test_its_creator_removes_it_once(prefix: str) -> None:
    segment = Segment.create(small_config(), 0)
    path = SHM / segment.name
    assert path.exists()
    segment.close()
    assert not path.exists()
    path.touch()  # somebody else's by now
    segment.close()
    assert path.exists()
    path.unlink()


def test_one_that_vanished_before_its_creator_left(prefix: str) -> None:
    segment = Segment.create(small_config(), 0)
    (SHM / segment.name).unlink()
    segment.close()


def test_to_leave_while_a_view_lives_on(prefix: str) -> None:
    segment = Segment.create(small_config(), 0)
    row = segment.slots[2]
    segment.close()
    row["seed"] = 3  # the mapping goes with the process
    assert not (SHM / segment.name).exists()


def test_a_forked_child_removes_nothing(segment: Segment) -> None:
    program = """
    import os, sys
    from ironbatch.shm.segment import Segment
    from ironbatch.config import Config
    segment = Segment.create(Config(max_queued_requests=1, max_running_seqs=1, max_model_len=64), 0)
    pid = os.fork()
    if pid == 0:
        segment.close()
        os._exit(0)
    os.waitpid(pid, 0)
    print(os.path.exists(f"/dev/shm/{segment.name}"))
    segment.close()
    print(os.path.exists(f"/dev/shm/{segment.name}"))
    """
    assert finished(python(program)) == (0, "True\nFalse\n", "")


# ---------------------------------------------------------------------------------------------- processes that end

ATTACHER = """
import sys
from ironbatch.shm.segment import Segment
segment = Segment.attach(sys.argv[1])
segment.slots[0]["seed"] = 41
views = segment.header, segment.slots, segment.lanes, segment.tokens, segment.metrics
print("attached", flush=True)
"""


def test_an_attached_process_that_exits_does_not_remove_it(segment: Segment) -> None:
    """A plain attach registers with that process's resource tracker, which unlinks at the exit."""
    for close in ("", "\nsegment.close()\n"):
        code, out, err = finished(python(ATTACHER + close, segment.name))
        assert (code, out) == (0, "attached\n")
        assert err == "", "not a word at the exit, live views or not"
        assert (SHM / segment.name).exists()
    assert segment.slots[0]["seed"] == 41


def test_a_process_that_has_no_memory_to_attach_does_not_remove_it(segment: Segment) -> None:
    """SharedMemory itself unlinks what it cannot map."""
    program = """
    import resource, sys
    from ironbatch.shm.segment import Segment
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
    try:
        Segment.attach(sys.argv[1])
    except OSError as problem:
        print(problem.strerror)
    """
    code, out, _ = finished(python(program, segment.name))
    assert (code, out) == (0, "Cannot allocate memory\n")
    assert (SHM / segment.name).exists()


def test_the_control_a_plain_attach_does_remove_it() -> None:
    control = shared_memory.SharedMemory(f"test-ironbatch-{secrets.token_hex(4)}", create=True, size=64)
    path = SHM / control.name
    program = """
    import sys
    from multiprocessing import shared_memory
    memory = shared_memory.SharedMemory(sys.argv[1])
    memory.close()
    """
    process = python(program, control.name)
    finished(process)
    wait_until(lambda: not path.exists(), what="the trap")
    control.close()
    path.touch()  # for the unlink, which tells the resource tracker too
    control.unlink()


def test_an_attached_process_that_is_killed_does_not_remove_it(segment: Segment) -> None:
    process = python(ATTACHER + "sys.stdin.read()\n", segment.name)
    assert process.stdout is not None
    assert process.stdout.readline() == "attached\n"
    process.kill()
    process.communicate(timeout=30)
    assert (SHM / segment.name).exists()
    assert segment.slots[0]["seed"] == 41


CREATOR = """
import sys
from ironbatch.config import Config
from ironbatch.shm.segment import Segment
segment = Segment.create(Config(max_queued_requests=1, max_running_seqs=1, max_model_len=64), 0)
views = segment.header, segment.slots, segment.lanes, segment.tokens, segment.metrics
print(segment.name, flush=True)
sys.stdin.read()
segment.close()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_creator_that_is_killed_leaves_nothing(number: int) -> None:
    process = python(CREATOR)
    assert process.stdout is not None
    path = SHM / process.stdout.readline().strip()
    assert path.exists()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == -number
    wait_until(lambda: not path.exists(), what="the resource tracker's unlink")


def test_a_creator_that_ends_with_live_views_says_nothing() -> None:
    process = python(CREATOR)
    assert process.stdout is not None
    path = SHM / process.stdout.readline().strip()
    code, _, err = finished(process)
    assert (code, err) == (0, "")
    assert not path.exists()


# --------------------------------------------------------------------------------------------------------- problems


def test_none_of_that_name() -> None:
    with pytest.raises(StartError, match="ironbatch-nowhere does not exist: its engine has ended"):
        Segment.attach("ironbatch-nowhere")


@pytest.mark.parametrize(("word", "value"), [("layout_version", layout.LAYOUT_VERSION + 1), ("magic", 1)])
def test_another_layout(segment: Segment, word: str, value: int) -> None:
    segment.header[word] = value
    with pytest.raises(StartError) as caught:
        Segment.attach(segment.name)
    assert f"reads {layout.LAYOUT_VERSION}" in str(caught.value)
    assert "restart the whole engine" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EOPNOTSUPP, errno.EFBIG])
def test_no_room_is_one_line_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, prefix: str, number: int) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        assert list(SHM.glob(f"{prefix}*")), "the segment is there when its pages are asked for"
        raise OSError(number, os.strerror(number))

    Segment.create(small_config(), 0).close()  # now the resource tracker runs, and its pipe is open
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_descriptors()
    with pytest.raises(StartError) as caught:
        Segment.create(small_config(), 0)
    message = str(caught.value)
    assert "\n" not in message
    assert "cannot reserve" in message
    assert "/dev/shm" in message
    if number == errno.ENOSPC:
        assert "MiB free" in message
        assert "--max-queued-requests" in message
    else:
        assert os.strerror(number) in message
    assert open_descriptors() == before
    assert not list(SHM.glob(f"{prefix}*"))


def test_a_shm_open_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(segment_module, "_Memory", refuse)
    with pytest.raises(StartError, match=r"cannot reserve .* MiB of shared memory in /dev/shm: Permission denied"):
        Segment.create(small_config(), 0)


def test_a_mapping_that_fails_leaves_nothing(prefix: str) -> None:
    """Address space is a limit too (ulimit -v).

    Standard error is not looked at: `SharedMemory.__init__` then unregisters what it has not registered yet, and
    CPython's resource tracker prints a KeyError of its own.
    """
    program = """
    import resource, sys
    from ironbatch.config import Config
    from ironbatch.errors import StartError
    from ironbatch.shm import segment
    segment.NAME_PREFIX = sys.argv[1]
    segment.Segment.create(Config(max_queued_requests=1, max_running_seqs=1, max_model_len=64), 0).close()
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
    try:
        segment.Segment.create(Config(max_model_len=65536), 0)
    except StartError as problem:
        print(problem)
    """
    code, out, _ = finished(python(program, prefix))
    assert code == 0
    assert out.startswith("cannot reserve")
    assert out.count("\n") == 1
    assert not list(SHM.glob(f"{prefix}*"))


# ------------------------------------------------------------------------------------------- a /dev/shm that is full

IN_A_SMALL_SHM = """
import os, sys
from multiprocessing import shared_memory
from ironbatch.config import Config
from ironbatch.errors import StartError
from ironbatch.shm.segment import Segment
if sys.argv[1] == "control":
    memory = shared_memory.SharedMemory(create=True, size=24 * 2**20)
    print("created", flush=True)
    memory.buf[:] = bytes(24 * 2**20)
    print("written", flush=True)
    sys.exit(0)
try:
    Segment.create(Config(), 0)
except StartError as problem:
    print(problem)
small = Segment.create(Config(max_queued_requests=1, max_running_seqs=1, max_model_len=64), 0)
small.close()
print(os.listdir("/dev/shm"))
"""


def in_a_small_shm(what: str) -> subprocess.CompletedProcess[str]:
    """Run in a mount namespace of its own whose /dev/shm has 2 MiB; skip where that is not permitted."""
    mount = "mount -t tmpfs -o size=2m tmpfs /dev/shm"
    try:
        probe = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare(1) here")
    if probe.returncode != 0:
        pytest.skip(f"no mount namespace here: {probe.stderr.strip()}")
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", IN_A_SMALL_SHM, what],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_full_shm_is_a_message_at_start() -> None:
    found = in_a_small_shm("segment")
    assert found.returncode == 0, found.stderr
    message, left = found.stdout.splitlines()
    assert message.startswith("cannot reserve ")
    assert "/dev/shm has 2.0 MiB free" in message
    assert "docker run --shm-size" in message
    assert left == "[]"
    assert found.stderr == ""


def test_the_control_ftruncate_alone_dies_of_it_later() -> None:
    found = in_a_small_shm("control")
    assert found.returncode == -signal.SIGBUS
    assert "created" in found.stdout
    assert "written" not in found.stdout
