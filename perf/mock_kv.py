"""The mock that reads its KV back, beside the mock that does not: `python perf/mock_kv.py`.

A step of 64 sequences of about 1000 tokens each, neither with a latency model. Beside it numpy gathering the same
blocks by the same table and adding them up, which has no hash that would notice two positions changing places.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from engine import BLOCK_SIZE, MODEL_LEN, StepEngine
from yardsticks import runner

from ironbatch.backends.mock import MockBackend
from ironbatch.backends.mock_kv import MockKVBackend
from ironbatch.config import Config

RUNNING = 64
PROMPT = 960
CONTEXT = 1024
BACKENDS = {"plain": MockBackend, "kv": MockKVBackend}


class ShortEngine(StepEngine):
    """Sequences from PROMPT to CONTEXT tokens, again and again."""

    def make_steady(self) -> None:
        """All places decode, and go on for `steps_left` steps in which none ends."""
        self.finish()
        self.submit(MODEL_LEN - PROMPT)
        self.scheduler.step()
        self.steps_left = CONTEXT - PROMPT


def time_step(loops: int, kind: str) -> float:
    """Seconds of `loops` decode steps."""
    config = Config(max_model_len=MODEL_LEN, total_kv_blocks=MODEL_LEN, mock_token_latency_us=0)
    engine = ShortEngine(RUNNING, BACKENDS[kind](config), prompt=PROMPT)
    elapsed_s = engine.time_steps(loops)
    engine.close()
    return elapsed_s


class BareGather:
    """numpy, over tables of the same sizes."""

    def __init__(self) -> None:
        blocks = MODEL_LEN // BLOCK_SIZE
        self._kv = np.zeros((RUNNING * blocks, BLOCK_SIZE), np.int32)
        self._table = np.random.default_rng(0).permutation(RUNNING * blocks).reshape(RUNNING, blocks)
        self._table = self._table[:, : CONTEXT // BLOCK_SIZE]

    def run(self) -> None:
        """Gather and add."""
        self._kv[self._table].sum(axis=(1, 2))


def main() -> None:
    """Run all cases."""
    made = runner(__doc__)
    for kind in BACKENDS:
        made.bench_time_func(f"step/{kind}", partial(time_step, kind=kind))
    made.bench_func("step/bare_numpy", BareGather().run)


if __name__ == "__main__":
    main()
