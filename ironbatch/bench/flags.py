"""The flags of `ironbatch bench`: name, default, bounds and help, each said once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ironbatch import limits
from ironbatch.bench.lengths import FORMS, read_distribution
from ironbatch.bench.readers import (
    PLOT_SUFFIXES,
    FloatBound,
    ramp_reader,
    read_path,
    read_percentiles,
    read_plot_path,
    read_url,
)
from ironbatch.limits import Bound

CONCURRENCY: Final = Bound(1, 16_384)  # one connection each, all from one address to one port
TOTAL_REQUESTS: Final = Bound(1, 100_000_000)
PROMPT_TOKENS: Final = Bound(1, limits.MAX_MODEL_LEN.high)
MAX_NEW_TOKENS: Final = Bound(0, limits.MAX_MODEL_LEN.high)
TIMEOUT_S: Final = FloatBound(0.001, 3600, "seconds")
RATE: Final = FloatBound(0.001, 100_000, "requests a second")
BURSTINESS: Final = FloatBound(0.01, 1000)
DURATION_S: Final = FloatBound(0.1, 604_800, "seconds")
WARM_UP_S: Final = FloatBound(0, 86_400, "seconds")
TIME_SCALE: Final = FloatBound(0.001, 1000)
LATENCY_MS: Final = FloatBound(0.001, 3_600_000, "milliseconds")
RAMP_SHARE: Final = FloatBound(0.5, 1)

DEFAULT_CONCURRENCY: Final = 128
DEFAULT_TOTAL_REQUESTS: Final = 2000


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: how `--help` shows it, and a reader that raises ValueError with the value and its bound."""

    name: str
    default: str | None
    metavar: str
    help: str
    read: Callable[[str], object]
    spelling: str | None = None

    @property
    def text(self) -> str:
        """Such as `--total-requests`."""
        return self.spelling or "--" + self.name.replace("_", "-")


OPTIONAL_DEFAULTS: Final[dict[str, object]] = {
    "burstiness": 1.0,
    "time_scale": 1.0,
    "ramp_share": 0.99,
    "prompt_tokens": read_distribution("128", PROMPT_TOKENS),
    "max_new_tokens": read_distribution("64", MAX_NEW_TOKENS),
}
"""Of flags whose being given matters: they need, or exclude, others."""


def _range(bound: Bound | FloatBound) -> str:
    return f"{bound.low:.10g}..{bound.high:.10g}"


_LENGTHS: Final = f"a number, {_range(PROMPT_TOKENS)}, or drawn from {', '.join(FORMS)}"

FLAGS: Final = (
    Flag("url", "http://127.0.0.1:8080", "URL", "the server; requests go to URL/generate", read_url),
    Flag(
        "concurrency",
        None,
        "COUNT",
        f"requests in flight at a time; {_range(CONCURRENCY)}; 128 in the closed loop; in the open loop a cap, over"
        f" which an arrival fails, and {CONCURRENCY.high} or what the limit of open files allows",
        CONCURRENCY.read,
    ),
    Flag(
        "total_requests",
        None,
        "COUNT",
        f"requests to send after the warm-up; {_range(TOTAL_REQUESTS)}; {DEFAULT_TOTAL_REQUESTS} in a closed loop"
        " without --duration",
        TOTAL_REQUESTS.read,
    ),
    Flag(
        "duration_s",
        None,
        "SECONDS",
        f"send for so long after the warm-up, then wait for the answers; {_range(DURATION_S)}",
        DURATION_S.read,
        spelling="--duration",
    ),
    Flag(
        "warm_up_s",
        "0",
        "SECONDS",
        f"requests of the first seconds are sent but not measured; {_range(WARM_UP_S)}",
        WARM_UP_S.read,
        spelling="--warm-up",
    ),
    Flag(
        "rate",
        None,
        "RATE",
        f"open loop: so many requests a second on average, whatever becomes of them; {_range(RATE)}",
        RATE.read,
    ),
    Flag(
        "burstiness",
        None,
        "SHAPE",
        f"shape of the gamma distribution of gaps between arrivals; 1 is a Poisson process, less comes in bursts, more"
        f" is even; {_range(BURSTINESS)}; 1 without it",
        BURSTINESS.read,
    ),
    Flag("seed", "0", "SEED", f"of arrivals and lengths; {limits.SEED.low}..{limits.SEED.high}", limits.SEED.read),
    Flag(
        "prompt_tokens",
        None,
        "TOKENS",
        f"length of each prompt: {_LENGTHS}; 128 without it",
        lambda text: read_distribution(text, PROMPT_TOKENS),
    ),
    Flag(
        "max_new_tokens",
        None,
        "TOKENS",
        f"tokens to ask for in each request: as --prompt-tokens, {_range(MAX_NEW_TOKENS)}; 64 without it",
        lambda text: read_distribution(text, MAX_NEW_TOKENS),
    ),
    Flag(
        "trace",
        None,
        "FILE",
        "open loop: arrivals and lengths from this file (CSV or JSON lines: own, Azure, BurstGPT, Mooncake,"
        " Qwen-Bailian); with --rate or --ramp its lengths only",
        read_path,
    ),
    Flag(
        "time_scale",
        None,
        "FACTOR",
        f"replay --trace so many times as fast; {_range(TIME_SCALE)}; 1 without it",
        TIME_SCALE.read,
    ),
    Flag(
        "timeout_s",
        "60",
        "SECONDS",
        f"a request without progress for so long has failed; {_range(TIMEOUT_S)}",
        TIMEOUT_S.read,
    ),
    Flag("percentiles", "50,90,99", "LIST", "percentiles of the report, with commas between", read_percentiles),
    Flag(
        "ttft_bound_ms",
        None,
        "MS",
        f"goodput counts requests with at most this time to first token; {_range(LATENCY_MS)}",
        LATENCY_MS.read,
    ),
    Flag(
        "itl_bound_ms",
        None,
        "MS",
        f"goodput counts requests with at most this mean inter-token latency; {_range(LATENCY_MS)}",
        LATENCY_MS.read,
    ),
    Flag(
        "ramp",
        None,
        "LOW:HIGH",
        "open loop: find the highest rate within the bounds, each try taking --warm-up and --duration",
        ramp_reader(RATE),
    ),
    Flag(
        "ramp_share",
        None,
        "SHARE",
        f"a rate is within the bounds if this share of its requests is good; {_range(RAMP_SHARE)}; 0.99 without it",
        RAMP_SHARE.read,
    ),
    Flag("plot", None, "FILE", f"also draw the run to this file; {', '.join(PLOT_SUFFIXES)}", read_plot_path),
    Flag("json", None, "FILE", "also write the figures to this file, as JSON", read_path),
)
