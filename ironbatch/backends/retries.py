"""How often and how long a stream that fails is tried again, and what its client reads at last."""

from __future__ import annotations

import random
from typing import NamedTuple

from ironbatch.backends.base import finish_error
from ironbatch.backends.stream import StreamEnd, StreamFailed
from ironbatch.upstream.problems import UpstreamBusy, UpstreamProblem

PAUSE_FIRST_S = 0.1
PAUSE_MOST_S = 5.0


class RetryPolicy(NamedTuple):
    """How often and how long a stream is tried again."""

    retries: int  # after a failure without a piece
    wait_s: float  # for a server that is away
    continues: bool  # also after a piece


def failed(error_code: int, problem: UpstreamProblem) -> StreamFailed:
    """The end of a stream that is not tried again; its client reads what the problem says."""
    return StreamFailed(StreamEnd(finish_error(error_code), note=problem.message))


def pause_before(try_number: int, problem: UpstreamProblem) -> float:
    """Seconds before the next try: twice as long after each, at least what upstream advises, and never all at once."""
    pause_s = min(PAUSE_FIRST_S * 2.0 ** min(try_number, 16), PAUSE_MOST_S) * random.uniform(0.5, 1.0)  # noqa: S311
    advised_s = problem.retry_after_s if isinstance(problem, UpstreamBusy) else None
    return max(pause_s, advised_s * random.uniform(1.0, 1.2)) if advised_s else pause_s  # noqa: S311
