"""What it costs Python to call compiled code: `python perf/kernel_call.py`.

The kernel does nothing. `entry_point` is how the scheduler calls its kernels, `dispatcher` how numba would have them
called, and `builtin` a call of a C function with as many arguments.
"""

from __future__ import annotations

import math

import numpy as np
from yardsticks import runner

from ironbatch.kernels.jit import callable_in_kernels, kernel


@kernel("int64(intp, intp, int64)")
def nothing(state_address, segment_address, now_ns):
    """As `plan`, which takes most of the arguments that any kernel of the step takes."""
    return 0


@kernel("int64(int64[::1], int64[::1], int32[::1], int64)")
def nothing_with_arrays(first, second, third, count):
    """As the kernels that get a caller's arrays."""
    return 0


def main() -> None:
    """Run all cases."""
    made = runner(__doc__)
    words, int32s = np.zeros(8, np.int64), np.zeros(8, np.int32)
    made.bench_func("entry_point", nothing, 1 << 40, 1 << 41, 1 << 42)
    made.bench_func("dispatcher", callable_in_kernels(nothing), 1 << 40, 1 << 41, 1 << 42)
    made.bench_func("three_arrays", nothing_with_arrays, words, words, int32s, 8)
    made.bench_func("builtin", math.gcd, 1 << 40, 1 << 41, 1 << 42)


if __name__ == "__main__":
    main()
