"""What the scheduler's features cost: `python perf/features.py`.

`steady` is a step in which every sequence decodes and none ends: `plain` requests, and requests with `all` features:
token ids in the prefix cache, two choices each, five priorities, a backend that declares limits of every kind.
`waiting`: a steady step of plain requests while as many more wait for places, in five classes that age.
`by_empty_call`: how many empty calls a steady step takes, the two timed in turns a few hundred microseconds long, since
a machine whose clock changes from second to second spoils a ratio of what was timed a minute apart.
`displace`: a request of a higher class takes the place of one of 256 and emits its token; the displaced one returns.
"""

from __future__ import annotations

import time
from functools import partial

from engine import MODEL_LEN, NullBackend, StepEngine
from yardsticks import empty, runner

from ironbatch.backends.limits import BatchLimits
from ironbatch.kernels.slots import slot_release

RUNNING = (8, 64, 256, 1024, 4096)
PROMPT = 40  # two full blocks and a part of one, which the choices copy
CHOICES = 2
PROMPTS = 4  # different ones: the others are found in the cache
PRIORITIES = 5
FULL = 256


class LimitedBackend(NullBackend):
    """Declares a limit of every kind, none of which is tighter than the configuration."""

    def __init__(self, running: int) -> None:
        self.batch_limits = BatchLimits(
            max_sequences=running,
            max_tokens=running * PROMPT,
            max_prefill_sequences=running,
            sequence_buckets=[1 << bit for bit in range(running.bit_length())],
            max_batch_context=running * MODEL_LEN,
        )


class FeaturedEngine(StepEngine):
    """All places are taken by requests that use every feature."""

    def __init__(self, running: int) -> None:
        super().__init__(running, LimitedBackend(running), prompt=PROMPT)

    def make_steady(self) -> None:
        """All places decode, and go on for `steps_left` steps in which none ends."""
        self.finish()
        for k in range(self.running // CHOICES):
            priority = k % PRIORITIES - PRIORITIES // 2
            self.submit_group(k % PROMPTS * PROMPT, MODEL_LEN - PROMPT, choices=CHOICES, priority=priority)
        steps = 1
        while self.scheduler.step() != self.running:
            steps += 1
        self.steps_left = MODEL_LEN - PROMPT - 2 - steps


class CrowdedEngine(StepEngine):
    """All places are taken, and as many requests wait for one."""

    def __init__(self, running: int) -> None:
        super().__init__(running, max_queued_requests=running)

    def make_steady(self) -> None:
        """All places decode, and go on for `steps_left` steps in which none ends."""
        super().make_steady()
        for k in range(self.running):
            self.submit_group(k, 1, priority=k % PRIORITIES)
        self.scheduler.step()
        self.steps_left -= 1


def time_steady(loops: int, make: type[StepEngine], running: int) -> float:
    """Seconds of `loops` decode steps."""
    engine = make(running)
    elapsed_s = engine.time_steps(loops)
    engine.close()
    return elapsed_s


TURNS = 100
TURN_STEPS = 100
TURN_CALLS = 10_000


def count_by_empty_call(loops: int, make: type[StepEngine]) -> float:
    """`loops` times the ratio of a decode step to an empty call."""
    engine = make(FULL)
    total = 0.0
    for _ in range(loops):
        steps_s = calls_s = 0.0
        for _ in range(TURNS):
            steps_s += engine.time_steps(TURN_STEPS)
            start_s = time.perf_counter()
            for _ in range(TURN_CALLS):
                empty()
            calls_s += time.perf_counter() - start_s
        total += (steps_s / TURN_STEPS) / (calls_s / TURN_CALLS)
    engine.close()
    return total


def time_displacement(loops: int) -> float:
    """Seconds of `loops` displacements: the step that does it, and the one in which the displaced one is back."""
    engine = StepEngine(FULL, max_queued_requests=FULL)
    step = engine.scheduler.step
    elapsed_s = 0.0
    for _ in range(loops):
        if engine.steps_left <= 0:
            engine.make_steady()
        urgent = engine.submit_group(0, 1, priority=-1)
        start_s = time.perf_counter()
        step()
        step()
        elapsed_s += time.perf_counter() - start_s
        slot_release(engine.address, urgent)
        engine.steps_left -= 2
    engine.close()
    return elapsed_s


def main() -> None:
    """Run all cases."""
    made = runner(__doc__)
    for running in RUNNING:
        made.bench_time_func(f"steady/{running}/plain", partial(time_steady, make=StepEngine, running=running))
        made.bench_time_func(f"steady/{running}/all", partial(time_steady, make=FeaturedEngine, running=running))
    for kind, make in (("plain", StepEngine), ("all", FeaturedEngine)):
        count = partial(count_by_empty_call, make=make)
        made.bench_time_func(f"by_empty_call/{FULL}/{kind}", count, metadata={"unit": "integer"})
    made.bench_time_func(f"waiting/{FULL}", partial(time_steady, make=CrowdedEngine, running=FULL))
    made.bench_time_func(f"displace/{FULL}", time_displacement)


if __name__ == "__main__":
    main()
