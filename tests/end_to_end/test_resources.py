"""What a machine may lack: each lack is a message that names the remedy, or a service that does without."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from ironbatch.kernels.jit import cache_directory
from tests.end_to_end.changed_start import (
    Environment,
    changed_command,
    free_port,
    in_private_mounts,
    in_shell,
    running_under,
    within_everybodys_reach,
)
from tests.end_to_end.server import (
    FORMS,
    REPOSITORY,
    START_S,
    RawStream,
    Server,
    generate_all,
    plain_body,
    segments_of,
    stale_segments,
    wait_until,
)

pytestmark = pytest.mark.end_to_end

SERVES: Final = {"prompt_tokens": 4, "max_new_tokens": 20}
MIB: Final = 1 << 20
NO_ACCOUNT: Final = 54_321  # a user id that /etc/passwd does not know


def assert_serves(port: int) -> None:
    stream = RawStream(port, SERVES)
    assert stream.read_all() == plain_body(20)
    stream.close()


def said(server: Server) -> str:
    return "".join(server.output)


# --------------------------------------------------------------------------------------------------- shared memory


@pytest.mark.parametrize("form", FORMS)
def test_a_dev_shm_of_1_mib_is_a_message_at_start(form: str) -> None:
    mounted = in_private_mounts("mount -t tmpfs -o size=1M tmpfs /dev/shm")
    words, environ = changed_command([*mounted, "sh", "-c", '"$@"; echo "exit $?"; ls /dev/shm', "sh"], {}, form, {})
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=START_S, cwd="/", check=False)
    (told,) = [line for line in done.stderr.splitlines() if "shared memory" in line]
    for part in ("1.0 MiB free", "--max-queued-requests", "--max-model-len", "docker run --shm-size"):
        assert part in told
    assert "Traceback" not in done.stderr
    *_, last = done.stdout.splitlines()
    assert last == "exit 1", "and nothing is listed after it"


@pytest.mark.parametrize("form", FORMS)
def test_a_smaller_engine_fits_into_a_small_dev_shm(form: str) -> None:
    """The remedy that the message names."""
    prefix = in_private_mounts("mount -t tmpfs -o size=1M tmpfs /dev/shm")
    small = {"max_queued_requests": 10, "max_running_seqs": 10, "max_model_len": 512, "workers": 1}
    with running_under(prefix, {}, form, **small) as server:
        assert_serves(server.port)


@pytest.mark.parametrize("form", FORMS)
def test_a_dev_shm_that_is_filled_after_the_start_harms_nobody(form: str) -> None:
    """All of the segment is reserved at the start: later nothing asks for more, whoever dies or is replaced."""
    prefix = in_private_mounts("mount -t tmpfs -o size=64M tmpfs /dev/shm")
    with running_under(prefix, {}, form, mock_token_latency_us=5_000) as server:
        stream = RawStream(server.port, {"prompt_tokens": 4, "max_new_tokens": 400})
        body = stream.read_chunk()
        fill(Path(f"/proc/{server.process.pid}/root/dev/shm/full"))
        server.scheduler().kill()
        old = {process.pid for process in server.processes("web worker")}
        server.process.send_signal(signal.SIGHUP)
        # Every slot's pages are written: what was not reserved would be a SIGBUS.
        generate_all(server.port, [{"prompt_tokens": 8000, "max_new_tokens": 2}] * 64)
        wait_until(lambda: replaced(server, old), "new workers", 60)
        assert body + stream.read_all() == plain_body(400)
        stream.close()
        assert_serves(server.port)
        assert "SIGBUS" not in said(server)


def replaced(server: Server, old: set[int]) -> bool:
    new = {process.pid for process in server.processes("web worker")}
    return len(new) == 2 and not new & old


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(MIB))
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


# ----------------------------------------------------------------------------------------------------- open files


@pytest.mark.parametrize("form", FORMS)
def test_64_open_files_are_served_within(form: str) -> None:
    """More clients than a worker can hold are let go, which costs neither a processor nor a line each."""
    with running_under(in_shell("ulimit -n 64"), {}, form) as server:
        (warning,) = [line for line in said(server).splitlines() if "limit of open files is 64" in line]
        assert "ulimit -n" in warning
        with contextlib.ExitStack() as stack:
            clients = [client for _ in range(300) if (client := connected(server.port)) is not None]
            for client in clients:
                stack.enter_context(client)
            let_go = [client for client in clients if is_let_go(client)]
            assert let_go, "the control: there are more clients than descriptors"
            lines_before, cpu_before_s = len(server.output), cpu_s(server)
            time.sleep(2)  # a span of time to measure over, not one to wait for something
            assert cpu_s(server) - cpu_before_s < 1.5, "two processes that spin would use 4 s"
            assert len(server.output) - lines_before < 20
        wait_until(server.is_healthy, "health, once they have gone", 60)
        wait_until(lambda: serves(server.port), "a stream", 60)
        server.scheduler().kill()
        wait_until(lambda: serves(server.port), "a stream after a restart", 60)
        assert len(server.output) - lines_before < 60
        assert "Traceback" not in said(server)
        assert server.stop() == 0
        server.assert_nothing_left()


def connected(port: int) -> socket.socket | None:
    client = socket.socket()
    client.settimeout(20)
    try:
        client.connect(("127.0.0.1", port))
    except OSError:
        client.close()
        return None
    return client


def is_let_go(client: socket.socket) -> bool:
    """Whether the server refuses or hangs up before it was asked anything; a moment is enough to see that some are."""
    client.settimeout(0.02)
    try:
        client.recv(1)
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def serves(port: int) -> bool:
    with contextlib.suppress(OSError, AssertionError):
        assert_serves(port)
        return True
    return False


def cpu_s(server: Server) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in server.processes("web worker"))


# ------------------------------------------------------------------------------------------- the cache of kernels


@pytest.fixture
def own_cache(tmp_path: Path) -> Path:
    """A copy of the compiled kernels."""
    copy = tmp_path / "cache"
    shutil.copytree(cache_directory(), copy / cache_directory().name)
    return copy


@pytest.mark.parametrize("form", FORMS)
def test_damaged_files_in_the_cache_are_made_anew(form: str, own_cache: Path) -> None:
    truncated, garbage, emptied = [
        min(own_cache.rglob(f"slots.{name}-*.nbc")) for name in ("slot_cancel", "slot_claim", "slot_release")
    ]
    os.truncate(truncated, truncated.stat().st_size // 2)
    garbage.write_bytes(os.urandom(garbage.stat().st_size))
    emptied.write_bytes(b"")
    with running_under([], {"IRONBATCH_CACHE_DIR": str(own_cache)}, form) as server:
        assert_serves(server.port)
        warnings = [line for line in said(server).splitlines() if "damaged" in line]
        assert 1 <= len(warnings) <= 2, "one for each process that meets them"
        assert all(str(own_cache) in line for line in warnings)
        assert "Traceback" not in said(server)
    with running_under([], {"IRONBATCH_CACHE_DIR": str(own_cache)}, form) as server:
        assert_serves(server.port)
        assert "WARNING" not in said(server), "they are whole again"


# ------------------------------------------------------------------------------------- an account without anything


@contextlib.contextmanager
def without_an_account(form: str, environment: Environment) -> Iterator[Server]:
    """A server of a user that can write nowhere, not even where it stands ("/"), and has no home: as in a container."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become a user without an account")
    mounts = in_private_mounts(within_everybodys_reach(sys.base_prefix, sys.prefix, str(REPOSITORY)))
    prefix = [*mounts, "setpriv", f"--reuid={NO_ACCOUNT}", f"--regid={NO_ACCOUNT}", "--clear-groups"]
    probe = subprocess.run([*prefix, sys.executable, "-c", ""], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"another user can't run Python here: {probe.stderr}")
    nothing = {"HOME": None, "XDG_CACHE_HOME": None, "IRONBATCH_CACHE_DIR": None, "USER": None, "LOGNAME": None}
    bare = {**nothing, "TMPDIR": "/nowhere", "PYTHONDONTWRITEBYTECODE": "1"}
    with running_under(prefix, {**bare, **environment}, form) as server:
        assert server.scheduler().uids().real == NO_ACCOUNT
        assert_serves(server.port)
        server.scheduler().kill()
        assert_serves(server.port)
        yield server
        assert server.stop() == 0
        assert "Traceback" not in said(server)


@pytest.mark.parametrize("form", FORMS)
def test_a_user_without_account_home_temporary_or_writable_directory(form: str, everybodys_cache: Path) -> None:
    with without_an_account(form, {"IRONBATCH_CACHE_DIR": str(everybodys_cache)}) as server:
        assert "WARNING" not in said(server)


@pytest.mark.slow
def test_without_any_place_for_a_cache_the_kernels_are_compiled() -> None:
    with without_an_account("serve", {}) as server:
        warnings = [line for line in said(server).splitlines() if "compiled anew at each start" in line]
        assert 1 <= len(warnings) <= 2, "one for each process that compiles"


@pytest.fixture
def everybodys_cache(own_cache: Path) -> Iterator[Path]:
    """The copy, given to the user without an account; in a place that this user can reach."""
    with tempfile.TemporaryDirectory(prefix="ironbatch-test-") as folder:
        Path(folder).chmod(0o755)
        moved = Path(shutil.move(own_cache, folder))
        if os.geteuid() == 0:
            for path in [moved, *moved.rglob("*")]:
                os.chown(path, NO_ACCOUNT, NO_ACCOUNT)
        yield moved


# -------------------------------------------------------------------------------------------------------- the clock

STEPPED_CLOCK = """
import os, time
_path, _real, _real_ns = os.environ["TEST_CLOCK_STEP"], time.time, time.time_ns
def _step_s():
    with open(_path) as file:
        return int(file.read())
time.time = lambda: _real() + _step_s()
time.time_ns = lambda: _real_ns() + _step_s() * 1_000_000_000
"""


class Clock:
    """The wall clock of a server's processes: `time.time` of each looks up by how much it is wrong.

    (A machine's own clock is not a test's to set; a time namespace holds the clocks that do not step.)
    """

    def __init__(self, folder: Path) -> None:
        self._step = folder / "step"
        (folder / "sitecustomize.py").write_text(STEPPED_CLOCK)
        self.step(0)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        self.environ = {"PYTHONPATH": path, "TEST_CLOCK_STEP": str(self._step)}

    def step(self, hours: int) -> None:
        """Set the clock so many hours off."""
        new = self._step.with_suffix(".new")
        new.write_text(str(hours * 3600))
        new.replace(self._step)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(tmp_path)
    monkeypatch.setenv("PYTHONPATH", made.environ["PYTHONPATH"])  # to which `command` adds the repository
    return made


@pytest.mark.parametrize("form", FORMS)
def test_a_clock_that_is_stepped_by_hours_changes_nothing(form: str, clock: Clock) -> None:
    step = {"TEST_CLOCK_STEP": clock.environ["TEST_CLOCK_STEP"]}
    with running_under([], step, form, mock_token_latency_us=20_000) as server:
        old = {process.pid for process in server.processes("web worker")}
        stream = RawStream(server.port, {"prompt_tokens": 4, "max_new_tokens": 150})
        body = stream.read_chunk()
        for hours in (5, -5, 30, 0, -1):
            clock.step(hours)
            for _ in range(5):
                body += stream.read_chunk()
                assert server.is_healthy()
        server.scheduler().kill()
        assert body + stream.read_all() == plain_body(150)
        stream.close()
        assert {process.pid for process in server.processes("web worker")} == old, "nobody seemed to hang"
        stamps = {line[:13] for line in said(server).splitlines() if line[:2] == "20"}
        assert len(stamps) >= 2, "the control: the log's stamps have stepped"


@pytest.mark.parametrize("form", FORMS)
def test_a_clock_that_is_set_forward_during_a_stop_cuts_no_stream(form: str, clock: Clock) -> None:
    step = {"TEST_CLOCK_STEP": clock.environ["TEST_CLOCK_STEP"]}
    with running_under([], step, form, mock_token_latency_us=20_000) as server:
        stream = RawStream(server.port, {"prompt_tokens": 4, "max_new_tokens": 200})
        body = stream.read_chunk()
        server.remember_family()
        server.process.send_signal(signal.SIGTERM)
        for _ in range(20):
            body += stream.read_chunk()
        clock.step(5)
        assert body + stream.read_all() == plain_body(200)
        stream.close()
        assert server.process.wait(60) == 0
        server.assert_nothing_left()


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limit_mib", [200, 800])
def test_a_memory_limit_is_a_clear_message_or_a_service(form: str, limit_mib: int) -> None:
    """Address space, as RLIMIT_AS bounds it: numba's compiler alone needs more than the lower one."""
    before = stale_segments()
    port = free_port()
    prefix = in_shell(f"ulimit -v {limit_mib * 1024}")
    words, environ = changed_command(prefix, {}, form, {"addr": f"127.0.0.1:{port}", "workers": 1})
    process = subprocess.Popen(words, env=environ, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    server = Server(process, port, [], "")
    try:
        wait_until(lambda: process.poll() is not None or server.is_healthy(), "an end or health", START_S)
        if process.poll() is None:
            assert_serves(port)
            process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0].decode()
        assert process.returncode == 0 or "not enough memory to start; raise the limit (ulimit -v" in output, output
        assert process.returncode == 0 or "Traceback" not in output, output
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: stale_segments() <= before, "its segment to go")


# ------------------------------------------------------------------------------------------------ standard streams


@contextlib.contextmanager
def unread_pipe() -> Iterator[int]:
    """A pipe that is full, and whose reader reads no more."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def broken_pipe() -> Iterator[int]:
    """A pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("output", [unread_pipe, broken_pipe, full_disk], ids=lambda output: output.__name__)
def test_a_log_that_cannot_be_written_holds_nobody_up(
    form: str, output: Callable[[], contextlib.AbstractContextManager[int]]
) -> None:
    """At level debug each process has much to say, and the arbiter and the supervisor have deaths to tell of."""
    with output() as log, quiet(form, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as server:
        stream = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 3000})
        body = stream.read_chunk()
        server.scheduler().kill()
        assert body + stream.read_all() == plain_body(3000)
        stream.close()
        old = {worker.pid for worker in server.processes("web worker")}
        server.processes("web worker")[0].kill()
        wait_until(lambda: len({w.pid for w in server.processes("web worker")} - old) == 1, "a new worker", 60)
        for _ in range(20):
            assert_serves(server.port)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed(form: str, closed: str) -> None:
    with quiet(form, in_shell(f"exec {closed}"), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        assert_serves(server.port)
        server.scheduler().kill()
        assert_serves(server.port)


@contextlib.contextmanager
def quiet(form: str, prefix: Sequence[str] = (), **streams: Any) -> Iterator[Server]:
    """A server that is ready, though nobody reads what it says; it is stopped at the end, and leaves nothing."""
    options = {"addr": f"127.0.0.1:{free_port()}", "log_level": "debug"}
    words, environ = changed_command(prefix, {}, form, options)
    process = subprocess.Popen(words, env=environ, cwd="/", **streams)
    server = Server(process, int(options["addr"].rpartition(":")[2]), [], "")
    try:
        wait_until(server.is_healthy, "health", START_S)
        (server.segment,) = segments_of(process.pid)
        yield server
        assert server.stop() == 0
        server.assert_nothing_left()
    finally:
        process.kill()
        process.wait()
