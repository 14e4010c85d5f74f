"""The audit of the scheduler's state, beside the steps that it is spread over: `python perf/audit.py`.

`default`: the default options with all places taken. The others: 256 and 4096 running sequences of up to 4096 tokens,
with blocks for all of them. One request in five has the same prompt.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from engine import StepEngine
from yardsticks import runner

from ironbatch.kernels.audit import audit
from ironbatch.kernels.violations import SOUND

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (256, {"total_kv_blocks": 4096, "max_queued_requests": 512}),
    "65536_blocks": (256, {}),
    "1048576_blocks": (4096, {}),
}
DEFAULT_STEPS = 128  # what the default pool has room for


class AuditedEngine(StepEngine):
    """Decodes, without audits in between; few steps, so that it fits the default pool."""

    def __init__(self, case: str) -> None:
        running, options = CASES[case]
        super().__init__(running, audit_every=0, **options)
        self._scratch = np.zeros(self.scheduler.arena.geometry.num_blocks, np.int32)

    def make_steady(self) -> None:
        """All places decode, and go on for `steps_left` steps in which none ends."""
        self.finish()
        for k in range(self.running):
            self.submit_group(k * self.prompt if k % 5 else 0, 2 * DEFAULT_STEPS)
        self.scheduler.step()
        self.steps_left = DEFAULT_STEPS

    def audit(self) -> None:
        """Once."""
        violation = audit(self.scheduler.arena.address, self.address, self._scratch)
        assert violation == SOUND, violation


def time_audit(loops: int, case: str) -> float:
    """Seconds of `loops` audits in the middle of decoding."""
    engine = AuditedEngine(case)
    engine.make_steady()
    for _ in range(DEFAULT_STEPS // 2):
        engine.scheduler.step()
    start_s = time.perf_counter()
    for _ in range(loops):
        engine.audit()
    elapsed_s = time.perf_counter() - start_s
    engine.close()
    return elapsed_s


def time_step(loops: int, case: str) -> float:
    """Seconds of `loops` steps of the same engine."""
    engine = AuditedEngine(case)
    elapsed_s = engine.time_steps(loops)
    engine.close()
    return elapsed_s


def main() -> None:
    """Run all cases."""
    made = runner(__doc__)
    for case in CASES:
        made.bench_time_func(f"audit/{case}", partial(time_audit, case=case))
        made.bench_time_func(f"step/{case}", partial(time_step, case=case))


if __name__ == "__main__":
    main()
