"""A running engine seen through its shared memory: no worker is asked, so none has to be alive to answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.metrics import SCHEDULER_ROW, snapshot
from ironbatch.shm.segment import Segment
from tests.end_to_end.server import Server

POLL_S = 0.0005
REASON_MASK = (1 << (layout.PUBLISHED_GENERATION_SHIFT - layout.PUBLISHED_REASON_SHIFT)) - 1

ENDS = ("completed", "cancelled", "failed", "rejected", "unavailable", "lost")
"""How a request may end; each has its counter."""


class Observer:
    """Reads the segment of a server. A test knows its requests' slots by their `max_new_tokens`, which it chooses."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    @property
    def slots(self) -> NDArray[Any]:
        return self.segment.slots

    def of(self, *marks: int) -> NDArray[np.intp]:
        """The slots in use whose requests ask for one of these numbers of tokens."""
        return np.flatnonzero((self.slots["owner"] != 0) & np.isin(self.slots["max_new_tokens"], marks))

    def owned(self) -> int:
        """How many slots are in use."""
        return int(np.count_nonzero(self.slots["owner"]))

    def owned_by(self, lane: int, generation: int) -> NDArray[np.intp]:
        """The slots that a holder of a lane owns, claimed ones included."""
        return np.flatnonzero(self.slots["owner"] == layout.owner_word(lane, generation))

    def lane_of(self, slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """The lanes whose holders own these."""
        return (self.slots["owner"][slots] & layout.OWNER_LANE_MASK) - 1

    def produced(self, slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """Tokens that are published of each."""
        words = self.slots["published"][slots]
        is_current = words >> layout.PUBLISHED_GENERATION_SHIFT == self.slots["generation"][slots]
        return np.where(is_current, words & layout.PUBLISHED_PRODUCED_MASK, 0)

    def reasons(self, slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """Why each has ended; FINISH_NONE for who has not."""
        words = self.slots["published"][slots]
        is_current = words >> layout.PUBLISHED_GENERATION_SHIFT == self.slots["generation"][slots]
        return np.where(is_current, words >> layout.PUBLISHED_REASON_SHIFT & REASON_MASK, layout.FINISH_NONE)

    def are_queued(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which are submitted and were never admitted."""
        rows = self.slots[slots]
        is_submitted = rows["submitted"] == rows["generation"]
        return is_submitted & (rows["admitted_generation"] != rows["generation"]) & self._are_live(slots)

    def are_prefilling(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which are admitted and have no token yet."""
        rows = self.slots[slots]
        is_admitted = rows["admitted_generation"] == rows["generation"]
        return is_admitted & (self.produced(slots) == 0) & self._are_live(slots)

    def are_decoding(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which have tokens and are to get more."""
        return (self.produced(slots) > 0) & self._are_live(slots)

    def _are_live(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        return self.reasons(slots) == layout.FINISH_NONE

    @property
    def gauges(self) -> Any:
        """The scheduler's row of the metrics: its counters, and its gauges as of its last step."""
        return self.segment.metrics[SCHEDULER_ROW]

    def is_idle(self) -> bool:
        """Whether nothing runs or waits, all blocks are free and no slot is in use."""
        now = self.gauges
        has_blocks = now["kv_blocks_free"] == now["kv_blocks_total"]
        return bool(now["running"] == now["waiting"] == 0 and has_blocks and self.owned() == 0)

    def metrics(self) -> dict[str, int]:
        """What GET /metrics would say."""
        return snapshot(self.segment.metrics, 0)

    def unaccounted(self) -> int:
        """Requests received of which no end was counted."""
        now = self.metrics()
        return now["requests_received"] - sum(now[f"requests_{end}"] for end in ENDS)


@contextlib.contextmanager
def observed(server: Server) -> Iterator[Observer]:
    """An observer of `server`; it leaves the segment at the end."""
    segment = Segment.attach(server.segment)
    try:
        yield Observer(segment)
    finally:
        segment.close()


def seconds_until(condition: Callable[[], Any], what: str, timeout_s: float) -> float:
    """Poll closely until `condition()` is true; how long that took. Fails with `what` after the time-out."""
    start_s = time.perf_counter()
    while not condition():
        assert time.perf_counter() - start_s < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(POLL_S)
    return time.perf_counter() - start_s
