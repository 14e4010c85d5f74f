"""What one engine shares, as a bundle that a parent makes and hands down to its children.

Made by the common ancestor of all who use it: `ironbatch serve`, or gunicorn's arbiter. A forked child has it already;
a child that was executed gets the descriptors by `pass_fds` and finds the rest in its environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from ironbatch.config import Config
from ironbatch.errors import StartError
from ironbatch.shm.segment import Segment
from ironbatch.shm.wakeup import Doorbell

SEGMENT_VARIABLE = "IRONBATCH_INTERNAL_SEGMENT"
DOORBELLS_VARIABLE = "IRONBATCH_INTERNAL_DOORBELLS"


class Engine:
    """The segment, the scheduler's doorbell and one for each lane."""

    def __init__(self, segment: Segment, scheduler_bell: Doorbell, lane_bells: tuple[Doorbell, ...]) -> None:
        self.segment = segment
        self.scheduler_bell = scheduler_bell
        self.lane_bells = lane_bells

    @classmethod
    def create(cls, config: Config, now_ns: int) -> Engine:
        """Everything for a new engine. Raises StartError."""
        segment = Segment.create(config, now_ns)
        bells: list[Doorbell] = []
        try:
            bells.extend(Doorbell.create() for _ in range(1 + config.num_lanes))
        except OSError as problem:
            for bell in bells:
                bell.close()
            segment.close()
            raise StartError(
                f"cannot make {1 + config.num_lanes} eventfds: {problem.strerror}; raise the limit of open files"
                " (ulimit -n), or lower --workers"
            ) from None
        return cls(segment, bells[0], tuple(bells[1:]))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Engine:
        """The engine that a parent has handed down. Raises StartError if there is none."""
        name = environ.get(SEGMENT_VARIABLE)
        if name is None:
            raise StartError("no engine: start with `ironbatch serve`, or gunicorn with -c deploy/gunicorn.conf.py")
        scheduler, *lanes = (Doorbell(int(word)) for word in environ[DOORBELLS_VARIABLE].split(","))
        return cls(Segment.attach(name), scheduler, tuple(lanes))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a child must inherit: the scheduler's doorbell first, then the lanes'."""
        return (self.scheduler_bell.descriptor, *(bell.descriptor for bell in self.lane_bells))

    def to_environ(self) -> dict[str, str]:
        """The variables by which `from_environ` finds it."""
        return {
            SEGMENT_VARIABLE: self.segment.name,
            DOORBELLS_VARIABLE: ",".join(map(str, self.descriptors)),
        }

    def close(self) -> None:
        """Leave it; the creator removes it."""
        self.segment.close()
        for bell in (self.scheduler_bell, *self.lane_bells):
            bell.close()
