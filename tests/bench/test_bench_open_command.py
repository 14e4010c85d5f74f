"""The open loop, the trace and the ramp by way of the command."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from ironbatch.bench import cli, runner
from ironbatch.bench.open_loop import open_loop
from ironbatch.bench.options import BenchOptions
from ironbatch.bench.window import Window
from ironbatch.bench.workload import Workload
from ironbatch.clock import MonotonicClock
from ironbatch.errors import ConfigError
from tests.bench.options import read_options
from tests.bench.server import Exchange, answers, good, hang, make_client, serving, until
from tests.bench.test_bench_command import command

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0000000,11,3\n2023-11-16 18:15:46.5000000,0,5\n"


def test_open_loop_reports_plots_and_writes_json(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, plot = tmp_path / "out.json", tmp_path / "out.svg"
        async with serving(good) as (url, server):
            code, out, err = await command(
                "--url", url, "--rate", "100", "--duration", "0.5", "--warm-up", "0.2", "--max-new-tokens",
                "uniform:2:9", "--itl-bound-ms", "60000", "--json", str(path), "--plot", str(plot),
            )  # fmt: skip
        assert (code, err) == (0, ""), (out, err)
        run = json.loads(path.read_text())
        assert run["parameters"]["loop"] == "open"
        assert (run["parameters"]["rate"], run["parameters"]["max_new_tokens"]) == (100.0, "uniform:2:9")
        assert run["requests"] + run["warm_up"]["requests"] == server.requests
        assert run["goodput"]["good"] == run["succeeded"] == run["requests"] > 0
        assert run["client_lag_ms"]["count"] == run["requests"]
        assert run["duration_s"] >= run["sending_s"] >= 0.5
        assert plot.read_bytes().startswith(b"<?xml")
        assert sorted(tmp_path.iterdir()) == [path, plot]
        assert "goodput/s" in out
        assert "client lag" in out

    asyncio.run(scenario())


def test_trace_is_replayed(tmp_path: Path) -> None:
    asked = []

    async def noting(exchange: Exchange) -> None:
        asked.append((exchange.fields["prompt_tokens"], exchange.fields["max_new_tokens"]))
        await good(exchange)

    async def scenario() -> None:
        trace = tmp_path / "trace.csv"
        trace.write_text(TRACE)
        async with serving(noting) as (url, _):
            code, out, _ = await command("--url", url, "--trace", str(trace), "--time-scale", "10")
        assert code == 0
        assert "note: prompts of 0 tokens in the trace, sent with 1, the least there is: 1" in out

    asyncio.run(scenario())
    assert asked == [(11, 3), (1, 5)]


def test_malformed_trace_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        trace = tmp_path / "trace.csv"
        trace.write_text(TRACE + "tomorrow,1,1\n")
        async with serving(good) as (url, server):
            code, out, err = await command("--url", url, "--trace", str(trace))
            assert (code, out, err.count("\n"), server.connections) == (2, "", 1, 0)
        assert f"--trace: '{trace}', line 4: timestamp 'tomorrow' is not a date and time" in err

    asyncio.run(scenario())


def test_trace_that_turns_bad_in_mid_run_is_told_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        trace = tmp_path / "trace.csv"
        trace.write_text(TRACE + "tomorrow,1,1\n")
        arrivals = Workload(read_options("--trace", str(trace), "--time-scale", "100")).arrivals(None)
        async with serving(good) as (url, _), make_client(url) as client:
            window = Window(client.measurements)
            with pytest.raises(ConfigError, match="line 4"):
                await open_loop(client, arrivals, window, MonotonicClock(), most_in_flight=5)

    asyncio.run(scenario())


def test_interrupted_open_loop_reports_what_it_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        asked = 0

        async def five_then_hang(exchange: Exchange) -> None:
            nonlocal asked
            asked += 1
            await (good(exchange) if asked <= 5 else hang(exchange))

        async def interrupt(pid: int) -> None:
            await until(lambda: asked == 9)
            os.kill(pid, signal.SIGINT)

        path = tmp_path / "out.json"
        async with serving(five_then_hang) as (url, _):
            code, out, err = await command(
                "--url", url, "--rate", "100", "--duration", "600", "--json", str(path), while_running=interrupt
            )
        assert (code, err) == (130, "")
        run = json.loads(path.read_text())
        assert f"interrupted after {run['requests']} requests" in out
        assert (run["interrupted"], run["failed"]) == (True, 0)
        assert run["requests"] <= 5, "a slow client may not have read all five answers"
        assert run["duration_s"] < 600

    asyncio.run(scenario())


def test_ramp_that_finds_nothing_exits_1(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "out.json"
        async with serving(answers("503 Service Unavailable", "")) as (url, _):
            code, out, err = await command(
                "--url", url, "--ramp", "50:100", "--duration", "0.2", "--ttft-bound-ms", "100", "--json", str(path)
            )
        assert (code, err) == (1, "")
        assert "even 50 requests/s, the LOW of --ramp, is outside the bounds" in out
        assert len(json.loads(path.read_text())["probes"]) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("argv", "cap"),
    [
        (("--rate", "5", "--duration", "1"), 936),
        (("--rate", "5", "--duration", "1", "--concurrency", "900"), 900),
        (("--total-requests", "5", "--concurrency", "5000"), 5000),
    ],
)
def test_cap_that_nobody_chose_is_what_the_open_files_allow(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], cap: int
) -> None:
    monkeypatch.setattr(runner.resource, "getrlimit", lambda _: (500, 1000))
    monkeypatch.setattr(runner.resource, "setrlimit", lambda *_: None)
    options: BenchOptions = cli._with_open_files(read_options(*argv))
    assert options.concurrency == cap


def test_chosen_cap_over_the_open_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.resource, "getrlimit", lambda _: (500, 1000))
    with pytest.raises(ConfigError, match="use 936 or less, or raise `ulimit -n`"):
        cli._with_open_files(read_options("--rate", "5", "--duration", "1", "--concurrency", "937"))
