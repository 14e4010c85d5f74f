"""No plan is outside what a device declares: 100,000 random steps, each judged by its plan alone."""

from __future__ import annotations

import os
import random
import secrets
from typing import Any

from ironbatch import layout
from ironbatch.backends.base import BatchLimits, BatchPlan
from ironbatch.config import Config
from tests.policy_load import ALL, Case, Load
from tests.scheduler_oracle import smallest_bucket
from tests.support import ScriptedBackend, SmallEngine

SEED_VARIABLE = "IRONBATCH_POLICY_SEED"
LIMIT_SETS = 50
STEPS_PER_SET = 2_000
FEW_STREAMS = 12  # as long as there are fewer, more arrive


class WatchedBackend(ScriptedBackend):
    """Emits token 1 for every row that may, and keeps what the plan shows of a violation."""

    def __init__(self, config: Config, limits: dict[str, Any]) -> None:
        super().__init__(config)
        self.batch_limits = BatchLimits(**limits)
        self.plans = 0
        self.fullest = 0.0
        self.violation = ""
        self._most_rows = min(
            limits.get("max_sequences", config.max_running_seqs),
            *limits.get("sequence_buckets", ())[-1:],
            config.max_running_seqs,
        )
        self._most_tokens = min(
            limits.get("max_tokens", config.max_batch_tokens),
            *limits.get("token_buckets", ())[-1:],
            config.max_batch_tokens,
        )
        self._mixes = limits.get("mixes_prefill_and_decode", True)
        self._most_chunks = limits.get("max_prefill_sequences", config.max_running_seqs)
        self._buckets = limits.get("sequence_buckets", ())
        self._most_context = limits.get("max_batch_context")
        self.script = self._watch

    def attach(self, engine: SmallEngine) -> None:
        """The plan's kinds stand in the scheduler's header."""
        self._engine = engine

    def _watch(self, plan: BatchPlan) -> None:
        self.plans += 1
        rows, count = plan.rows, len(plan)
        tokens = int(rows["new_tokens"].sum())
        decodes = self._engine.gauge("plan_decodes")
        padded_context = smallest_bucket(count, self._buckets) * int(rows["context_tokens"].max())
        if count > self._most_rows:
            self.violation = f"{count} rows"
        elif tokens > self._most_tokens or tokens < count:
            self.violation = f"{tokens} new tokens in {count} rows"
        elif not self._mixes and 0 < decodes < count:
            self.violation = f"{decodes} decodes beside {count - decodes} chunks"
        elif count - decodes > self._most_chunks:
            self.violation = f"{count - decodes} chunks"
        elif not (rows["new_tokens"][:decodes] == 1).all():
            self.violation = "a decode of several tokens"
        elif self._most_context and padded_context > self._most_context:
            self.violation = f"{count} rows padded, times the longest context, are {padded_context}"
        if self._most_context:
            self.fullest = max(self.fullest, padded_context / self._most_context)


def random_limits(rng: random.Random) -> dict[str, Any]:
    """Some of the limits that there are, such that at least short requests can be met."""
    buckets = rng.choice([(1, 2, 4, 8), (2, 4), (4,), (1, 3, 8)])
    choices: dict[str, Any] = {
        "max_sequences": rng.randint(1, 8),
        "max_tokens": rng.randint(1, 24),
        "mixes_prefill_and_decode": False,
        "max_prefill_sequences": rng.randint(1, 3),
        "sequence_buckets": buckets,
        "token_buckets": rng.choice([(1, 2, 4, 8, 16), (8,), (4, 32)]),
        "max_batch_context": rng.randint(12, 60) * buckets[0],
    }
    return {name: limit for name, limit in choices.items() if rng.random() < 0.5}


def random_options(rng: random.Random) -> dict[str, Any]:
    return {
        "total_kv_blocks": rng.choice([8, 16, 40]),
        "kv_block_size": rng.choice([1, 4, 16]),
        "max_batch_tokens": rng.choice([4, 16, 32]),
        "max_running_seqs": rng.choice([3, 8]),
        "priority_aging_s": rng.choice([0, 1]),
        "no_prefix_cache": rng.random() < 0.2,
        "max_model_len": 40,
    }


def run(case: Case, seed: int) -> WatchedBackend:
    load, oracle = Load(case, seed), case.oracle()  # the oracle only says which requests are not refused
    backends: list[WatchedBackend] = []

    def make_backend(config: Config) -> WatchedBackend:
        backends.append(WatchedBackend(config, case.limits))
        return backends[-1]

    engine = SmallEngine(make_backend, case.config)
    (backend,) = backends
    backend.attach(engine)
    worker = engine.worker()
    try:
        for _ in range(STEPS_PER_SET):
            requests = load.requests(oracle, engine.clock.now_ns()) if len(worker.streams) < FEW_STREAMS else []
            for request in requests:
                worker.try_submit_group(
                    request.prompt,
                    request.max_new,
                    request.choices,
                    prompt_token_ids=request.prompt_ids,
                    priority=request.priority,
                    arrival_ns=request.arrival_ns,
                )
            for slot in load.cancels(list(worker.streams)):
                worker.cancel(worker.streams[slot])
            engine.clock.advance_ns(load.time_step_ns())
            engine.scheduler.step()  # without the audit, which has its own tests
            assert not backend.violation, f"plan {backend.plans} of {case}: {backend.violation}"
            for stream in worker.collect():
                assert stream.reason != layout.FINISH_ERROR, f"{stream} of {case} ended with an error"
        engine.check()
        engine.run(worker)
        engine.assert_nothing_held()
    finally:
        engine.close()
    return backend


def test_no_plan_violates_a_limit_in_100_000_steps() -> None:
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(2**32))
    print(f"\nreplay with {SEED_VARIABLE}={seed}")
    rng = random.Random(seed)
    backends = [
        run(Case(random_options(rng), random_limits(rng), cancel_chance=0.02, arrival_chance=0.7, **ALL), seed + k)
        for k in range(LIMIT_SETS)
    ]
    plans = sum(backend.plans for backend in backends)
    assert plans > 0.8 * LIMIT_SETS * STEPS_PER_SET, "the engines were hardly busy"
    assert max(backend.fullest for backend in backends) > 0.8, "no plan came near the limit of the context"
