"""The ramp over HTTP: its probes, its verdict, its lines."""

import asyncio
import contextlib
import re
from typing import Any

import pytest

from ironbatch.bench import ramp as ramp_module
from ironbatch.bench.figures import ramp_figures
from ironbatch.bench.ramp import Probe, Ramp
from ironbatch.bench.ramp_report import probe_line, result_lines
from ironbatch.bench.workload import Workload
from ironbatch.clock import MonotonicClock
from tests.bench.options import read_options
from tests.bench.server import Behaviour, Exchange, answers, good, serving

ANY_TTFT = ("--ttft-bound-ms", "60000")


def ramp(behaviour: Behaviour, *argv: str) -> tuple[Ramp, list[str], dict[str, Any]]:
    lines: list[str] = []

    async def scenario() -> Ramp:
        async with serving(behaviour) as (url, _):
            options = read_options("--url", url, "--duration", "0.2", *argv)
            running = Ramp(options, Workload(options), MonotonicClock(), lambda probe: lines.append(probe_line(probe)))
            await running.run()
            return running

    done = asyncio.run(scenario())
    lines += result_lines(done, interrupted=False)
    figures = ramp_figures(done, read_options(*argv, "--duration", "0.2"), interrupted=False)
    assert figures is not None
    return done, lines, figures


@pytest.fixture(autouse=True)
def patient_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests makes this client late."""
    monkeypatch.setattr(ramp_module, "LATE_CLIENT_MS", 1e9)


def test_server_that_keeps_up_passes_at_high() -> None:
    done, lines, figures = ramp(good, "--ramp", "20:80", *ANY_TTFT)
    assert [probe.result.rate for probe in done.probes] == [20, 40, 80]
    assert "100.00% of" in lines[0]
    assert lines[0].endswith(": within the bounds")
    assert lines[-1] == "80 requests/s, the HIGH of --ramp, is within the bounds; give a higher one"
    assert (figures["highest_rate_within_bounds"], figures["lowest_rate_outside_bounds"]) == (80, None)
    assert [probe["rate"] for probe in figures["probes"]] == [20, 40, 80]
    assert all(probe["goodput"]["good_share"] == 1 for probe in figures["probes"])


def test_server_that_refuses_fails_at_low() -> None:
    done, lines, figures = ramp(answers("503 Service Unavailable", ""), "--ramp", "20:80", *ANY_TTFT)
    assert [probe.passed for probe in done.probes] == [False]
    assert lines[-1] == "even 20 requests/s, the LOW of --ramp, is outside the bounds; give a lower one"
    assert figures["highest_rate_within_bounds"] is None


def test_capacity_between_the_two_is_bracketed() -> None:
    """The server refuses what comes in a run beyond its 12th request: a run of 0.2 s at 40/s has less than that."""
    in_run = 0

    async def limited(exchange: Exchange) -> None:
        nonlocal in_run
        in_run += 1
        await (good(exchange) if in_run <= 12 else answers("503 Service Unavailable", "")(exchange))

    async def scenario() -> Ramp:
        async with serving(limited) as (url, _):

            def begin_anew(_: object) -> None:
                nonlocal in_run
                in_run = 0

            options = read_options("--url", url, "--duration", "0.2", "--ramp", "20:640", *ANY_TTFT)
            running = Ramp(options, Workload(options), MonotonicClock(), begin_anew)
            await running.run()
            return running

    done = asyncio.run(scenario())
    passed, failed = done.search.highest_passed, done.search.lowest_failed
    assert passed is not None
    assert failed is not None
    assert passed < failed <= passed * 1.05
    for probe in done.probes:
        assert probe.passed == (probe.result.offered <= 12)
    *_, line = result_lines(done, interrupted=False)
    assert line == f"highest rate within the bounds: {passed:.4g} requests/s; {failed:.4g} is outside them"


def test_server_that_goes_away_in_mid_ramp_costs_no_figure_that_is_known() -> None:
    leaving: list[asyncio.Future[None]] = []

    async def scenario() -> Ramp:
        async with contextlib.AsyncExitStack() as stack:
            url, _ = await stack.enter_async_context(serving(good))

            def tell(probe: Probe) -> None:
                leaving.append(asyncio.ensure_future(stack.aclose()))

            options = read_options("--url", url, "--duration", "0.2", "--ramp", "20:80", *ANY_TTFT)
            running = Ramp(options, Workload(options), MonotonicClock(), tell)
            await running.run()
            return running

    done = asyncio.run(scenario())
    assert [probe.passed for probe in done.probes] == [True]
    _, first, second = result_lines(done, interrupted=False)
    assert first.startswith("ended before its time: can't reach http://127.0.0.1:")
    assert second.startswith("highest rate so far within the bounds: 20 requests/s")
    options = read_options("--ramp", "20:80", "--duration", "0.2", *ANY_TTFT)
    figures = ramp_figures(done, options, interrupted=False)
    assert figures is not None
    assert figures["ended_by"] == done.ended_by
    assert figures["highest_rate_within_bounds"] == 20


def test_verdict_of_too_few_requests_is_told() -> None:
    _, lines, _ = ramp(good, "--ramp", "20:80", *ANY_TTFT)
    assert any(re.search(r"judged by \d requests, too few for one bad .* a share of 0.99", line) for line in lines)
    _, lines, _ = ramp(good, "--ramp", "40:80", "--ramp-share", "0.5", *ANY_TTFT)
    assert not any("judged by" in line for line in lines)


def test_late_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ramp_module, "LATE_CLIENT_MS", -1.0)
    _, lines, figures = ramp(good, "--ramp", "20:80", *ANY_TTFT)
    assert "this client was late" in lines[0]
    assert lines[-1].startswith("note: this client was late at some rates")
    assert figures["probes"][0]["client_kept_up"] is False


def test_interrupted_before_the_first_probe() -> None:
    options = read_options("--ramp", "1:2", "--duration", "5", *ANY_TTFT)
    nothing = Ramp(options, Workload(options), MonotonicClock(), lambda _: None)
    assert list(result_lines(nothing, interrupted=True)) == ["interrupted; of the rate under way nothing is known"]
    assert ramp_figures(nothing, options, interrupted=True) is None
