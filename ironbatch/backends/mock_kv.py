"""The mock with a KV cache in host memory: its tokens show whether the engine's block bookkeeping is right."""

from __future__ import annotations

import time

import numpy as np

from ironbatch.backends.base import BatchPlan, EngineLimits, KVGeometry, StepOutput
from ironbatch.backends.mock import MockBackend, sleep_until
from ironbatch.config import Config
from ironbatch.kernels.mock_kv import POISON, mock_kv_execute

HOST_TOKEN_NS = 10
"""The longest that reading or poisoning one position may take."""

IS_POISONED = 1


class MockKVBackend(MockBackend):
    """As the mock, but each token comes from the whole context, read back through the block table.

    It is as long a function of the request alone as no block is lost, mixed up or handed on too early.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # The model's time is a wait; what the reads take comes before it, and may be more.
        positions = config.running_limit * config.max_request_tokens + config.kv_capacity_tokens
        self.longest_step_ns += positions * HOST_TOKEN_NS

    def start(self, kv: KVGeometry, limits: EngineLimits) -> None:
        super().start(kv, limits)
        positions = kv.num_blocks * kv.block_size
        self._kv = np.empty(positions + kv.num_blocks, np.int32)  # ids, then a flag a block
        self._kv[:positions] = POISON
        self._kv[positions:] = IS_POISONED
        self._kv_address = self._kv.ctypes.data

    def execute(self, plan: BatchPlan) -> StepOutput:
        deadline_ns = time.monotonic_ns()
        plan.fill_tokens()
        deadline_ns += mock_kv_execute(
            plan.state_address,
            self._kv_address,
            self._eos_threshold,
            self._base_ns,
            self._prefill_token_ns,
            self._sequence_ns,
            self._kv_token_ns,
        )
        sleep_until(deadline_ns)
        return plan.output

    def close(self) -> None:
        del self._kv, self._kv_address
