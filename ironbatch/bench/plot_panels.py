"""The panels of a plot: each function draws into axes that it is given. Latencies are in milliseconds."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ironbatch.bench.histogram import LatencyHistogram
from ironbatch.bench.report import digits
from ironbatch.bench.timeline import Timeline

HISTOGRAM_BINS: Final = 60
LOG_FROM_RATIO: Final = 20.0
"""A latency axis is logarithmic if its largest value is over so many times its smallest."""

BOUND_STYLE: Final[dict[str, Any]] = {"color": "tab:red", "linestyle": "--", "linewidth": 1.2}
_LINES: Final = (("max", 100.0, "lightgray"), ("p99", 99.0, "tab:orange"), ("p50", 50.0, "tab:blue"))
"""In drawing order: where a bucket holds few values, its maximum is its 99th percentile."""

_SHADES: Final = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown")


def latency_against_time(
    axes: Axes, timeline: Timeline, name: Literal["ttft", "inter_token"], label: str, bound_ms: float | None
) -> None:
    """Median, 99th percentile and maximum of each bucket, and the bound."""
    histograms = [bucket.ttft if name == "ttft" else bucket.inter_token for bucket in timeline.buckets]
    width_s = timeline.width_ns / 1e9
    values: list[float] = []
    for title, percent, colour in _LINES:
        points = [
            ((index + 0.5) * width_s, (histogram.percentile_ns(percent) or 0.0) / 1e6)
            for index, histogram in enumerate(histograms)
            if histogram.count
        ]
        axes.plot(*_columns(points), color=colour, label=title, linewidth=1.0, marker=".", markersize=3)
        values += [value for _, value in points]
    _draw_bound(axes, bound_ms, label, values)
    _finish(axes, label, values)


def throughput_against_time(axes: Axes, timeline: Timeline) -> None:
    """Tokens that arrived, a second."""
    width_s = timeline.width_ns / 1e9
    edges = [index * width_s for index in range(len(timeline.buckets) + 1)]
    axes.stairs(
        [bucket.tokens / width_s for bucket in timeline.buckets], edges, fill=True, color="tab:green", alpha=0.6
    )
    _finish(axes, "tokens/s", [])
    axes.set_ylim(bottom=0)


def in_flight_against_time(axes: Axes, timeline: Timeline) -> None:
    """The most requests in flight in each bucket, and the failures in it."""
    width_s = timeline.width_ns / 1e9
    edges = [index * width_s for index in range(len(timeline.buckets) + 1)]
    axes.stairs([bucket.in_flight for bucket in timeline.buckets], edges, color="tab:blue", label="requests in flight")
    failures = [
        ((index + 0.5) * width_s, float(bucket.failed))
        for index, bucket in enumerate(timeline.buckets)
        if bucket.failed
    ]
    if failures:
        axes.plot(*_columns(failures), "x", color="tab:red", label="failures in the same time")
    _finish(axes, "requests", [])
    axes.set_ylim(bottom=0)


def mark_phases(axes: Axes, warm_up_s: float, sending_until_s: float) -> None:
    """Shade the warm-up, and mark where the sending ended."""
    if warm_up_s:
        axes.axvspan(0, warm_up_s, color="tab:gray", alpha=0.15, label="warm-up, in no histogram")
    axes.axvline(sending_until_s, color="black", linestyle=":", linewidth=1.0, label="end of sending")
    axes.set_xlim(left=0)


def latency_histogram(
    axes: Axes, histogram: LatencyHistogram, latency: Mapping[str, float | None], label: str, bound_ms: float | None
) -> None:
    """How often each latency came, with percentiles and bound marked."""
    pairs = [(value_ns / 1e6, count) for value_ns, count in histogram.buckets() if value_ns > 0]
    zeros = histogram.count - sum(count for _, count in pairs)
    note = f" ({zeros} gaps of 0 ms are not shown)" if zeros else ""
    axes.set_xlabel(label + note)
    axes.set_ylabel("count")
    if not pairs:
        axes.text(0.5, 0.5, "nothing to show", ha="center", va="center", transform=axes.transAxes)
        return
    values = np.array([value for value, _ in pairs])
    low, high = values[0] * 0.9, values[-1] * 1.1
    is_wide = _is_wide([low, high] if bound_ms is None else [low, high, bound_ms])
    edges = (np.geomspace if is_wide else np.linspace)(low, high, HISTOGRAM_BINS + 1)
    counts, _ = np.histogram(values, bins=edges, weights=[count for _, count in pairs])
    axes.stairs(counts, edges, fill=True, color="tab:blue", alpha=0.6)
    if is_wide:
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis)
    percentiles = [(key, value) for key, value in latency.items() if key.startswith("p") and value]
    for index, (key, value) in enumerate(percentiles):
        axes.axvline(value, color=_SHADES[index % len(_SHADES)], linewidth=1.2, label=f"{key} {digits(value)} ms")
    if bound_ms is not None:
        axes.axvline(bound_ms, label=f"bound {bound_ms:g} ms{_mean_note(label)}", **BOUND_STYLE)
    legend_above(axes, columns=2)


def latency_against_rate(
    axes: Axes, probes: Sequence[Mapping[str, Any]], name: str, keys: Sequence[str], label: str, bound_ms: float | None
) -> None:
    """Percentiles of each probe, and the bound."""
    values: list[float] = []
    for index, key in enumerate(keys):
        points = [(probe["rate"], probe[name][key]) for probe in probes if probe[name][key] is not None]
        axes.plot(*_columns(points), marker="o", markersize=4, label=key, color=_SHADES[index % len(_SHADES)])
        values += [value for _, value in points]
    _draw_bound(axes, bound_ms, label, values)
    _finish(axes, label, values)
    legend_above(axes)


def share_against_rate(axes: Axes, probes: Sequence[Mapping[str, Any]], wanted_share: float) -> None:
    """The share of good requests of each probe, and the share that is wanted."""
    axes.plot(*_columns([(probe["rate"], probe["good_share"]) for probe in probes]), color="tab:gray", linewidth=1.0)
    for passed, marker, colour in ((True, "o", "tab:green"), (False, "x", "tab:red")):
        points = [(probe["rate"], probe["good_share"]) for probe in probes if probe["passed"] is passed]
        label = "within the bounds" if passed else "outside"
        axes.plot(*_columns(points), marker, color=colour, label=label)
    axes.axhline(wanted_share, label=f"wanted: {wanted_share:g}", **BOUND_STYLE)
    _finish(axes, "share of good requests", [])
    axes.set_ylim(-0.05, 1.05)
    legend_above(axes)


def legend_above(axes: Axes, columns: int = 6) -> None:
    """Say what the lines are, where no line is hidden."""
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1, fontsize=8, ncols=columns, frameon=False
    )


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _draw_bound(axes: Axes, bound_ms: float | None, label: str, values: list[float]) -> None:
    """The bound as a line; it counts in the choice of the scale."""
    if bound_ms is not None:
        axes.axhline(bound_ms, label=f"bound {bound_ms:g} ms{_mean_note(label)}", **BOUND_STYLE)
        values.append(bound_ms)


def _finish(axes: Axes, label: str, values: Sequence[float]) -> None:
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
    if _is_wide(values):
        axes.set_yscale("log", nonpositive="clip")
        _plain_numbers(axes.yaxis)


def _is_wide(values: Sequence[float]) -> bool:
    """Whether the positive values need a logarithmic axis."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) > LOG_FROM_RATIO * min(positive)


def _mean_note(label: str) -> str:
    """The bound on gaps is one on a request's mean, while the panels show every gap."""
    return " on the mean of a request" if label.startswith("inter-token") else ""


def _plain_numbers(axis: Axis) -> None:
    """Write 0.2 and 100, not powers of ten."""
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
