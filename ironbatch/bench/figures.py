"""What a run came to, as one mapping for JSON; the report's lines are made from it."""

import dataclasses
import os
import platform
from typing import Any

import ironbatch
from ironbatch.bench.histogram import LatencyHistogram
from ironbatch.bench.measure import Measurements
from ironbatch.bench.options import BenchOptions
from ironbatch.bench.ramp import Ramp, is_late
from ironbatch.bench.run import RunResult


def percentile_key(percent: float) -> str:
    """Such as p50 or p99.9."""
    return f"p{percent:.10g}"


def figures(result: RunResult, options: BenchOptions, *, interrupted: bool, raised_prompts: int = 0) -> dict[str, Any]:
    """Everything about a run. Latencies are in milliseconds, and None where nothing was measured."""
    return {
        **_origin(result, options),
        "interrupted": interrupted,
        **_outcome(result, options.percentiles),
        "raised_prompts": raised_prompts,
    }


def ramp_figures(ramp: Ramp, options: BenchOptions, *, interrupted: bool) -> dict[str, Any] | None:
    """Everything about a ramp: each probe as `figures` has a run; None if no probe is over."""
    if not ramp.probes:
        return None
    search = ramp.search
    return {
        **_origin(ramp.probes[0].result, options),
        "interrupted": interrupted,
        "ended_by": ramp.ended_by,
        "highest_rate_within_bounds": search.highest_passed,
        "lowest_rate_outside_bounds": search.lowest_failed,
        "resolution": search.resolution,
        "probes": [
            {
                "rate": probe.result.rate,
                "passed": probe.passed,
                "good_share": probe.good_share,
                "client_kept_up": probe.client_kept_up,
                **_outcome(probe.result, options.percentiles),
            }
            for probe in ramp.probes
        ],
    }


def _origin(result: RunResult, options: BenchOptions) -> dict[str, Any]:
    """When, where and with what."""
    return {
        "ironbatch_version": ironbatch.__version__,
        "started_at": result.times.started_at.isoformat(timespec="seconds"),
        "host": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
        },
        "parameters": _parameters(options),
    }


def _parameters(options: BenchOptions) -> dict[str, Any]:
    parameters: dict[str, Any] = {"loop": "open" if options.is_open_loop else "closed"}
    parameters |= {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    for name in ("json", "plot", "has_concurrency_flag"):
        del parameters[name]
    for name in ("prompt_tokens", "max_new_tokens"):
        parameters[name] = None if options.trace is not None else parameters[name].json_value
    parameters["percentiles"] = list(options.percentiles)
    parameters["ramp"] = None if options.ramp is None else dataclasses.asdict(options.ramp)
    return parameters


def _outcome(result: RunResult, percentiles: tuple[float, ...]) -> dict[str, Any]:
    measured, times = result.measured, result.times

    def latency(histogram: LatencyHistogram) -> dict[str, float | int | None]:
        return _latency(histogram, percentiles)

    return {
        "requests": measured.requests,
        "succeeded": measured.succeeded,
        "failed": measured.failed,
        "failures": _failures(measured),
        "ended_early": measured.ended_early,
        "tokens": measured.tokens,
        "tokens_of_failed": measured.tokens_of_failed,
        "duration_s": times.duration_s,
        "sending_s": times.sending_s,
        "requests_per_s": _rate(measured.succeeded, times.duration_s),
        "tokens_per_s": _rate(measured.tokens, times.duration_s),
        "offered_per_s": _rate(result.offered, times.sending_s),
        "goodput": _goodput(measured, times.duration_s),
        "ttft_ms": latency(measured.ttft),
        "inter_token_ms": latency(measured.inter_token),
        "end_to_end_ms": latency(measured.end_to_end),
        "client_lag_ms": latency(measured.lag),
        "client_is_late": is_late(result),
        "client_cpu_share": _rate(times.client_cpu_s, times.elapsed_s),
        "warm_up": {
            "requests": result.warm_up.requests,
            "failed": result.warm_up.failed,
            "failures": _failures(result.warm_up),
        },
    }


def _goodput(measured: Measurements, duration_s: float) -> dict[str, Any] | None:
    if not measured.bounds.are_given:
        return None
    return {
        "ttft_bound_ms": measured.bounds.ttft_ms,
        "itl_bound_ms": measured.bounds.itl_ms,
        "good": measured.good,
        "good_per_s": _rate(measured.good, duration_s),
        "good_share": measured.good / measured.requests if measured.requests else None,
    }


def _failures(measured: Measurements) -> list[dict[str, Any]]:
    return [
        {"name": name, "count": failures.count, "example": failures.example}
        for name, failures in sorted(measured.failures.items(), key=lambda item: -item[1].count)
    ]


def _latency(histogram: LatencyHistogram, percentiles: tuple[float, ...]) -> dict[str, float | int | None]:
    values: dict[str, float | int | None] = {"count": histogram.count, "mean": _ms(histogram.mean_ns())}
    for percent in percentiles:
        values[percentile_key(percent)] = _ms(histogram.percentile_ns(percent))
    values["max"] = _ms(histogram.max_ns) if histogram.count else None
    return values


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else round(value_ns / 1e6, 6)


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0
