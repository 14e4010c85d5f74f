"""The client, the closed loop and the command, against a real server that behaves well or badly."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import ironbatch.bench.cli
from ironbatch.bench import client as client_module
from ironbatch.bench import stream as stream_module
from ironbatch.bench.client import GenerateClient
from ironbatch.bench.load import Unreachable, closed_loop
from ironbatch.bench.measure import Measurements
from ironbatch.clock import Clock, FakeClock, MonotonicClock

DEADLINE_S = 30.0
ROOT = Path(ironbatch.bench.cli.__file__).parents[2]
SCRIPT = """
import argparse, sys
from ironbatch.bench import cli
parser = argparse.ArgumentParser()
cli.add_arguments(parser)
heavy = {"aiohttp", "asyncio", "msgspec", "numpy", "rich", "uvloop"} & sys.modules.keys()
assert not heavy, heavy
sys.exit(cli.run(parser.parse_args()))
"""

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def until(condition: Callable[[], bool]) -> None:
    """Let everyone else run until the condition holds, with a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serve(behaviour: Behaviour) -> AsyncIterator[str]:
    """A server whose POST /generate is `behaviour`; yields its URL."""
    app = web.Application()
    app.router.add_post("/generate", behaviour)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def make_client(url: str, *, clock: Clock | None = None, tokens: int = 4, **more: Any) -> GenerateClient:
    shape: dict[str, Any] = {"prompt_tokens": 8, "max_new_tokens": tokens, "timeout_s": 20.0, "max_connections": 8}
    return GenerateClient(url, clock or MonotonicClock(), **(shape | more))


async def open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
    await response.prepare(request)
    return response


def line(index: int, *, done: bool = False, **more: object) -> bytes:
    return json.dumps({"token_index": index, "done": done, **more}, separators=(",", ":")).encode() + b"\n"


async def good(request: web.Request) -> web.StreamResponse:
    tokens = (await request.json())["max_new_tokens"]
    response = await open_stream(request)
    for index in range(max(tokens, 1)):
        await response.write(line(index, done=index == max(tokens, 1) - 1))
    return response


def sends(*parts: bytes) -> Behaviour:
    async def behaviour(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        for part in parts:
            await response.write(part)
        return response

    return behaviour


def answers(status: int, body: str, **headers: str) -> Behaviour:
    async def behaviour(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return behaviour


async def cut_off(request: web.Request) -> web.StreamResponse:
    response = await open_stream(request)
    await response.write(line(0))
    assert request.transport is not None
    request.transport.close()
    return response


async def hang_before_answer(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_in_stream(request: web.Request) -> web.StreamResponse:
    response = await open_stream(request)
    await response.write(line(0))
    return await hang_before_answer(request)


async def hang_after_last_line(request: web.Request) -> web.StreamResponse:
    response = await open_stream(request)
    await response.write(line(0) + line(1) + line(2) + line(3, done=True))
    return await hang_before_answer(request)


async def measure(behaviour: Behaviour, *, requests: int = 3, concurrency: int = 2, **more: Any) -> Measurements:
    measurements = Measurements()
    async with serve(behaviour) as url, make_client(url, **more) as client:
        await closed_loop(client, measurements, concurrency=concurrency, total_requests=requests)
    return measurements


@pytest.mark.parametrize("tokens", [0, 1, 2, 300])
def test_good_server(tokens: int) -> None:
    measured = asyncio.run(measure(good, tokens=tokens, requests=7))
    assert (measured.succeeded, measured.failed, measured.failures) == (7, 0, {})
    assert (measured.tokens, measured.tokens_of_failed, measured.ended_early) == (7 * tokens, 0, 0)
    assert (measured.ttft.count, measured.end_to_end.count) == (7, 7)
    assert measured.inter_token.count == 7 * max(tokens - 1, 0)


def test_early_end_is_no_failure_but_told() -> None:
    measured = asyncio.run(measure(sends(line(0), line(1, done=True))))
    assert (measured.succeeded, measured.ended_early, measured.tokens) == (3, 3, 6)


ERROR_BODY = json.dumps({"error": {"type": "queue_full", "message": "768 slots are taken", "param": None}})


@pytest.mark.parametrize(
    ("behaviour", "name", "detail", "tokens"),
    [
        (answers(503, ERROR_BODY, Retry_After="1"), "HTTP 503: queue_full, Retry-After", "768 slots", 0),
        (answers(400, ERROR_BODY), "HTTP 400: queue_full", "768 slots", 0),
        (answers(502, "<b>\x1b[2J"), "HTTP 502", "<b>?[2J", 0),
        (answers(500, ""), "HTTP 500", "Internal Server Error", 0),
        (answers(500, '{"error": "' + "x" * 200_000), "HTTP 500", "xxx...", 0),
        (answers(302, "", Location="/elsewhere"), "HTTP 302", "Found", 0),
        (sends(), stream_module.TRUNCATED, "after 0 of 4", 0),
        (sends(line(0), line(1)), stream_module.TRUNCATED, "after 2 of 4", 2),
        (cut_off, stream_module.TRUNCATED, "1 tokens", 1),
        (
            sends(line(0) + line(1, done=True, error={"type": "engine_lost", "message": "gone"})),
            f"{stream_module.STREAM_ERROR}: engine_lost",
            "gone",
            1,
        ),
        (sends(line(0) + line(2)), stream_module.OUT_OF_ORDER, "token_index 2", 1),
        (sends(b"hello\n"), stream_module.MALFORMED_LINE, "hello", 0),
        (sends(line(0, done=True), line(1, done=True)), stream_module.DATA_AFTER_DONE, '"token_index":1', 1),
    ],
)
def test_bad_server_fails_by_name(behaviour: Behaviour, name: str, detail: str, tokens: int) -> None:
    measured = asyncio.run(measure(behaviour))
    assert (measured.succeeded, measured.failed, measured.end_to_end.count) == (0, 3, 0)
    assert list(measured.failures) == [name]
    assert measured.failures[name].count == 3
    assert detail in measured.failures[name].example
    assert measured.tokens == measured.tokens_of_failed == 3 * tokens


@pytest.mark.parametrize(
    ("behaviour", "tokens"), [(hang_before_answer, 0), (hang_in_stream, 1), (hang_after_last_line, 4)]
)
def test_no_progress_is_a_time_out(behaviour: Behaviour, tokens: int) -> None:
    measured = asyncio.run(measure(behaviour, timeout_s=0.1))
    assert measured.failures[client_module.TIMED_OUT].count == 3
    assert f"{tokens} tokens, then nothing for 0.1 s" in measured.failures[client_module.TIMED_OUT].example


def test_latencies_are_those_of_the_arrivals() -> None:
    clock, measurements = FakeClock(), Measurements()

    async def timed(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        received = 0
        for at_ns, count in ((1000, 2), (1400, 1), (2000, 3)):
            clock.set_ns(at_ns)
            last = received + count == 6
            await response.write(b"".join(line(received + k, done=last and k == count - 1) for k in range(count)))
            received += count
            await until(lambda: measurements.tokens == received)  # noqa: B023 - awaited within the iteration
        clock.set_ns(2040)
        return response

    async def scenario() -> None:
        async with serve(timed) as url, make_client(url, clock=clock, tokens=6) as client:
            assert await client.generate(measurements) is None

    asyncio.run(scenario())
    gaps_ns = [measurements.inter_token.percentile_ns(percent) for percent in (20, 40, 60, 80, 100)]
    assert gaps_ns == [0, 200, 200, 200, 400]
    assert measurements.ttft.percentile_ns(50) == 1000
    assert measurements.end_to_end.percentile_ns(50) == 2040


def test_concurrency_is_reached_and_never_exceeded() -> None:
    in_flight, most, arrived = 0, 0, asyncio.Event()

    async def counting(request: web.Request) -> web.StreamResponse:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 5:
            arrived.set()
        async with asyncio.timeout(DEADLINE_S):
            await arrived.wait()
        in_flight -= 1
        return await good(request)

    measured = asyncio.run(measure(counting, requests=40, concurrency=5))
    assert (measured.succeeded, most) == (40, 5)


def test_server_that_speaks_no_http() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
        writer.close()

    async def scenario() -> Measurements:
        measurements = Measurements()
        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, make_client(f"http://127.0.0.1:{port}") as client:
            await closed_loop(client, measurements, concurrency=1, total_requests=2)
        return measurements

    assert asyncio.run(scenario()).failures[client_module.BAD_HTTP].count == 2


@contextlib.contextmanager
def refusing_url() -> Any:
    """A URL that refuses connections: its port is bound, so nobody else can take it, but not listened on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_unreachable_server_ends_the_load_at_once() -> None:
    async def scenario(url: str, measurements: Measurements) -> None:
        async with make_client(url) as client:
            await closed_loop(client, measurements, concurrency=4, total_requests=2000)

    measurements = Measurements()
    with refusing_url() as url, pytest.raises(Unreachable, match=client_module.CONNECTION_REFUSED):
        asyncio.run(scenario(url, measurements))
    assert measurements.requests <= 4
    measurements = Measurements(server_answered=True)
    with refusing_url() as url:  # one that went away later is counted like any failure
        asyncio.run(scenario(url, measurements))
    assert measurements.failures[client_module.CONNECTION_REFUSED].count == 2000


async def command(
    *argv: str, stderr: int = asyncio.subprocess.PIPE, while_running: Callable[[int], Awaitable[None]] | None = None
) -> tuple[int, str, str]:
    """Run `ironbatch bench` in a process of its own: exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", SCRIPT, *argv),
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
        async with serve(good) as url:
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
        assert run["parameters"] == {
            "loop": "closed", "url": url, "concurrency": 4, "total_requests": 20, "prompt_tokens": 128,
            "max_new_tokens": 5, "timeout_s": 60.0,
        }  # fmt: skip
        assert 0 < run["ttft_ms"]["p50"] <= run["end_to_end_ms"]["p99"]
        assert list(tmp_path.iterdir()) == [path]

    asyncio.run(scenario())


def test_command_names_failures_and_exits_1() -> None:
    async def scenario() -> tuple[int, str, str]:
        async with serve(answers(503, ERROR_BODY, Retry_After="1")) as url:
            return await command("--url", url, "--total-requests", "3")

    code, out, _ = asyncio.run(scenario())
    assert code == 1
    assert "3 x HTTP 503: queue_full, Retry-After; the first: 768 slots are taken (Retry-After: 1)" in out


def test_command_refuses_bad_values_before_it_sends(tmp_path: Path) -> None:
    async def scenario() -> None:
        asked: list[web.Request] = []

        async def behaviour(request: web.Request) -> web.StreamResponse:
            asked.append(request)
            return await good(request)

        async with serve(behaviour) as url:
            for argv, told in (
                (("--concurrency", "0"), "--concurrency: 0 is not between 1 and 16384"),
                (("--json", str(tmp_path)), f"--json: '{tmp_path}' can't be written"),
                (("--json", str(tmp_path / "no" / "x")), "No such file or directory"),
            ):
                code, out, err = await command("--url", url, *argv)
                assert (code, out, err.count("\n")) == (2, "", 1), err
                assert err.startswith("ironbatch bench: ")
                assert told in err
        assert asked == []

    asyncio.run(scenario())


def test_command_says_in_one_line_that_the_server_is_not_there(tmp_path: Path) -> None:
    with refusing_url() as url:
        code, out, err = asyncio.run(command("--url", url, "--json", str(tmp_path / "out.json")))
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert f"can't reach {url}: connection refused" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_command_reports_what_it_has(tmp_path: Path, signal_number: signal.Signals) -> None:
    async def scenario() -> None:
        asked = 0

        async def five_then_hang(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            return await (good(request) if asked <= 5 else hang_in_stream(request))

        async def interrupt(pid: int) -> None:
            await until(lambda: asked == 7)  # two workers hang, all five answers are read
            os.kill(pid, signal_number)

        path = tmp_path / "out.json"
        async with serve(five_then_hang) as url:
            argv = ("--url", url, "--concurrency", "2", "--json", str(path))
            code, out, err = await command(*argv, while_running=interrupt)
        assert (code, err) == (128 + signal_number, ""), (out, err)
        assert "interrupted after 5 of 2000 requests" in out
        run = json.loads(path.read_text())
        assert (run["interrupted"], run["requests"], run["failed"]) == (True, 5, 0)

    asyncio.run(scenario())


def test_progress_is_shown_on_a_terminal() -> None:
    async def scenario() -> tuple[int, str]:
        controller, terminal = pty.openpty()
        try:
            async with serve(good) as url:
                code, _, _ = await command("--url", url, "--total-requests", "30", stderr=terminal)
            return code, os.read(controller, 65_536).decode()
        finally:
            os.close(controller)
            os.close(terminal)

    code, drawn = asyncio.run(scenario())
    assert code == 0
    assert "30/30" in drawn
    assert "1920 tokens, 0 failed" in drawn
