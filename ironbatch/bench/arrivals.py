"""When requests arrive in the open loop, whatever becomes of those before."""

import random
from collections.abc import Iterator
from typing import Final

POISSON: Final = 1.0
"""The burstiness of a Poisson process."""


def arrivals_ns(rate: float, burstiness: float, generator: random.Random) -> Iterator[int]:
    """Yield arrival times, in nanoseconds from the start, at `rate` a second on average, without an end.

    Gaps are drawn from a gamma distribution of shape `burstiness` and mean 1 / rate: their coefficient of
    variation is 1 / sqrt(burstiness). Shape 1 is the exponential distribution, so arrivals are a Poisson process;
    a smaller shape gives bursts, a larger one is more even. (vLLM's `--burstiness` means the same.)
    """
    at_s = 0.0
    while True:
        at_s += generator.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield round(at_s * 1e9)
