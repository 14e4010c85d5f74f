"""The parameters of a bench run, valid, from its flags."""

import argparse
from dataclasses import dataclass
from typing import Any

from ironbatch.bench.bounds import LatencyBounds
from ironbatch.bench.flags import CONCURRENCY, DEFAULT_CONCURRENCY, DEFAULT_TOTAL_REQUESTS, FLAGS, OPTIONAL_DEFAULTS
from ironbatch.bench.lengths import Distribution
from ironbatch.bench.option_rules import problems_between
from ironbatch.bench.readers import RampRange
from ironbatch.errors import ConfigError

__all__ = ["FLAGS", "BenchOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The parameters of a run, valid. `url` has no trailing slash; `trace`, `plot` and `json` are paths or None.

    In the open loop `concurrency` is the most requests in flight, beyond which an arrival fails;
    `has_concurrency_flag` says that the user has chosen it. `duration_s` and `total_requests` end the run, whichever
    comes first; None is no such end.
    """

    url: str
    concurrency: int
    has_concurrency_flag: bool
    total_requests: int | None
    duration_s: float | None
    warm_up_s: float
    rate: float | None
    burstiness: float
    seed: int
    prompt_tokens: Distribution
    max_new_tokens: Distribution
    trace: str | None
    time_scale: float
    timeout_s: float
    percentiles: tuple[float, ...]
    ttft_bound_ms: float | None
    itl_bound_ms: float | None
    ramp: RampRange | None
    ramp_share: float
    plot: str | None
    json: str | None

    @property
    def is_open_loop(self) -> bool:
        """Whether requests arrive at times of their own, and not when those before are answered."""
        return self.rate is not None or self.trace is not None or self.ramp is not None

    @property
    def replays_trace(self) -> bool:
        """Whether the trace's own arrival times are used, and not its lengths only."""
        return self.trace is not None and self.rate is None and self.ramp is None

    @property
    def bounds(self) -> LatencyBounds:
        """What makes a request good."""
        return LatencyBounds(self.ttft_bound_ms, self.itl_bound_ms)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "BenchOptions":
        """Read what `add_arguments` had parsed. Raises ConfigError with all problems, by flag."""
        values: dict[str, Any] = {}
        problems = []
        for flag in FLAGS:
            text = getattr(arguments, flag.name)
            try:
                values[flag.name] = None if text is None else flag.read(str(text))
            except ValueError as error:
                problems.append(f"{flag.text}: {error}")
        if not problems:
            problems = problems_between(values)
        if problems:
            raise ConfigError(problems)
        return cls(**values | _settled(values))


def _settled(values: dict[str, Any]) -> dict[str, Any]:
    """The defaults that depend on other flags."""
    is_open = any(values[name] is not None for name in ("rate", "trace", "ramp"))
    concurrency, total_requests = values["concurrency"], values["total_requests"]
    if concurrency is None:
        concurrency = CONCURRENCY.high if is_open else DEFAULT_CONCURRENCY
    if total_requests is None and values["duration_s"] is None and not is_open:
        total_requests = DEFAULT_TOTAL_REQUESTS
    return {
        "concurrency": concurrency,
        "has_concurrency_flag": values["concurrency"] is not None,
        "total_requests": total_requests,
        **{name: default for name, default in OPTIONAL_DEFAULTS.items() if values[name] is None},
    }
