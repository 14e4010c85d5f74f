"""What a run came to: as one mapping for JSON, and as lines for people, from that same mapping."""

import dataclasses
import os
import platform
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import ironbatch
from ironbatch.bench.measure import LatencyHistogram, Measurements
from ironbatch.bench.options import BenchOptions

PERCENTILES: Final = (50, 90, 99)
BUSY_CLIENT_SHARE: Final = 0.9
"""A client whose one thread is busier than this may be what limits the figures."""

_LATENCIES: Final = (("TTFT", "ttft_ms"), ("inter-token", "inter_token_ms"), ("end-to-end", "end_to_end_ms"))


@dataclasses.dataclass(frozen=True, slots=True)
class RunTimes:
    """When a run started, how long it took, and what part of that this process was on a CPU."""

    started_at: datetime
    duration_s: float
    client_cpu_s: float


def figures(measurements: Measurements, options: BenchOptions, times: RunTimes, *, interrupted: bool) -> dict[str, Any]:
    """Everything about a run. Latencies are in milliseconds, and None where nothing was measured."""
    parameters = dataclasses.asdict(options)
    del parameters["json"]
    return {
        "ironbatch_version": ironbatch.__version__,
        "started_at": times.started_at.isoformat(timespec="seconds"),
        "host": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
        },
        "parameters": {"loop": "closed", **parameters},
        "interrupted": interrupted,
        "requests": measurements.requests,
        "succeeded": measurements.succeeded,
        "failed": measurements.failed,
        "failures": [
            {"name": name, "count": failures.count, "example": failures.example}
            for name, failures in sorted(measurements.failures.items(), key=lambda item: -item[1].count)
        ],
        "ended_early": measurements.ended_early,
        "tokens": measurements.tokens,
        "tokens_of_failed": measurements.tokens_of_failed,
        "duration_s": times.duration_s,
        "requests_per_s": _rate(measurements.succeeded, times.duration_s),
        "tokens_per_s": _rate(measurements.tokens, times.duration_s),
        "ttft_ms": _latency(measurements.ttft),
        "inter_token_ms": _latency(measurements.inter_token),
        "end_to_end_ms": _latency(measurements.end_to_end),
        "client_cpu_share": _rate(times.client_cpu_s, times.duration_s),
    }


def report_lines(run: Mapping[str, Any]) -> Iterator[str]:
    """The lines that people read, from what `figures` returned."""
    if run["interrupted"]:
        asked = run["parameters"]["total_requests"]
        yield f"interrupted after {run['requests']} of {asked} requests; of those in flight, the tokens count"
    yield f"{'requests':<12} {run['requests']:>10}"
    yield f"{'failures':<12} {run['failed']:>10}"
    for failure in run["failures"]:
        yield f"  {failure['count']} x {failure['name']}; the first: {failure['example']}"
    if run["ended_early"]:
        yield f"{'ended early':<12} {run['ended_early']:>10}"
    yield f"{'tokens':<12} {run['tokens']:>10}"
    yield f"{'duration':<12} {run['duration_s']:>10.2f} s"
    yield f"{'requests/s':<12} {run['requests_per_s']:>10.1f}"
    yield f"{'tok/s':<12} {run['tokens_per_s']:>10.1f}"
    yield ""
    yield f"{'latency, ms':<12}" + "".join(f" {f'p{percent}':>10}" for percent in PERCENTILES)
    for title, key in _LATENCIES:
        yield f"{title:<12}" + "".join(f" {_digits(run[key][f'p{percent}']):>10}" for percent in PERCENTILES)
    if run["client_cpu_share"] > BUSY_CLIENT_SHARE:
        yield (
            f"note: this client was busy for {run['client_cpu_share']:.0%} of the time, so the figures may"
            " show its limit and not the server's; run it on another machine, or with less concurrency"
        )


def _latency(histogram: LatencyHistogram) -> dict[str, float | int | None]:
    values: dict[str, float | int | None] = {"count": histogram.count, "mean": _ms(histogram.mean_ns())}
    for percent in PERCENTILES:
        values[f"p{percent}"] = _ms(histogram.percentile_ns(percent))
    values["max"] = _ms(histogram.max_ns) if histogram.count else None
    return values


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else round(value_ns / 1e6, 6)


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _digits(value_ms: float | None) -> str:
    """About three significant digits: 0.052, 4.21, 37.5, 1204."""
    if value_ms is None:
        return "-"
    for limit, digits in ((1, 3), (10, 2), (100, 1)):
        if value_ms < limit:
            return f"{value_ms:.{digits}f}"
    return f"{value_ms:.0f}"
