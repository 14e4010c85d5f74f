"""A seeded simulation of the real step: arrivals, groups, cancels, preemptions, dead workers and dead schedulers.

Some schedulers are killed by a sequence, each time that they compute it. Every invariant is checked after every step,
and every stream against what its request alone says it should be. With `mock_kv` the tokens depend on every position
that is read back through the block table, so that a block which was shared, copied, evicted or given away wrongly shows
in a stream.

A run prints its seed; IRONBATCH_SIMULATION_SEED=... replays it.
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
from ironbatch.backends.base import Backend, BatchLimits, BatchPlan, StepOutput
from ironbatch.backends.mock import EOS_TOKEN_ID, MockBackend
from ironbatch.backends.mock_kv import MockKVBackend
from ironbatch.config import Config
from ironbatch.kernels.emission import EOS_SCALE, VOCABULARY
from ironbatch.kernels.slots import slot_claim
from ironbatch.shm.wakeup import Doorbell
from tests.support import FakeWorker, SmallEngine, Stream, small_engine

SEED_VARIABLE = "IRONBATCH_SIMULATION_SEED"
ENGINES_VARIABLE = "IRONBATCH_SIMULATION_ENGINES"
"""How many random engines `test_engines_drawn_at_random` makes; a first one can be replayed with 1."""


class SchedulerDied(BaseException):
    """A SIGKILL, as far as one process can have it: no handler in the engine may see it."""


POISON_MARK = 0xDEAD


def poison_seed(rng: random.Random) -> int:
    """Of a sequence that kills whoever computes it, once it has so many tokens."""
    return rng.getrandbits(40) << 20 | rng.randrange(8) << 16 | POISON_MARK


def kills_at(seed: int) -> int | None:
    """With how many tokens a sequence kills, if it does."""
    return seed >> 16 & 7 if seed & 0xFFFF == POISON_MARK else None


class Mortal:
    """A mock that takes its scheduler with it when it is told to: before it computes, or after. Or by poison."""

    dies = ""

    def execute(self, plan: BatchPlan) -> StepOutput:
        if self.dies == "before":
            raise SchedulerDied
        for seed, produced in zip(plan.seeds.tolist(), plan.rows["produced_tokens"].tolist(), strict=True):
            tokens = kills_at(seed)
            if tokens is not None and produced >= tokens:
                raise SchedulerDied
        output: StepOutput = super().execute(plan)  # type: ignore[misc]
        if self.dies == "after":
            raise SchedulerDied
        return output


class MortalMock(Mortal, MockBackend):
    pass


class MortalKVMock(Mortal, MockKVBackend):
    pass


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
    most_choices: int = 4
    group_chance: float = 0.0
    known_chance: float = 0.0  # of a prompt whose token ids are given
    salt_chance: float = 0.0
    longest_pause_ns: int = 1_000_000
    burst_chance: float = 0.02
    cancel_chance: float = 0.02
    collect_chance: float = 0.7
    worker_death_chance: float = 0.002
    scheduler_death_chance: float = 0.002
    poison_chance: float = 0.0
    limits: dict[str, Any] = field(default_factory=dict)  # what the backend declares
    most_steps_a_request: int = 100

    def backend(self, config: Config) -> Backend:
        made = MortalKVMock(config) if config.mock_kv else MortalMock(config)
        made.batch_limits = BatchLimits(**self.limits)
        return made


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
        self.beginnings = [self._random_tokens(scenario.most_prompt) for _ in range(4)]
        self.counts: Counter[str] = Counter()
        self.history = hashlib.sha256()
        threshold = round(engine.config.mock_eos_prob * EOS_SCALE)
        self.eos = {"eos_token_id": EOS_TOKEN_ID, "eos_threshold": threshold} if threshold else {}

    def run(self) -> None:
        most_steps = self.scenario.most_steps_a_request * self.scenario.requests
        while self.still_to_come or any(worker and worker.streams for worker in self.workers.values()):
            self.counts["steps"] += 1
            assert self.counts["steps"] < most_steps, f"no end after {most_steps} steps: {self.counts}"
            self.engine.clock.advance_ns(self.random.randrange(self.scenario.longest_pause_ns))
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
        limit = int(self.engine.segment.header["longest_request_tokens"])
        prompt = self.random.randint(1, min(self.scenario.most_prompt, limit - 1))
        max_new = self.random.randint(1, min(self.scenario.most_new, limit - prompt))
        streams = worker.try_submit_group(
            prompt,
            max_new,
            self._choices(prompt + max_new),
            seed=self._seed(),
            priority=self.random.choice((-8, -8, 0, 0, 7, 7)),
            arrival_ns=self.engine.clock.now_ns(),
            flags=self.random.choice((0, 0, 0, layout.FLAG_IGNORE_EOS)) if self.eos else 0,
            prompt_token_ids=self._prompt(prompt),
            salt=(1, 2) if self.random.random() < self.scenario.salt_chance else (0, 0),
        )
        if not streams:
            self.counts["refused"] += 1
            return False
        self.counts["streams"] += len(streams)
        self.counts["groups"] += len(streams) > 1
        self.still_to_come -= 1
        return True

    def _seed(self) -> int:
        is_poison = self.scenario.poison_chance and self.random.random() < self.scenario.poison_chance
        return poison_seed(self.random) if is_poison else self.random.getrandbits(63)

    def _choices(self, tokens: int) -> int:
        """How many sequences of so many tokens; no more than an empty engine has blocks and places for."""
        if self.random.random() >= self.scenario.group_chance:
            return 1
        config = self.engine.config
        fit = config.total_kv_blocks // -(-tokens // config.kv_block_size)
        return min(self.random.randint(2, self.scenario.most_choices), fit, config.running_limit)

    def _prompt(self, length: int) -> list[int] | None:
        """Some of a beginning that others have too, and then its own."""
        if self.random.random() >= self.scenario.known_chance:
            return None
        shared = self.random.choice((0, length // 2, length, self.random.randint(0, length)))
        return self.random.choice(self.beginnings)[:shared] + self._random_tokens(length - shared)

    def _random_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1, VOCABULARY) for _ in range(count)]

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
        if self.random.random() < 0.5:
            self._die_while_submitting(worker)
        worker.die()
        self.counts["streams of dead workers"] += len(worker.streams)
        self.counts["worker deaths"] += 1
        self.workers[lane] = None

    def _die_while_submitting(self, worker: FakeWorker) -> None:
        """Between claim and submit; or of a group, whose parent is submitted last, when some others are already."""
        slots = [slot_claim(worker.segment.address, worker.owner, 0) for _ in range(self.random.choice((1, 1, 3)))]
        if -1 in slots:
            return
        for slot in slots[1:]:
            row = worker.segment.slots[slot]
            row["submitted"] = row["generation"]
            self.counts["submitted by half"] += 1

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
            self._restart()
            self.engine.check()
            return
        if count == 0:
            self._check_rest()
        self.counts["sequence steps"] += count
        preempted = self.engine.gauge("preempted_count")
        self.counts["preemptions"] += preempted
        self.counts["made way"] += self.engine.gauge("displaced_count")
        assert self.engine.gauge("plan_tokens") <= self.engine.config.max_batch_tokens
        self._revive()

    def _restart(self) -> None:
        """Schedulers, until one survives its start: some run suspects alone."""
        for _ in range(1_000):
            self.counts["scheduler deaths"] += 1
            try:
                self.engine.start_scheduler()
            except SchedulerDied:
                self.counts["deaths alone"] += 1
            else:
                return
        raise AssertionError("schedulers die again and again")

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
        elif stream.reason == layout.FINISH_ERROR:
            assert stream.error_code == layout.ERROR_POISON
            assert len(tokens) == kills_at(stream.seed)
            self.counts["poison ended"] += 1
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

    with small_engine(scenario.backend, **scenario.options) as engine:
        simulation = Simulation(engine, scenario, seed)
        simulation.run()
        engine.assert_nothing_held()
        counts = simulation.counts
        metrics = engine.segment.metrics[0]
        for name in ("prefix_hit_tokens", "prefix_evicted_blocks", "copied_blocks"):
            counts[name] += int(metrics[name])
        print(dict(counts))
        assert counts["ended"] + counts["streams of dead workers"] == counts["streams"]
        assert metrics["preemptions"] >= counts["preemptions"]
        assert metrics["prefix_hit_tokens"] <= metrics["prefix_query_tokens"]
        if not counts["worker deaths"]:
            assert metrics["tokens_generated"] == counts["tokens"]
    return simulation


@pytest.fixture
def seed() -> int:
    """A new one in each run, unless it is given."""
    return int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(2**32))


SMALL_POOL = {"total_kv_blocks": 24, "kv_block_size": 4, "max_queued_requests": 56}


AGING = {"priority_aging_s": 1}
FEATURES: dict[str, Any] = {"group_chance": 0.2, "known_chance": 0.8, "salt_chance": 0.1}
EVENTS = (
    "preemptions",
    "made way",
    "groups",
    "copied_blocks",
    "prefix_hit_tokens",
    "prefix_evicted_blocks",
    "scheduler deaths",
    "worker deaths",
    f"ended with reason {layout.FINISH_CANCELLED}",
)


ALL_EVENTS = Scenario(10_000, SMALL_POOL | AGING, longest_pause_ns=100_000_000, **FEATURES)
READ_BACK = Scenario(3_000, SMALL_POOL | AGING | {"mock_kv": True}, longest_pause_ns=100_000_000, **FEATURES)


def test_ten_thousand_requests(seed: int) -> None:
    simulate(ALL_EVENTS, seed)


def test_what_is_read_back_from_the_kv_cache_is_what_was_written(seed: int) -> None:
    """Through shared blocks, copies, evictions and preemptions, and across the deaths of schedulers."""
    simulate(READ_BACK, seed)


@pytest.mark.parametrize(("scenario", "few"), [(ALL_EVENTS, 10), (READ_BACK, 2)], ids=["without KV", "with KV"])
def test_the_long_runs_see_every_event(scenario: Scenario, few: int) -> None:
    """With one seed: how often the rarer events come differs tenfold from seed to seed."""
    counts = simulate(scenario, seed=1).counts
    for event in EVENTS:
        assert counts[event] > few, f"this run has hardly tested {event}"


VARIATIONS = {
    "ends of sequence": Scenario(800, SMALL_POOL | {"mock_eos_prob": 0.05}, **FEATURES),
    "no token ids, no groups": Scenario(500, SMALL_POOL),
    "blocks of one token": Scenario(500, {"total_kv_blocks": 70, "kv_block_size": 1}, **FEATURES),
    "one token a step": Scenario(100, {"max_batch_tokens": 1}, most_prompt=6, most_new=8),
    "one sequence at a time": Scenario(300, {"max_running_seqs": 1}, known_chance=0.8),
    "all of these": Scenario(
        100,
        {"kv_block_size": 1, "max_batch_tokens": 1, "max_running_seqs": 1, "mock_eos_prob": 0.05},
        most_prompt=6,
        most_new=8,
    ),
    "one block": Scenario(200, {"total_kv_blocks": 1, "kv_block_size": 16}),
    "nobody dies": Scenario(500, SMALL_POOL, worker_death_chance=0, scheduler_death_chance=0.01, **FEATURES),
    "no prefix cache": Scenario(500, SMALL_POOL | {"mock_kv": True, "no_prefix_cache": True}, **FEATURES),
    "groups alone": Scenario(500, SMALL_POOL | {"mock_kv": True}, group_chance=0.8),
    "groups in small chunks": Scenario(
        300,
        {"total_kv_blocks": 32, "kv_block_size": 2, "max_batch_tokens": 6, "mock_kv": True},
        group_chance=0.5,
        known_chance=0.5,
    ),
    "poison": Scenario(400, SMALL_POOL | {"mock_kv": True}, poison_chance=0.04, most_steps_a_request=1_000, **FEATURES),
    "poison in small chunks": Scenario(
        200,
        {"total_kv_blocks": 32, "kv_block_size": 2, "max_batch_tokens": 6, "mock_kv": True},
        poison_chance=0.1,
        most_steps_a_request=1_000,
        **FEATURES,
    ),
    "poison alone": Scenario(
        30, {"max_running_seqs": 1}, poison_chance=1.0, scheduler_death_chance=0, most_steps_a_request=1_000
    ),
    "all prompts alike": Scenario(800, SMALL_POOL | {"mock_kv": True}, known_chance=1.0, most_prompt=12),
    "KV, blocks of one token": Scenario(500, {"total_kv_blocks": 70, "kv_block_size": 1, "mock_kv": True}, **FEATURES),
    "KV, ends of sequence": Scenario(
        500, {"total_kv_blocks": 30, "kv_block_size": 8, "mock_kv": True, "mock_eos_prob": 0.05}, **FEATURES
    ),
}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_variation(variation: str, seed: int) -> None:
    simulate(VARIATIONS[variation], seed)


def test_the_runs_with_poison_end_it(seed: int) -> None:
    """With any seed: in each tenth request, of which few are cancelled before it kills."""
    counts = simulate(VARIATIONS["poison in small chunks"], seed).counts
    assert counts["poison ended"] > 0
    assert counts["deaths alone"] >= 2 * counts["poison ended"]


def some(rng: random.Random, chance: float, values: dict[str, Any]) -> dict[str, Any]:
    """Each of `values`, drawn from its list, with that chance."""
    return {name: rng.choice(choices) for name, choices in values.items() if rng.random() < chance}


def any_scenario(rng: random.Random) -> Scenario:
    """Some small engine with some device under some load, tiny limits more often than not."""
    options = some(
        rng,
        0.9,
        {
            "kv_block_size": (1, 1, 2, 4, 8, 16, 64, 256),
            "total_kv_blocks": (2, 3, 5, 8, 16, 40, 100),
            "max_batch_tokens": (1, 2, 3, 7, 16, 64, 500),
            "max_running_seqs": (1, 2, 3, 8, 16),
            "max_queued_requests": (0, 1, 8, 24, 60),
            "max_model_len": (2, 8, 40, 64, 200),
            "priority_aging_s": (0, 1, 10),
            "mock_eos_prob": (0.0, 0.05),
        },
    )
    buckets = [tuple(sorted(rng.sample((1, 2, 3, 4, 6, 8, 16, 64), rng.randint(1, 4)))) for _ in range(4)]
    limits = some(
        rng,
        0.2,
        {
            "max_sequences": (1, 2, 3, 8, 100),
            "max_tokens": (1, 2, 5, 64),
            "mixes_prefill_and_decode": (False,),
            "max_prefill_sequences": (1, 2, 3),
            "sequence_buckets": buckets,
            "token_buckets": buckets,
            "max_batch_context": (150, 300, 1000),
        },
    )
    return Scenario(
        requests=20,
        options=options | {"mock_kv": True, "no_prefix_cache": rng.random() < 0.2},
        limits=limits,
        most_prompt=rng.choice((1, 5, 40, 120)),
        most_new=rng.choice((1, 5, 20)),
        most_choices=rng.choice((2, 4, 8)),
        longest_pause_ns=rng.choice((1, 1_000_000, 1_000_000_000)),
        group_chance=rng.choice((0.0, 0.3, 0.8)),
        known_chance=rng.choice((0.0, 0.8, 1.0)),
        salt_chance=rng.choice((0.0, 0.3)),
        burst_chance=0.2,
        cancel_chance=rng.choice((0.0, 0.02, 0.2)),
        poison_chance=rng.choice((0.0, 0.0, 0.1)),
        most_steps_a_request=5_000,
    )


def test_engines_drawn_at_random(seed: int) -> None:
    for k in range(int(os.environ.get(ENGINES_VARIABLE) or 150)):
        scenario = any_scenario(random.Random(seed + k))
        print(scenario)
        simulate(scenario, seed + k)


def test_same_seed_replays_the_same_run(seed: int) -> None:
    scenario = Scenario(150, SMALL_POOL | {"mock_eos_prob": 0.02}, scheduler_death_chance=0.02, **FEATURES)
    first, second = (simulate(scenario, seed) for _ in range(2))
    assert first.history.digest() == second.history.digest()
    assert first.counts == second.counts
    assert first.history.digest() != simulate(scenario, seed + 1).history.digest()
