"""The lines that people read about a ramp: one for each probe as it is over, and the result."""

from collections.abc import Iterator

from ironbatch.bench.ramp import LATE_CLIENT_MS, Probe, Ramp
from ironbatch.bench.report import digits


def probe_line(probe: Probe) -> str:
    """What one rate came to."""
    measured = probe.result.measured
    verdict = "within the bounds" if probe.passed else "outside the bounds"
    if not probe.client_kept_up:
        verdict = f"this client was late (over {LATE_CLIENT_MS:g} ms at p99), which counts as outside"
    ttft_ms, gap_ms = (_p99_ms(histogram.percentile_ns(99)) for histogram in (measured.ttft, measured.inter_token))
    return (
        f"{probe.result.rate or 0:>10.4g}/s  {probe.good_share:>7.2%} of {measured.requests} good,"
        f" p99 TTFT {ttft_ms} ms, inter-token {gap_ms} ms, {measured.failed} failed: {verdict}"
    )


def result_lines(ramp: Ramp, *, interrupted: bool) -> Iterator[str]:
    """What the search came to."""
    search = ramp.search
    passed, failed = search.highest_passed, search.lowest_failed
    fewest = min((probe.result.measured.requests for probe in ramp.probes), default=0)
    if ramp.probes and fewest * (1 - ramp.wanted_share) < 1:
        yield (
            f"note: a rate was judged by {fewest} requests, too few for one bad request to be within a share of"
            f" {ramp.wanted_share:g}; give a longer --duration"
        )
    if interrupted:
        yield "interrupted; of the rate under way nothing is known"
    if ramp.ended_by is not None:
        yield f"ended before its time: {ramp.ended_by}"
    if passed is None and failed is None:
        return
    if passed is None:
        yield f"even {search.low:g} requests/s, the LOW of --ramp, is outside the bounds; give a lower one"
    elif failed is None and passed >= search.high:
        yield f"{passed:g} requests/s, the HIGH of --ramp, is within the bounds; give a higher one"
    else:
        outside = "" if failed is None else f"; {failed:.4g} is outside them"
        highest = "highest rate so far" if interrupted or ramp.ended_by else "highest rate"
        yield f"{highest} within the bounds: {passed:.4g} requests/s{outside}"
    if any(not probe.client_kept_up for probe in ramp.probes):
        yield (
            "note: this client was late at some rates, so the result may be its limit and not the server's; run it on"
            " another machine"
        )


def _p99_ms(value_ns: float | None) -> str:
    return digits(None if value_ns is None else value_ns / 1e6)
