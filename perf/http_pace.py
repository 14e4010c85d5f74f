"""A backend for perf/http_stream.py: each step brings each sequence 8 tokens, so that a worker finds 8 lines ready."""

from __future__ import annotations

import time

from ironbatch.backends.base import Backend, BatchLimits, BatchPlan, EngineLimits, KVGeometry, StepOutput
from ironbatch.config import Config

TOKENS_PER_STEP = 8


class Pace(Backend):
    """Emits token 0, `TOKENS_PER_STEP` of them a sequence and step; a step takes the mock's base time."""

    batch_limits = BatchLimits(max_tokens_per_step=TOKENS_PER_STEP)

    def __init__(self, config: Config) -> None:
        self._step_s = config.mock_token_latency_us / 1e6

    def start(self, kv: KVGeometry, limits: EngineLimits) -> None:
        pass

    def execute(self, plan: BatchPlan) -> StepOutput:
        time.sleep(self._step_s)
        counts = plan.output.counts[: len(plan)]
        counts[:] = plan.rows["emits"] * TOKENS_PER_STEP
        plan.output.token_ids[: counts.sum()] = 0
        return plan.output
