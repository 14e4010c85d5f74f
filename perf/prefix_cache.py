"""Finding a prompt in the prefix cache: `python perf/prefix_cache.py`.

`match_prefix` for prompts of 4080 tokens, all of whose blocks of 16 are there. `hot`: the same one again and again.
`cold`: each of 64 in turn, whose blocks, records and tokens have left the core's own caches. Beside it a Python dict,
whose keys are the parent's number and the bytes of the block's tokens: all that makes a hit certain, as here.
Figures are for one block.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from engine import MODEL_LEN, StepEngine, release_all
from yardsticks import runner

from ironbatch.kernels.intake import drain
from ironbatch.kernels.jit import kernel
from ironbatch.kernels.prefix import match_prefix
from ironbatch.kernels.shared import open_shared
from ironbatch.kernels.state import open_state

BLOCK_SIZE = 16
PROMPT = MODEL_LEN - BLOCK_SIZE
BLOCKS = PROMPT // BLOCK_SIZE - 1  # of which the last block is computed again, for the token after it
COLD = 64


@kernel("int64(intp, intp, int64, int64)")
def match_many(state_address, segment_address, count, times):
    """Match sequences 0 <= s < `count`, `times` times over. Returns how many blocks were found in all."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    found = 0
    for _ in range(times):
        for sequence in range(count):
            found += match_prefix(state, shared, sequence)
    return found


class CachedPrompts:
    """An engine that has `count` prompts in its cache, and the same ones waiting, drained and not yet admitted."""

    def __init__(self, count: int) -> None:
        self._engine = StepEngine(count, prompt=PROMPT)
        self.addresses = (self._engine.scheduler.arena.address, self._engine.address)
        self._submit(count)
        while self._engine.scheduler.step() > 0:
            pass
        release_all(self._engine.address)
        self._submit(count)
        drain(*self.addresses, time.monotonic_ns())

    def _submit(self, count: int) -> None:
        for k in range(count):
            self._engine.submit_group(k * PROMPT, 1)

    def close(self) -> None:
        """Remove the segment."""
        self._engine.close()


def time_lookup(loops: int, count: int) -> float:
    """Seconds of `loops` looks at `count` prompts."""
    prompts = CachedPrompts(count)
    found = match_many(*prompts.addresses, count, 1)
    assert found == count * BLOCKS, found
    start_s = time.perf_counter()
    match_many(*prompts.addresses, count, loops)
    elapsed_s = time.perf_counter() - start_s
    prompts.close()
    return elapsed_s


class BareDict:
    """The same with Python's dict."""

    def __init__(self) -> None:
        self._tokens = np.arange(PROMPT, dtype=np.int32).tobytes()
        self._blocks: dict[tuple[int, bytes], int] = {}
        for block, part in enumerate(self._parts()):
            self._blocks[block - 1, part] = block

    def _parts(self) -> list[bytes]:
        size = BLOCK_SIZE * 4
        return [self._tokens[start : start + size] for start in range(0, BLOCKS * size, size)]

    def time(self, loops: int) -> float:
        """Seconds of `loops` looks."""
        start_s = time.perf_counter()
        for _ in range(loops):
            parent = -1
            for part in self._parts():
                parent = self._blocks[parent, part]
        return time.perf_counter() - start_s


def main() -> None:
    """Run all cases."""
    made = runner(__doc__)
    made.bench_time_func("lookup/hot", partial(time_lookup, count=1), inner_loops=BLOCKS)
    made.bench_time_func("lookup/cold", partial(time_lookup, count=COLD), inner_loops=COLD * BLOCKS)
    made.bench_time_func("lookup/bare_dict", BareDict().time, inner_loops=BLOCKS)


if __name__ == "__main__":
    main()
