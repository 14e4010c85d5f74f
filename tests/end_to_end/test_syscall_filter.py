"""A server under the unit's filter of system calls, which refuses what is not on it as the unit does."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end import seccomp
from tests.end_to_end import server as server_module
from tests.end_to_end.server import RawStream, command, plain_body, running, wait_until
from tests.unit_file import SYSTEMD_ANALYZE, allowed_system_calls

pytestmark = pytest.mark.end_to_end


@pytest.fixture
def filtered(tmp_path: Path) -> list[str]:
    """What to put before a command."""
    if SYSTEMD_ANALYZE is None:
        pytest.skip("no systemd-analyze here, which knows the groups of system calls")
    try:
        ctypes.CDLL(seccomp.LIBRARY)
    except OSError as problem:
        pytest.skip(f"no libseccomp here: {problem}")
    names = tmp_path / "allowed"
    names.write_text("\n".join(sorted(allowed_system_calls())))
    prefix = [sys.executable, seccomp.__file__, str(names)]
    probe = "import os; os.fork() or os._exit(0); os.wait(); os.sched_setaffinity(0, os.sched_getaffinity(0))"
    done = subprocess.run([*prefix, sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if "seccomp_load" in done.stderr:
        pytest.skip(f"no seccomp here: {done.stderr}")
    assert "PermissionError: [Errno 1]" in done.stderr, "the control: @resources is refused"
    return prefix


def test_kernels_compile(filtered: list[str], tmp_path: Path) -> None:
    """One module of them, from nothing."""
    environ = {
        **os.environ,
        "IRONBATCH_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(server_module.REPOSITORY),
    }
    code = "from ironbatch.kernels.histogram import histogram_percentile"
    subprocess.run([*filtered, sys.executable, "-c", code], env=environ, check=True, timeout=120)
    assert list((tmp_path / "cache").rglob("*.nbc")), "nothing was kept"


def test_a_whole_life(filtered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start, stream, a scheduler's and a worker's death, a stop."""

    def filtered_command(*arguments: object) -> tuple[list[str], dict[str, str]]:
        words, environ = command(*arguments)  # type: ignore[arg-type]
        return [*filtered, *words], environ

    monkeypatch.setattr(server_module, "command", filtered_command)
    with running(mock_token_latency_us=2_000) as server:
        status = Path(f"/proc/{server.scheduler().pid}/status").read_text()
        assert "Seccomp:\t2" in status
        stream = RawStream(server.port, {"prompt_tokens": 4, "max_new_tokens": 300})
        body = stream.read_chunk()
        dead = server.scheduler()
        dead.kill()
        assert body + stream.read_all() == plain_body(300)
        stream.close()
        worker = server.processes("web worker")[0]
        worker.kill()
        wait_until(lambda: len(set(server.processes("web worker")) - {worker}) == 2, "a new worker", 30)
        wait_until(server.is_healthy, "health")
        assert server.stop() == 0
        server.assert_nothing_left()
        assert "Traceback" not in "".join(server.output)
        assert "not permitted" not in "".join(server.output)
