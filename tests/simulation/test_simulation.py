"""A seeded simulation of the real step: arrivals, cancels, preemptions, dead workers and dead schedulers.

Every invariant is checked after every step, and every stream against what its request alone says it should be. A run
prints its seed; IRONBATCH_SIMULATION_SEED=... replays it.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import select
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from ironbatch import layout
from ironbatch.backends.base import BatchPlan, StepOutput
from ironbatch.backends.mock import EOS_TOKEN_ID, MockBackend
from ironbatch.kernels.emission import EOS_SCALE
from ironbatch.kernels.slots import slot_claim
from ironbatch.shm.wakeup import Doorbell
from tests.support import FakeWorker, SmallEngine, Stream, small_engine

SEED_VARIABLE = "IRONBATCH_SIMULATION_SEED"


class SchedulerDied(BaseException):
    """A SIGKILL, as far as one process can have it: no handler in the engine may see it."""


class MortalBackend(MockBackend):
    """The mock, which takes its scheduler with it when it is told to: before it computes, or after."""

    dies = ""

    def execute(self, plan: BatchPlan) -> StepOutput:
        if self.dies == "before":
            raise SchedulerDied
        output = super().execute(plan)
        if self.dies == "after":
            raise SchedulerDied
        return output


class FatalBell(Doorbell):
    """The scheduler that rings it dies between its publish and the wake."""

    def ring(self) -> None:
        raise SchedulerDied


@dataclass(frozen=True)
class Scenario:
    """What happens how often. Chances are per step, sizes are in tokens."""

    requests: int
    options: dict[str, Any] = field(default_factory=dict)
    most_prompt: int = 40
    most_new: int = 24
    burst_chance: float = 0.02
    cancel_chance: float = 0.02
    collect_chance: float = 0.7
    worker_death_chance: float = 0.002
    scheduler_death_chance: float = 0.002


class Simulation:
    """One run. All its choices come from one random generator."""

    def __init__(self, engine: SmallEngine, scenario: Scenario, seed: int) -> None:
        self.engine = engine
        self.scenario = scenario
        self.random = random.Random(seed)
        self.workers: dict[int, FakeWorker | None] = {
            lane: engine.worker(lane) for lane in range(engine.config.num_lanes)
        }
        self.cancelled: set[tuple[int, int]] = set()
        self.still_to_come = scenario.requests
        self.counts: Counter[str] = Counter()
        self.history = hashlib.sha256()
        threshold = round(engine.config.mock_eos_prob * EOS_SCALE)
        self.eos = {"eos_token_id": EOS_TOKEN_ID, "eos_threshold": threshold} if threshold else {}

    def run(self) -> None:
        most_steps = 100 * self.scenario.requests
        while self.still_to_come or any(worker and worker.streams for worker in self.workers.values()):
            self.counts["steps"] += 1
            assert self.counts["steps"] < most_steps, f"no end after {most_steps} steps: {self.counts}"
            self.engine.clock.advance_ns(self.random.randrange(1_000_000))
            self._arrivals()
            self._cancel()
            self._worker_death()
            self._step()
            self._collect()
        for _ in range(1_000):  # the last dead worker's lane is reaped
            if not self.engine.step() and None not in self.workers.values():
                return
            self._revive()
        raise AssertionError("the engine does not come to rest")

    def _arrivals(self) -> None:
        burst = self.random.random() < self.scenario.burst_chance
        for _ in range(min(self.random.randrange(20) if burst else self.random.random() < 0.25, self.still_to_come)):
            worker = self.random.choice([worker for worker in self.workers.values() if worker] or [None])
            if worker is None or not self._submit(worker):
                return

    def _submit(self, worker: FakeWorker) -> bool:
        limit = self.engine.config.max_request_tokens
        prompt = self.random.randint(1, min(self.scenario.most_prompt, limit - 1))
        max_new = self.random.randint(1, min(self.scenario.most_new, limit - prompt))
        stream = worker.try_submit(
            prompt,
            max_new,
            seed=self.random.getrandbits(63),
            priority=self.random.choice((-8, 0, 0, 0, 0, 7)),
            arrival_ns=self.engine.clock.now_ns(),
            flags=self.random.choice((0, 0, 0, layout.FLAG_IGNORE_EOS)) if self.eos else 0,
        )
        if stream is None:
            self.counts["refused"] += 1
            return False
        self.still_to_come -= 1
        return True

    def _cancel(self) -> None:
        if self.random.random() >= self.scenario.cancel_chance:
            return
        choices = [
            (worker, stream)
            for worker in self.workers.values()
            if worker
            for stream in worker.streams.values()
            if (stream.slot, stream.generation) not in self.cancelled
        ]
        if choices:
            worker, stream = self.random.choice(choices)
            worker.cancel(stream)
            self.cancelled.add((stream.slot, stream.generation))

    def _worker_death(self) -> None:
        if self.random.random() >= self.scenario.worker_death_chance:
            return
        lane = self.random.choice(list(self.workers))
        worker = self.workers[lane]
        if worker is None:
            return
        if self.random.random() < 0.5:  # it dies between claim and submit
            slot_claim(worker.segment.address, worker.owner, 0)
        worker.die()
        self.counts["streams of dead workers"] += len(worker.streams)
        self.counts["worker deaths"] += 1
        self.workers[lane] = None

    def _revive(self) -> None:
        for lane, worker in self.workers.items():
            row = self.engine.segment.lanes[lane]
            if worker is None and row["reaped_generation"] == row["generation"]:
                self.workers[lane] = self.engine.worker(lane, int(row["generation"]) + 1)

    def _step(self) -> None:
        if self.random.random() < self.scenario.scheduler_death_chance:
            where = self.random.choice(("before", "after", "at the wake"))
            self.engine.backend.dies = where
            if where == "at the wake":
                self.engine.scheduler._lane_bells = (FatalBell(-1),) * len(self.engine.bells)
        try:
            count = self.engine.step()
        except SchedulerDied:
            self.counts["scheduler deaths"] += 1
            self.engine.start_scheduler()
            self.engine.check()
            return
        if count == 0:
            self._check_rest()
        self.counts["sequence steps"] += count
        self.counts["preemptions"] += self.engine.gauge("preempted_count")
        assert self.engine.gauge("plan_tokens") <= self.engine.config.max_batch_tokens
        self._revive()

    def _check_rest(self) -> None:
        """The scheduler would now sleep: nothing is left to do, and whoever has not seen its stream's end is rung."""
        assert (self.engine.gauge("running_count"), self.engine.gauge("waiting_count")) == (0, 0)
        descriptors = {lane: self.engine.bells[lane].descriptor for lane, worker in self.workers.items() if worker}
        rung, _, _ = select.select(descriptors.values(), [], [], 0)
        for lane, descriptor in descriptors.items():
            assert descriptor in rung or not self.workers[lane].streams, f"worker {lane} was not woken"

    def _collect(self) -> None:
        """A worker looks when its bell has rung, if it has the time, and only then."""
        for lane, worker in self.workers.items():
            busy = self.random.random() >= self.scenario.collect_chance
            if busy or worker is None or not self.engine.bells[lane].wait(0):
                continue
            for stream in worker.collect(self.engine.clock.now_ns()):
                if stream.is_over:
                    self._check(stream)

    def _check(self, stream: Stream) -> None:
        tokens = stream.token_ids
        eos_threshold = self.eos.get("eos_threshold", 0)
        assert tokens == stream.expected_token_ids(len(tokens), **self.eos)
        if stream.reason == layout.FINISH_LENGTH:
            assert len(tokens) == stream.max_new_tokens
        elif stream.reason == layout.FINISH_STOP:
            assert eos_threshold > 0
            assert tokens[-1] == EOS_TOKEN_ID
        else:
            assert stream.reason == layout.FINISH_CANCELLED
            assert (stream.slot, stream.generation) in self.cancelled
        if eos_threshold and not stream.ignores_eos:
            assert EOS_TOKEN_ID not in tokens[:-1]
        self.counts["ended"] += 1
        self.counts[f"ended with reason {stream.reason}"] += 1
        self.counts["tokens"] += len(tokens)
        self.history.update(repr((self.counts["steps"], stream)).encode())


def simulate(scenario: Scenario, seed: int) -> Simulation:
    """Run a scenario to its end and check what holds of every run."""
    print(f"\nreplay with {SEED_VARIABLE}={seed}")

    with small_engine(MortalBackend, **scenario.options) as engine:
        simulation = Simulation(engine, scenario, seed)
        simulation.run()
        engine.assert_nothing_held()
        counts = simulation.counts
        print(dict(counts))
        assert counts["ended"] + counts["streams of dead workers"] == scenario.requests
        assert engine.segment.metrics[0]["preemptions"] >= counts["preemptions"]
        if not counts["worker deaths"]:
            assert engine.segment.metrics[0]["tokens_generated"] == counts["tokens"]
    return simulation


@pytest.fixture
def seed() -> int:
    """A new one in each run, unless it is given."""
    return int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(2**32))


SMALL_POOL = {"total_kv_blocks": 24, "kv_block_size": 4, "max_queued_requests": 56}


def test_ten_thousand_requests(seed: int) -> None:
    counts = simulate(Scenario(10_000, SMALL_POOL), seed).counts
    for event in ("preemptions", "scheduler deaths", "worker deaths", f"ended with reason {layout.FINISH_CANCELLED}"):
        assert counts[event] > 10, f"this run has hardly tested {event}"


VARIATIONS = {
    "ends of sequence": Scenario(800, SMALL_POOL | {"mock_eos_prob": 0.05}),
    "blocks of one token": Scenario(500, {"total_kv_blocks": 70, "kv_block_size": 1}),
    "one token a step": Scenario(100, {"max_batch_tokens": 1}, most_prompt=6, most_new=8),
    "one sequence at a time": Scenario(300, {"max_running_seqs": 1}),
    "all of these": Scenario(
        100,
        {"kv_block_size": 1, "max_batch_tokens": 1, "max_running_seqs": 1, "mock_eos_prob": 0.05},
        most_prompt=6,
        most_new=8,
    ),
    "one block": Scenario(200, {"total_kv_blocks": 1, "kv_block_size": 16}),
    "nobody dies": Scenario(500, SMALL_POOL, worker_death_chance=0, scheduler_death_chance=0.01),
}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_variation(variation: str, seed: int) -> None:
    simulate(VARIATIONS[variation], seed)


def test_same_seed_replays_the_same_run(seed: int) -> None:
    scenario = Scenario(150, SMALL_POOL | {"mock_eos_prob": 0.02}, scheduler_death_chance=0.02)
    first, second = (simulate(scenario, seed) for _ in range(2))
    assert first.history.digest() == second.history.digest()
    assert first.counts == second.counts
    assert first.history.digest() != simulate(scenario, seed + 1).history.digest()
