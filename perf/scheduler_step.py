"""`Scheduler.step`, from drain to publish, with a backend that takes no time: `python perf/scheduler_step.py`.

Steady: every sequence decodes, none ends. First: as many requests as there are places have just been submitted, without
token ids, and are admitted and prefilled. Each alone, and beside a process that reads all slots as fast as it can.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

from engine import StepEngine, read_published
from second_core import child
from yardsticks import runner

RUNNING = (8, 64, 256, 1024, 4096)
LOOKS = 100


def time_steady(loops: int, running: int, *, is_read: bool) -> float:
    """Seconds of `loops` decode steps."""
    engine = StepEngine(running)
    with reader(engine) if is_read else contextlib.nullcontext():
        elapsed_s = engine.time_steps(loops)
    engine.close()
    return elapsed_s


def time_first(loops: int, running: int, *, is_read: bool) -> float:
    """Seconds of `loops` steps that admit `running` requests each."""
    engine = StepEngine(running)
    step = engine.scheduler.step
    elapsed_s = 0.0
    with reader(engine) if is_read else contextlib.nullcontext():
        for _ in range(loops):
            engine.submit(max_new_tokens=2)
            start_s = time.perf_counter()
            step()
            elapsed_s += time.perf_counter() - start_s
            engine.finish()
    engine.close()
    return elapsed_s


def reader(engine: StepEngine) -> contextlib.AbstractContextManager[None]:
    """A process that reads all slots of `engine` all the time."""
    return child(partial(read_published, engine.address, LOOKS))


def main() -> None:
    """Run all cases."""
    made = runner(__doc__)
    cases: dict[str, Callable[..., float]] = {"steady": time_steady, "first": time_first}
    for case, time_case in cases.items():
        for running in RUNNING:
            for side, is_read in (("alone", False), ("read", True)):
                made.bench_time_func(f"{case}/{running}/{side}", partial(time_case, running=running, is_read=is_read))


if __name__ == "__main__":
    main()
