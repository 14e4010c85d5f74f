"""How an engine drains: what whoever stops it says in the segment, and what its web workers say back.

whoever stops it:  until when streams may run ; draining = 1         (new requests are refused from here on)
a worker:          at that time it ends its streams with an error line ; "drained" once it has no request left
whoever stops it:  all are drained, or are late: end them
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NS_PER_S = 1_000_000_000

EARLY_S = 0.5
"""Streams are ended so much before the drain time-out, and a tenth of it at most: the error line is to be there in
time."""

ERROR_LINE_S = 1.0
"""How long an error line may take to a client that reads. Whoever does not read is cut then."""

WEB_STOP_S = 3.0
"""How long gunicorn and its workers may take to end once there is no request left."""

STOP_BEYOND_DRAIN_S = 5.0
"""A stop lasts at most so much longer than its drain time-out, whatever clients do."""

assert ERROR_LINE_S + WEB_STOP_S < STOP_BEYOND_DRAIN_S


def announce_drain(header: Any, now_ns: int, timeout_s: float) -> None:
    """Refuse what is new from now on, and have streams ended after `timeout_s`. May be said again, to be sooner."""
    header["streams_end_ns"] = now_ns + int((timeout_s - min(EARLY_S, timeout_s / 10)) * NS_PER_S)
    header["draining"] = 1


def is_drained(lanes: NDArray[Any]) -> bool:
    """Whether no worker that serves has a request left.

    Args:
        lanes: LANE[num_lanes] of the segment.
    """
    generations = lanes["generation"]
    serving = (lanes["serving_generation"] == generations) & (lanes["dead_generation"] != generations)
    return not bool(np.any(serving & (lanes["drained_generation"] != generations)))
