"""The lines that people read, from what `figures` returned."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ironbatch.bench.figures import percentile_key

BUSY_CLIENT_SHARE: Final = 0.9
"""A client whose one thread is busier than this may be what limits the figures."""

_LATENCIES: Final = (("TTFT", "ttft_ms"), ("inter-token", "inter_token_ms"), ("end-to-end", "end_to_end_ms"))


def report_lines(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about one run."""
    if run["interrupted"]:
        asked = run["parameters"]["total_requests"]
        of_asked = "" if asked is None else f" of {asked}"
        yield f"interrupted after {run['requests']}{of_asked} requests; of those in flight, the tokens count"
    yield from _counts(run)
    yield from _rates(run)
    yield ""
    yield from _latencies(run)
    yield from _notes(run)


def _counts(run: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'requests':<12} {run['requests']:>10}"
    yield f"{'failures':<12} {run['failed']:>10}"
    for failure in run["failures"]:
        yield f"  {failure['count']} x {failure['name']}; the first: {failure['example']}"
    if run["ended_early"]:
        yield f"{'ended early':<12} {run['ended_early']:>10}"
    yield f"{'tokens':<12} {run['tokens']:>10}"


def _rates(run: Mapping[str, Any]) -> Iterator[str]:
    is_open, parameters = run["parameters"]["loop"] == "open", run["parameters"]
    yield f"{'duration':<12} {run['duration_s']:>10.2f} s"
    if is_open or parameters["duration_s"] is not None:
        drain_s = run["duration_s"] - run["sending_s"]
        yield f"{'  sending':<12} {run['sending_s']:>10.2f} s, then {drain_s:.2f} s until the last answer"
    if is_open:
        yield f"{'offered/s':<12} {run['offered_per_s']:>10.1f}"
    yield f"{'requests/s':<12} {run['requests_per_s']:>10.1f}"
    yield f"{'tok/s':<12} {run['tokens_per_s']:>10.1f}"
    if run["goodput"] is not None:
        yield goodput_line(run["goodput"])


def goodput_line(goodput: Mapping[str, Any]) -> str:
    """Good requests a second, their share, and what makes them good."""
    bounds = []
    if goodput["ttft_bound_ms"] is not None:
        bounds.append(f"TTFT <= {goodput['ttft_bound_ms']:g} ms")
    if goodput["itl_bound_ms"] is not None:
        bounds.append(f"mean inter-token latency <= {goodput['itl_bound_ms']:g} ms")
    share = "-" if goodput["good_share"] is None else f"{goodput['good_share']:.2%}"
    return f"{'goodput/s':<12} {goodput['good_per_s']:>10.1f} ({share} of requests: {', '.join(bounds)})"


def _latencies(run: Mapping[str, Any]) -> Iterator[str]:
    keys = [percentile_key(percent) for percent in run["parameters"]["percentiles"]]
    yield f"{'latency, ms':<12}" + "".join(f" {key:>10}" for key in keys)
    rows = list(_LATENCIES)
    if run["client_lag_ms"]["count"]:
        rows.append(("client lag", "client_lag_ms"))
    for title, name in rows:
        yield f"{title:<12}" + "".join(f" {digits(run[name][key]):>10}" for key in keys)


def _notes(run: Mapping[str, Any]) -> Iterator[str]:
    warm_up = run["warm_up"]
    if warm_up["requests"]:
        yield (
            f"note: {warm_up['requests']} requests of the warm-up, {warm_up['failed']} of them failed, are in no"
            " figure above"
        )
    if run["raised_prompts"]:
        yield f"note: prompts of 0 tokens in the trace, sent with 1, the least there is: {run['raised_prompts']}"
    if run["client_is_late"]:
        yield (
            f"note: this client sent requests late (by up to {digits(run['client_lag_ms']['max'])} ms), so the"
            " figures show its limit too; run it on another machine, or at a lower rate"
        )
    if run["client_cpu_share"] > BUSY_CLIENT_SHARE:
        remedy = "at a lower rate" if run["parameters"]["loop"] == "open" else "with less concurrency"
        yield (
            f"note: this client was busy for {run['client_cpu_share']:.0%} of the time, so the figures may"
            f" show its limit and not the server's; run it on another machine, or {remedy}"
        )


def digits(value_ms: float | None) -> str:
    """About three significant digits: 0.052, 4.21, 37.5, 1204."""
    if value_ms is None:
        return "-"
    for limit, places in ((1, 3), (10, 2), (100, 1)):
        if value_ms < limit:
            return f"{value_ms:.{places}f}"
    return f"{value_ms:.0f}"
