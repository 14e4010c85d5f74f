"""`ironbatch bench` as a process: what it prints, writes and returns."""

import asyncio
import errno
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import ironbatch
from ironbatch.bench import runner
from ironbatch.bench.whole_file import WholeFile
from ironbatch.cli import main
from tests.bench.server import (
    DEADLINE_S,
    Exchange,
    answers,
    good,
    hang_in_stream,
    serving,
    until,
)

ROOT = Path(ironbatch.__file__).parents[1]
ERROR_BODY = json.dumps({"error": {"type": "queue_full", "message": "768 slots are taken", "param": None}})


async def command(
    *argv: str, stderr: int = asyncio.subprocess.PIPE, while_running: Callable[[int], Awaitable[None]] | None = None
) -> tuple[int, str, str]:
    """Run `ironbatch bench` in a process of its own: exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-m", "ironbatch", "bench", *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=os.environ | {"PYTHONPATH": str(ROOT), "http_proxy": "http://127.0.0.1:1", "TERM": "xterm"},
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            if while_running is not None:
                await while_running(process.pid)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), (err or b"").decode()


def test_command_reports_and_writes_json(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "out.json"
        async with serving(good) as (url, _):
            argv = ("--url", url, "--total-requests", "20", "--concurrency", "4", "--max-new-tokens", "5")
            code, out, err = await command(*argv, "--json", str(path))
        assert (code, err) == (0, ""), (out, err)
        words = [text.split() for text in out.splitlines()]
        assert ["requests", "20"] in words
        assert ["failures", "0"] in words
        assert ["tokens", "100"] in words
        assert ["latency,", "ms", "p50", "p90", "p99"] in words
        run = json.loads(path.read_text())
        assert (run["requests"], run["tokens"], run["failed"], run["interrupted"]) == (20, 100, 0, False)
        parameters = {
            "loop": "closed", "url": url, "concurrency": 4, "total_requests": 20, "prompt_tokens": 128,
            "max_new_tokens": 5, "timeout_s": 60.0,
        }  # fmt: skip
        assert run["parameters"].items() >= parameters.items()
        assert 0 < run["ttft_ms"]["p50"] <= run["end_to_end_ms"]["p99"]
        assert list(tmp_path.iterdir()) == [path]

    asyncio.run(scenario())


def test_command_names_failures_and_exits_1() -> None:
    async def scenario() -> tuple[int, str, str]:
        async with serving(answers("503 Service Unavailable", ERROR_BODY, "Retry-After: 1")) as (url, _):
            return await command("--url", url, "--total-requests", "3")

    code, out, _ = asyncio.run(scenario())
    assert code == 1
    assert "3 x HTTP 503: queue_full, Retry-After; the first: 768 slots are taken (Retry-After: 1)" in out


def test_command_refuses_bad_values_before_it_sends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(good) as (url, server):
            for argv, told in (
                (("--concurrency", "0"), "--concurrency: 0 is not between 1 and 16384"),
                (("--json", str(tmp_path)), f"--json: '{tmp_path}' can't be written"),
                (("--json", str(tmp_path / "no" / "x")), "No such file or directory"),
            ):
                code, out, err = await command("--url", url, *argv)
                assert (code, out, err.count("\n")) == (2, "", 1), err
                assert err.startswith("ironbatch: error: ")
                assert told in err
            assert server.connections == 0

    asyncio.run(scenario())


def test_command_says_in_one_line_that_the_server_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as bound:  # a port that is bound, so nobody else can take it, but not listened on
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        code, out, err = asyncio.run(command("--url", url, "--json", str(tmp_path / "out.json")))
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert f"can't reach {url}: connection refused" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_command_reports_what_it_has(tmp_path: Path, signal_number: signal.Signals) -> None:
    async def scenario() -> None:
        asked = 0

        async def five_then_hang(exchange: Exchange) -> None:
            nonlocal asked
            asked += 1
            await (good(exchange) if asked <= 5 else hang_in_stream(exchange))

        async def interrupt(pid: int) -> None:
            await until(lambda: asked == 7)  # two workers hang, all five answers are read
            os.kill(pid, signal_number)

        path = tmp_path / "out.json"
        async with serving(five_then_hang) as (url, _):
            argv = ("--url", url, "--concurrency", "2", "--json", str(path))
            code, out, err = await command(*argv, while_running=interrupt)
        assert (code, err) == (128 + signal_number, ""), (out, err)
        assert "interrupted after 5 of 2000 requests" in out
        run = json.loads(path.read_text())
        assert (run["interrupted"], run["requests"], run["failed"]) == (True, 5, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("argv", "bar", "counts"),
    [
        (("--total-requests", "30"), "30/30", "30 requests, 1920 tokens, 0 failed"),
        (("--rate", "50", "--duration", "0.2"), "0/1", " requests, "),
    ],
)
def test_progress_is_shown_on_a_terminal_only(argv: tuple[str, ...], bar: str, counts: str) -> None:
    async def scenario() -> tuple[int, str]:
        controller, terminal = pty.openpty()
        drawn = bytearray()
        asyncio.get_running_loop().add_reader(controller, lambda: drawn.extend(os.read(controller, 65_536)))
        try:
            async with serving(good) as (url, _):
                code, out, _ = await command("--url", url, *argv, stderr=terminal)
                assert bar not in out
                await until(lambda: bar.encode() in drawn)
            return code, drawn.decode()
        finally:
            asyncio.get_running_loop().remove_reader(controller)
            os.close(controller)
            os.close(terminal)

    code, drawn = asyncio.run(scenario())
    assert code == 0
    assert counts in drawn


def test_json_is_written_and_the_exit_is_quiet_though_nobody_reads_the_report(tmp_path: Path) -> None:
    async def scenario() -> tuple[int | None, bytes]:
        async with serving(good) as (url, _):
            reader, writer = os.pipe()
            os.close(reader)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-W", "error", "-m", "ironbatch", "bench", "--url", url, "--total-requests", "1"),
                *("--json", str(tmp_path / "out.json")),
                stdout=writer,
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            os.close(writer)
            async with asyncio.timeout(DEADLINE_S):
                _, err = await process.communicate()
        return process.returncode, err

    assert asyncio.run(scenario()) == (128 + signal.SIGPIPE, b"")
    assert json.loads((tmp_path / "out.json").read_text())["requests"] == 1


def test_full_disk_at_the_end_still_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runner, "run_until_signal", lambda work: work.close())
    monkeypatch.setattr(WholeFile, "write", refuse)
    assert main(["bench", "--json", str(tmp_path / "out.json")]) == 1
    out, err = capsys.readouterr()
    assert "requests" in out
    assert err.startswith(f"ironbatch: error: --json: '{tmp_path / 'out.json'}' can't be written: No space left")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
