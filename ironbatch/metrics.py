"""The shared counters and histograms of all processes, as one snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ironbatch.kernels.histogram import histogram_percentile
from ironbatch.layout import WAIT_REASONS

SCHEDULER_ROW = 0
NS_PER_S = 1_000_000_000
US_PER_MS = 1_000

_SCHEDULER_VALUES = (
    "running",
    "waiting",
    "kv_blocks_free",
    "kv_blocks_total",
    "preemptions",
    "steps",
    "prefill_tokens",
    "decode_tokens",
    "sequences_aborted",
    "sequences_failed",
    "scheduler_starts",
    "requests_lost",
)
_LATER_SCHEDULER_VALUES = (
    "kv_blocks_cached",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "prefix_evicted_blocks",
    "copied_blocks",
    "audits",
    "audit_failures",
    *(f"waited_{reason}_us" for reason in WAIT_REASONS),
)
"""Shown at the end, so that what was there before them keeps its place."""

_WORKER_COUNTERS = (
    "requests_received",
    "requests_cancelled",
    "requests_failed",
    "requests_rejected",
    "requests_unavailable",
    "tokens_delivered",
    "chunks_delivered",
)
_LATER_WORKER_COUNTERS = ("requests_timed_out",)
_LATEST_SCHEDULER_VALUES = ("pieces_without_id",)


def snapshot(metrics: NDArray[Any], elapsed_ns: int) -> dict[str, int]:
    """Merge all rows; whoever asks gets the same answer.

    Args:
        metrics: METRICS[1 + lanes]; row 0 is the scheduler's, the others the web workers'.
        elapsed_ns: time since the engine's start.

    Returns whole numbers in the order in which `/metrics` shows them; `_ms` and `_us` in the units named.
    """
    scheduler, workers = metrics[SCHEDULER_ROW], metrics[1:]
    tokens = int(scheduler["tokens_generated"])
    ttft_us = workers["ttft_us"].sum(axis=0)
    gaps_us = workers["inter_token_us"].sum(axis=0)
    values = {
        "elapsed_secs": elapsed_ns // NS_PER_S,
        "tokens_generated": tokens,
        "requests_completed": int(workers["requests_completed"].sum()),
        "tokens_per_sec": tokens * NS_PER_S // max(elapsed_ns, 1),
        "ttft_p50_ms": _rounded_ms(ttft_us, 0.5),
        "ttft_p99_ms": _rounded_ms(ttft_us, 0.99),
    }
    values |= {name: int(scheduler[name]) for name in _SCHEDULER_VALUES}
    values |= {name: int(workers[name].sum()) for name in _WORKER_COUNTERS}
    for percent in (50, 90, 99):
        values[f"inter_token_p{percent}_us"] = int(histogram_percentile(gaps_us, percent / 100))
    for percent in (50, 90, 99):
        values[f"ttft_p{percent}_us"] = int(histogram_percentile(ttft_us, percent / 100))
    values |= {name: int(scheduler[name]) for name in _LATER_SCHEDULER_VALUES}
    values |= {name: int(workers[name].sum()) for name in _LATER_WORKER_COUNTERS}
    values |= {name: int(scheduler[name]) for name in _LATEST_SCHEDULER_VALUES}
    return values


def _rounded_ms(counts_us: NDArray[np.int64], fraction: float) -> int:
    return (int(histogram_percentile(counts_us, fraction)) + US_PER_MS // 2) // US_PER_MS
