"""The mock: tokens from (seed, position), and a step that takes as long as a latency model says.

step time = base + prefill term x prompt tokens + sequence term x sequences + KV term x context tokens read. So batching
gains what it gains on hardware, and a scheduling policy can be studied without any.
"""

from __future__ import annotations

import ctypes
import time

from ironbatch.backends.base import Backend, BatchPlan, EngineLimits, KVGeometry, StepOutput
from ironbatch.config import Config
from ironbatch.kernels.emission import EOS_SCALE, mock_execute

PR_SET_TIMERSLACK = 29  # prctl(2)
SPIN_NS = 30_000
"""The end of a wait is spun, since a sleep's wake-up is late by about so much."""

NO_EOS = -1
EOS_TOKEN_ID = 0


class MockBackend(Backend):
    """Deterministic and resumable; see the module."""

    resumable = True

    def __init__(self, config: Config) -> None:
        self._base_ns = config.mock_token_latency_us * 1_000
        self._prefill_token_ns = config.mock_prefill_token_latency_ns
        self._sequence_ns = config.mock_sequence_latency_ns
        self._kv_token_ns = config.mock_kv_token_latency_ns
        self._eos_threshold = round(config.mock_eos_prob * EOS_SCALE)
        self.eos_token_id = EOS_TOKEN_ID if self._eos_threshold else NO_EOS
        self.longest_step_ns = config.mock_longest_step_ns

    def start(self, kv: KVGeometry, limits: EngineLimits) -> None:
        # The default slack lets the kernel wake a sleeper 50 us late.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def execute(self, plan: BatchPlan) -> StepOutput:
        deadline_ns = time.monotonic_ns()
        deadline_ns += mock_execute(
            plan.state_address,
            self._eos_threshold,
            self._base_ns,
            self._prefill_token_ns,
            self._sequence_ns,
            self._kv_token_ns,
        )
        sleep_until(deadline_ns)
        return plan.output


def sleep_until(deadline_ns: int) -> None:
    """Return at `deadline_ns` of the monotonic clock, about 1 us late."""
    remaining_ns = deadline_ns - time.monotonic_ns() - SPIN_NS
    if remaining_ns > 0:
        time.sleep(remaining_ns / 1e9)  # clock_nanosleep with an absolute deadline, since Python 3.11
    while time.monotonic_ns() < deadline_ns:
        pass
