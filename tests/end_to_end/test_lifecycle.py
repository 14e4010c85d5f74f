"""Start, serve, stop: both ways to start the whole system, and the starts that must fail."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.server import (
    FORMS,
    RawStream,
    command,
    plain_body,
    run_to_end,
    running,
    segments,
    segments_of,
    stale_segments,
    wait_until,
)

pytestmark = pytest.mark.end_to_end

FIRST_METRICS = [
    "elapsed_secs",
    "tokens_generated",
    "requests_completed",
    "tokens_per_sec",
    "ttft_p50_ms",
    "ttft_p99_ms",
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_serves_and_stops_cleanly(form: str, number: int) -> None:
    with running(form) as server:
        stream = RawStream(server.port, {"prompt_tokens": 128, "max_new_tokens": 64})
        assert stream.read_head() == 200
        assert b"content-type: application/x-ndjson" in stream.headers.lower()
        assert stream.read_all() == plain_body(64)
        stream.close()
        # It is counted a moment after its last byte, and the other worker may be the one that answers.
        wait_until(lambda: server.metrics()["requests_completed"] == 1, "the count")
        metrics = server.metrics()
        assert list(metrics)[: len(FIRST_METRICS)] == FIRST_METRICS
        assert all(type(value) is int for value in metrics.values())
        assert metrics["tokens_generated"] == 64
        assert server.stop(number) == 0
        server.assert_nothing_left()
        assert "Traceback" not in "".join(server.output)
        assert "Exception ignored" not in "".join(server.output)


@pytest.mark.parametrize("form", FORMS)
def test_processes_name_themselves(form: str) -> None:
    with running(form) as server:
        assert len(server.processes("supervisor")) == 1
        assert len(server.processes("scheduler")) == 1
        assert len(server.processes("web worker")) == 2


@pytest.mark.parametrize("form", FORMS)
def test_a_running_stream_is_finished_at_sigterm(form: str) -> None:
    with running(form, mock_token_latency_us=20_000) as server:
        stream = RawStream(server.port, {"prompt_tokens": 4, "max_new_tokens": 100})
        body = stream.read_chunk()
        server.remember_family()
        server.process.send_signal(signal.SIGTERM)
        assert body + stream.read_all() == plain_body(100)
        stream.close()
        assert server.process.wait(30) == 0
        server.assert_nothing_left()


@pytest.mark.parametrize("form", FORMS)
def test_a_service_manager_that_signals_the_whole_group_does_not_cut_a_stream(form: str) -> None:
    with running(form, mock_token_latency_us=20_000) as server:
        stream = RawStream(server.port, {"prompt_tokens": 4, "max_new_tokens": 100})
        body = stream.read_chunk()
        server.remember_family()
        for process in server.family:
            process.send_signal(signal.SIGTERM)
        assert body + stream.read_all() == plain_body(100)
        stream.close()
        assert server.process.wait(30) == 0
        server.assert_nothing_left()
        assert "scheduler ended" not in "".join(server.output)


@pytest.mark.parametrize("form", FORMS)
def test_hup_replaces_the_workers_and_keeps_the_engine(form: str) -> None:
    with running(form) as server:
        old = {process.pid for process in server.processes("web worker")}
        scheduler = server.scheduler().pid
        server.process.send_signal(signal.SIGHUP)

        def replaced() -> bool:
            new = {process.pid for process in server.processes("web worker")}
            return len(new) == 2 and not new & old

        wait_until(replaced, "new workers", 30)
        wait_until(server.is_healthy, "health")
        stream = RawStream(server.port, {"prompt_tokens": 4, "max_new_tokens": 5})
        assert stream.read_all() == plain_body(5)
        stream.close()
        assert server.scheduler().pid == scheduler


@pytest.mark.parametrize("form", FORMS)
def test_usr2_is_refused(form: str) -> None:
    with running(form) as server:
        server.process.send_signal(signal.SIGUSR2)
        wait_until(lambda: "USR2 is refused" in "".join(server.output), "the refusal")
        assert server.is_healthy()
        assert len(server.processes("scheduler")) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_taken_port_is_one_clear_failure(form: str) -> None:
    before = stale_segments()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        addr = f"127.0.0.1:{taken.getsockname()[1]}"
        code, output = run_to_end(form, addr=addr)
    assert code not in (0, None)
    wait_until(lambda: stale_segments() <= before, "its segment to go")
    if form == "serve":
        assert output.count("\n") == 1
        assert addr in output
        assert "--addr" in output
    assert not _engines_of(addr)


def test_an_address_of_another_machine_is_one_clear_line() -> None:
    before = stale_segments()
    code, output = run_to_end("serve", addr="192.0.2.1:0")
    assert code == 1
    assert output.count("\n") == 1
    assert "192.0.2.1:0" in output
    wait_until(lambda: stale_segments() <= before, "its segment to go")


@pytest.mark.parametrize("form", FORMS)
def test_a_bad_option_names_itself_and_its_bounds(form: str) -> None:
    code, output = run_to_end(form, kv_block_size=24)
    assert code == 2
    assert "24" in output
    assert "16 or 32" in output
    assert ("--kv-block-size" if form == "serve" else "IRONBATCH_KV_BLOCK_SIZE") in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("form", "number"), [("serve", signal.SIGHUP), ("serve", signal.SIGUSR2), ("gunicorn", signal.SIGHUP)]
)
def test_a_reload_signal_during_the_start_does_not_end_it(form: str, number: int) -> None:
    words, environ = command(form, {"workers": 1})
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/")
    try:
        wait_until(lambda: segments_of(process.pid), "the segment", 60)
        process.send_signal(number)
        lines = iter(process.stdout)  # type: ignore[arg-type]
        assert any(b"ASGI server listening" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("limit", [6, 8, 16, 24])
def test_too_few_descriptors_leave_nothing_behind(limit: int) -> None:
    words, environ = command("serve", {"workers": 1})
    before = stale_segments()
    script = f'ulimit -n {limit}; exec "$@"'
    process = subprocess.Popen(
        ["sh", "-c", script, "sh", *words], env=environ, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        process.communicate(timeout=6)
        assert process.returncode not in (0, None)
    except subprocess.TimeoutExpired:  # enough to run, or gunicorn goes on trying
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    wait_until(lambda: stale_segments() <= before, "its segment to go")


def test_interrupted_while_it_compiles_it_ends_at_once(tmp_path: Path) -> None:
    words, environ = command("serve", {})
    environ["IRONBATCH_CACHE_DIR"] = str(tmp_path)  # nothing is compiled yet
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/")
    try:
        (segment,) = wait_until(lambda: segments_of(process.pid), "the segment", 60)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=10)
        assert process.returncode == 0, output
        assert b"Traceback" not in output
        wait_until(lambda: not [child for child in family if child.is_running()], "the end of its children", 5)
        assert segment not in segments()
    finally:
        process.kill()


def test_the_application_alone_says_that_it_has_no_engine() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("IRONBATCH_")}
    code = "import ironbatch.web.app as a; print(a.app.__class__.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def _engines_of(addr: str) -> list[psutil.Process]:
    """Processes of an engine that was configured for `addr`."""
    found = []
    for process in psutil.process_iter():
        try:
            if addr in process.environ().get("IRONBATCH_ADDR", "") or addr in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]
