"""Which bench flags need or exclude each other. Values are None where a flag is not given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Rule:
    """`problem` is told if `is_broken`."""

    is_broken: Callable[[Values], bool]
    problem: str


def _given(values: Values, *names: str) -> bool:
    return any(values[name] is not None for name in names)


_RULES: Final = (
    _Rule(
        lambda values: _given(values, "rate") and _given(values, "ramp"),
        "--rate: --ramp chooses the rates itself; leave one of the two out",
    ),
    _Rule(
        lambda values: _given(values, "burstiness") and not _given(values, "rate", "ramp"),
        "--burstiness: there are no drawn arrivals to shape; give --rate or --ramp, or leave it out",
    ),
    _Rule(
        lambda values: _given(values, "rate") and not _given(values, "duration_s", "total_requests", "ramp"),
        "--rate: nothing would end the run; give --duration or --total-requests",
    ),
    _Rule(
        lambda values: _given(values, "trace") and _given(values, "prompt_tokens", "max_new_tokens"),
        "--trace: it holds the lengths of the requests; leave out --prompt-tokens and --max-new-tokens, or --trace",
    ),
    _Rule(
        lambda values: _given(values, "time_scale") and not _given(values, "trace"),
        "--time-scale: there is no trace to replay; give --trace, or leave it out",
    ),
    _Rule(
        lambda values: _given(values, "time_scale") and _given(values, "trace") and _given(values, "rate", "ramp"),
        "--time-scale: with --rate or --ramp the trace's own times are not used; leave one of them out",
    ),
    _Rule(
        lambda values: _given(values, "ramp") and not _given(values, "ttft_bound_ms", "itl_bound_ms"),
        "--ramp: there are no bounds to search by; give --ttft-bound-ms, --itl-bound-ms or both",
    ),
    _Rule(
        lambda values: _given(values, "ramp") and not _given(values, "duration_s"),
        "--ramp: each rate is tried for a time; give --duration, such as --duration 20",
    ),
    _Rule(
        lambda values: _given(values, "ramp") and _given(values, "total_requests"),
        "--total-requests: --ramp tries each rate for --duration; leave --total-requests out",
    ),
    _Rule(
        lambda values: _given(values, "ramp_share") and not _given(values, "ramp"),
        "--ramp-share: there is no ramp; give --ramp, or leave it out",
    ),
)


def problems_between(values: Values) -> list[str]:
    """What is wrong with the flags together, one line each; the flags are read already."""
    return [rule.problem for rule in _RULES if rule.is_broken(values)]
