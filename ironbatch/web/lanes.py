"""Who holds which lane: the book that the parent of the web workers keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ironbatch.kernels.lanes import mark_lane_dead
from ironbatch.shm.engine import Engine

LANE_VARIABLE = "IRONBATCH_INTERNAL_LANE"
"""In a worker's environment: `lane:generation`; absent when no lane was free."""


class LaneHolder(NamedTuple):
    """A lane, and its how manieth holder this is; what the scheduler calls the owner of a slot."""

    lane: int
    generation: int


class LaneBook:
    """Gives lanes to workers before their fork and marks them dead after their end.

    A lane is free only once the scheduler has reaped its last holder: until then slots may name it as their owner.
    Nothing here waits.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lanes = engine.segment.lanes
        self._holders: dict[Any, LaneHolder] = {}  # by gunicorn's worker object, which has no pid before its fork

    def assign(self, worker: Any, living: Mapping[int, Any]) -> LaneHolder | None:
        """A lane for a worker that is about to be forked, or None when there is none.

        Args:
            worker: gunicorn's object; its `pid` is set after the fork.
            living: the workers that live, by pid. Holders that are not among them have died unnoticed: gunicorn skips
                `child_exit` when a kill of its own finds the process gone.
        """
        for holder_worker in [held for held in self._holders if living.get(held.pid) is not held]:
            self.release(holder_worker)
        for lane, record in enumerate(self._lanes):
            generation = int(record["generation"])
            if int(record["reaped_generation"]) != generation:
                continue
            record["generation"] = generation + 1
            self._holders[worker] = LaneHolder(lane, generation + 1)
            return self._holders[worker]
        return None

    def release(self, worker: Any) -> None:
        """This worker is dead: let the scheduler end and free all that it owned."""
        holder = self._holders.pop(worker, None)
        if holder is not None and mark_lane_dead(self._engine.segment.address, *holder):
            self._engine.scheduler_bell.ring()
