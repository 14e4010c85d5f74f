"""Running suspects alone: who may have killed the schedulers before this one (kernels/suspects.py says who may).

It stands between the start of a scheduler's backend and the rebuild of its state. Each suspect is loaded as the only
sequence, computed until it has emitted a token, and taken out again, as if preempted; its client sees a slow token. The
steps are the scheduler's own, but for `drain`: nobody else gets in. If a suspect kills this scheduler too, the header
says that it was alone, and the next scheduler counts that against it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ironbatch.kernels.arena import StateArena
from ironbatch.kernels.suspects import drop_one, find_suspects, keep_shut, take_one
from ironbatch.layout import (
    PUBLISHED_PRODUCED_MASK,
    SUSPICION_ALONE_SHIFT,
    SUSPICION_DEATHS_MASK,
    SUSPICION_PRODUCED_SHIFT,
)
from ironbatch.metrics import SCHEDULER_ROW
from ironbatch.shm.segment import Segment

_log = logging.getLogger("ironbatch.scheduler")

NS_PER_S = 1_000_000_000
PATIENCE_NS = 5 * NS_PER_S
"""Whoever lets so much time pass alone, without a token and without any harm, is let go."""


class Quarantine:
    """For a scheduler whose backend has started and whose state is empty.

    Args:
        segment: the shared segment.
        arena: the scheduler's private state.
        step: runs one of its steps with another kernel in the place of `drain`; returns the number of rows.
        now_ns: the time.
    """

    def __init__(
        self, segment: Segment, arena: StateArena, step: Callable[..., int], now_ns: Callable[[], int]
    ) -> None:
        self._segment = segment
        self._arena = arena
        self._step = step
        self._now_ns = now_ns

    def run(self) -> None:
        """Count the predecessor's death, end whoever is convicted by it, and run each suspect alone."""
        metrics = self._segment.metrics[SCHEDULER_ROW]
        failed_before = int(metrics["sequences_failed"])
        count = int(find_suspects(self._arena.address, self._segment.address))
        for _ in range(int(metrics["sequences_failed"]) - failed_before):
            _log.error(
                "a sequence ended with an error: schedulers died again and again while they computed it, at last twice"
                " with it alone"
            )
        if count == 0:
            return
        _log.warning(
            "schedulers have died of late while they computed the same %d sequences; each runs alone until it has"
            " emitted a token, since one of them may be the reason",
            count,
        )
        suspects = self._likeliest_first(self._arena.views["forget"][:count].tolist())
        header = self._segment.header
        header["scheduler_ready"] = 1  # it computes: a silent heart is a stall from now on
        for slot in suspects:
            header["in_quarantine"] = 1
            self._run_alone(slot)
            header["in_quarantine"] = 0

    def _likeliest_first(self, suspects: list[int]) -> list[int]:
        """Whoever has killed one already; then, the fewer tokens it has had, the less is known of it."""
        slots = self._segment.slots

        def key(slot: int) -> tuple[int, int, int]:
            word = int(slots[slot]["suspicion"])
            alone = word >> SUSPICION_ALONE_SHIFT & SUSPICION_DEATHS_MASK
            produced = word >> SUSPICION_PRODUCED_SHIFT & PUBLISHED_PRODUCED_MASK
            return -alone, produced, -int(slots[slot]["arrival_ns"])

        return sorted(suspects, key=key)

    def _run_alone(self, slot: int) -> None:
        addresses = self._arena.address, self._segment.address
        record = self._arena.views["sequences"][slot]
        before = take_one(*addresses, slot)
        computed, deadline_ns = 0, self._now_ns() + PATIENCE_NS
        while record["status"] and record["produced_tokens"] == before:
            if self._now_ns() >= deadline_ns:
                self._segment.slots[slot]["suspicion"] = 0
                break
            if self._step(keep_shut) == 0:  # the backend is lost: its affair comes first
                break
            if record["computed_tokens"] != computed:  # a long prompt comes in chunks
                computed, deadline_ns = int(record["computed_tokens"]), self._now_ns() + PATIENCE_NS
        drop_one(*addresses, slot)
