"""`--plot`: a run against time and as histograms, or a ramp against its rates, as one picture.

Only this module and `plot_panels` need matplotlib. Figures are made as objects, without pyplot and its global state.
"""

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ironbatch.bench.measure import Measurements
from ironbatch.bench.options import BenchOptions
from ironbatch.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec


def require_matplotlib() -> None:
    """Raises ConfigError if there is no matplotlib: before the run, not after it."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError:
        problem = "--plot: it needs matplotlib, which is not installed; `pip install 'ironbatch[plot]'` installs it"
        raise ConfigError([problem]) from None


def draw_run(run: Mapping[str, Any], measured: Measurements, options: BenchOptions) -> bytes:
    """The picture of one run, in the format that the suffix of `options.plot` names."""
    figure = _figure(run, options, f"{run['requests']} requests, {run['failed']} failed")
    grid = figure.add_gridspec(4, 2, width_ratios=(2, 1))
    _draw_times(figure, grid, run, measured, options)
    _draw_histograms(figure, grid, run, measured)
    return _saved(figure, options)


def _draw_times(
    figure: "Figure", grid: "GridSpec", run: Mapping[str, Any], measured: Measurements, options: BenchOptions
) -> None:
    """The left column: four panels over the same seconds."""
    from ironbatch.bench import plot_panels as panels  # noqa: PLC0415

    timeline, bounds = measured.timeline, measured.bounds
    assert timeline is not None, "a run that is to be drawn keeps one"
    ttft = figure.add_subplot(grid[0, 0])
    inter_token, tokens, in_flight = (figure.add_subplot(grid[row, 0], sharex=ttft) for row in (1, 2, 3))
    panels.latency_against_time(ttft, timeline, "ttft", "TTFT, ms", bounds.ttft_ms)
    panels.latency_against_time(inter_token, timeline, "inter_token", "inter-token latency, ms", bounds.itl_ms)
    panels.throughput_against_time(tokens, timeline)
    panels.in_flight_against_time(in_flight, timeline)
    for axes in (ttft, inter_token, in_flight):
        panels.legend_above(axes)
    for axes in (ttft, inter_token, tokens, in_flight):
        panels.mark_phases(axes, options.warm_up_s, options.warm_up_s + run["sending_s"])
        axes.tick_params(labelbottom=axes is in_flight)
    panels.legend_above(tokens)  # it has no lines of its own: there is room to say what the phases are
    in_flight.set_xlabel("seconds since the start")


def _draw_histograms(figure: "Figure", grid: "GridSpec", run: Mapping[str, Any], measured: Measurements) -> None:
    """The right column."""
    from ironbatch.bench import plot_panels as panels  # noqa: PLC0415

    ttft, inter_token = figure.add_subplot(grid[0:2, 1]), figure.add_subplot(grid[2:4, 1])
    bounds = measured.bounds
    panels.latency_histogram(ttft, measured.ttft, run["ttft_ms"], "TTFT, ms", bounds.ttft_ms)
    panels.latency_histogram(
        inter_token, measured.inter_token, run["inter_token_ms"], "inter-token latency, ms", bounds.itl_ms
    )


def draw_ramp(ramp: Mapping[str, Any], options: BenchOptions) -> bytes:
    """The picture of a ramp: latencies and the share of good requests against the rate."""
    from ironbatch.bench import plot_panels as panels  # noqa: PLC0415

    highest = ramp["highest_rate_within_bounds"]
    found = "no rate is within the bounds" if highest is None else f"highest rate within the bounds: {highest:.4g}/s"
    figure = _figure(ramp, options, found)
    rows = figure.subplots(3, 1, sharex=True)
    keys = [f"p{percent:.10g}" for percent in options.percentiles]
    probes = sorted(ramp["probes"], key=lambda probe: float(probe["rate"]))
    bounds = options.bounds
    panels.latency_against_rate(rows[0], probes, "ttft_ms", keys, "TTFT, ms", bounds.ttft_ms)
    panels.latency_against_rate(rows[1], probes, "inter_token_ms", keys, "inter-token latency, ms", bounds.itl_ms)
    panels.share_against_rate(rows[2], probes, options.ramp_share)
    rows[2].set_xlabel("requests offered a second")
    return _saved(figure, options)


def _figure(run: Mapping[str, Any], options: BenchOptions, outcome: str) -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(13, 9), layout="constrained")
    where = f"{options.url}, {run['started_at']}, ironbatch {run['ironbatch_version']}"
    figure.suptitle(f"ironbatch bench: {describe(options)}\n{outcome}; {where}", fontsize=11)
    return figure


def describe(options: BenchOptions) -> str:
    """The parameters, short enough for a title."""
    if options.ramp is not None:
        load = f"ramp {options.ramp.low:g} to {options.ramp.high:g} requests/s"
    elif options.rate is not None:
        load = f"open loop, {options.rate:g} requests/s"
    elif options.trace is not None:
        load = f"replay, {options.time_scale:g} times as fast"
    else:
        load = f"closed loop, {options.concurrency} in flight"
    if options.burstiness != 1:
        load += f", burstiness {options.burstiness:g}"
    if options.trace is not None:
        return f"{load}, trace {os.path.basename(options.trace)}"
    return f"{load}, prompt {options.prompt_tokens.text}, output {options.max_new_tokens.text} tokens"


def _saved(figure: "Figure", options: BenchOptions) -> bytes:
    figure.align_ylabels()
    assert options.plot is not None, "there is a file to draw for"
    buffer = io.BytesIO()
    figure.savefig(buffer, format=os.path.splitext(options.plot)[1][1:].lower(), dpi=110)
    return buffer.getvalue()
