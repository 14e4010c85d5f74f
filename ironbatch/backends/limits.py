"""What a device can take: the limits that a backend declares, and what they leave of the configuration's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ironbatch import limits as bounds
from ironbatch.errors import StartError
from ironbatch.limits import Bound, quoted

if TYPE_CHECKING:
    from ironbatch.backends.base import Backend
    from ironbatch.config import Config


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a backend asks a plan to stay within; the defaults ask for nothing."""

    max_sequences: int | None = None
    """Rows of a plan, and sequences that run at the same time."""

    max_tokens: int | None = None
    """New tokens of a plan."""

    max_tokens_per_step: int = 1
    """The most tokens that one sequence may emit in one step: so many positions are backed by blocks beforehand."""

    mixes_prefill_and_decode: bool = True
    """Whether one plan may hold both; otherwise the two take turns."""

    max_prefill_sequences: int | None = None
    """Prefill chunks of a plan."""

    sequence_buckets: Sequence[int] = ()
    """The numbers of rows that the device was compiled for, ascending; a plan is padded to the next one."""

    token_buckets: Sequence[int] = ()
    """Likewise its numbers of new tokens."""

    max_batch_context: int | None = None
    """Padded rows x longest context of the plan."""


NO_LIMITS = BatchLimits()


class EffectiveLimits(NamedTuple):
    """What plans stay within: the configuration's limits, and the device's where they are tighter."""

    running_limit: int  # rows of a plan, and running sequences
    batch_tokens: int  # new tokens of a plan
    tokens_per_step: int  # the most that one sequence may emit in one step
    reserves: bool  # blocks for all of a sequence are taken at its admission
    mixes: bool  # a plan may hold decodes and prefill chunks
    prefill_row_limit: int  # prefill chunks of a plan; 0: no limit
    context_cap: int  # padded rows x longest context; 0: no limit
    sequence_buckets: tuple[int, ...]
    longest_request_tokens: int  # prompt and output of one sequence
    running_is_device: bool  # the device's limit is the tighter one
    batch_tokens_is_device: bool
    shares_kv: bool  # several sequences may read one block
    prefix_cache: bool


def padded(value: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds `value`, which the largest one does; without any, `value`."""
    return next(bucket for bucket in buckets if bucket >= value) if buckets else value


def effective_limits(config: Config, backend: Backend) -> EffectiveLimits:
    """What plans for `backend` stay within.

    Raises:
        StartError: the backend declares what no device can mean, or what no request could meet.
    """
    check_declarations(backend, config.backend)
    device = check_limits(backend.batch_limits, config.backend)
    batch_tokens = _smallest(config.max_batch_tokens, device.max_tokens, *device.token_buckets[-1:])
    device_running = _smallest(batch_tokens, device.max_sequences, *device.sequence_buckets[-1:])
    running = min(config.running_limit, device_running)
    return EffectiveLimits(
        running_limit=running,
        batch_tokens=batch_tokens,
        tokens_per_step=device.max_tokens_per_step,
        reserves=bool(backend.reserves_output),
        mixes=device.mixes_prefill_and_decode,
        prefill_row_limit=device.max_prefill_sequences or 0,
        context_cap=device.max_batch_context or 0,
        sequence_buckets=tuple(device.sequence_buckets),
        longest_request_tokens=_smallest(config.max_request_tokens, longest_context(device)),
        running_is_device=running < config.running_limit,
        batch_tokens_is_device=batch_tokens < config.max_batch_tokens,
        shares_kv=bool(backend.paged_kv),
        prefix_cache=bool(backend.paged_kv) and not config.no_prefix_cache,
    )


def narrowing(config: Config, limits: EffectiveLimits) -> str:
    """What the device takes off the configuration's limits, for the log; empty if nothing."""
    narrowed = [
        f"{value} {what}"
        for value, configured, what in (
            (limits.running_limit, config.running_limit, "running sequences"),
            (limits.batch_tokens, config.max_batch_tokens, "tokens a step"),
            (limits.longest_request_tokens, config.max_request_tokens, "tokens a request"),
        )
        if value < configured
    ]
    if not limits.mixes:
        narrowed.append("prefill and decode in turns")
    if not limits.shares_kv:
        narrowed.append("no prefix cache and no forks")
    return ", ".join(narrowed)


def longest_context(device: BatchLimits) -> int | None:
    """The longest context of a sequence that runs alone, or None if the device does not limit it."""
    if device.max_batch_context is None:
        return None
    return device.max_batch_context // padded(1, device.sequence_buckets)


def _smallest(configured: int, *declared: int | None) -> int:
    return min([configured, *(limit for limit in declared if limit is not None)])


# ------------------------------------------------------------------------------------------------------------- checks

_COUNTS = {
    "max_sequences": bounds.DEVICE_COUNT,
    "max_tokens": bounds.DEVICE_COUNT,
    "max_tokens_per_step": bounds.MAX_TOKENS_PER_STEP,
    "max_prefill_sequences": bounds.DEVICE_COUNT,
    "max_batch_context": bounds.DEVICE_CONTEXT,
}
_BUCKETS = ("sequence_buckets", "token_buckets")
_MAY_BE_NONE = frozenset({name for name in _COUNTS if name != "max_tokens_per_step"})
assert {*_COUNTS, *_BUCKETS, "mixes_prefill_and_decode"} == {field.name for field in fields(BatchLimits)}


def check_limits(declared: BatchLimits, backend_name: str) -> BatchLimits:
    """What a backend has declared, its integers plain and its buckets tuples.

    Raises:
        StartError: one line with the name, the value, why it is impossible, and the remedy.
    """
    try:
        return _plain(declared)
    except (TypeError, ValueError) as problem:
        raise StartError(f"backend {backend_name}: batch_limits{problem}") from None


def check_declarations(backend: Backend, backend_name: str) -> None:
    """What a backend declares of itself beside its limits, which the engine takes as it is.

    Raises:
        StartError: one line with the name, the value and the remedy.
    """
    try:
        for name in ("resumable", "paged_kv", "reserves_output"):
            _truth(name, getattr(backend, name))
        _whole("eos_token_id", backend.eos_token_id, bounds.EOS_TOKEN_ID, otherwise=", -1 for none")
        _whole("longest_step_ns", backend.longest_step_ns, bounds.LONGEST_STEP_NS)
    except (TypeError, ValueError) as problem:
        raise StartError(f"backend {backend_name}: {problem}") from None


def _plain(declared: object) -> BatchLimits:
    if not isinstance(declared, BatchLimits):
        raise TypeError(f" is of type {type(declared).__name__}; use an ironbatch.backends.base.BatchLimits")
    mixes = _truth(".mixes_prefill_and_decode", declared.mixes_prefill_and_decode)
    counts = {name: _count(name, getattr(declared, name), bound) for name, bound in _COUNTS.items()}
    buckets = {name: _ascending(name, getattr(declared, name)) for name in _BUCKETS}
    plain = replace(declared, mixes_prefill_and_decode=mixes, **counts, **buckets)  # type: ignore[arg-type]
    longest, least = longest_context(plain), bounds.MIN_REQUEST_TOKENS
    if longest is not None and longest < least:
        rows = padded(1, plain.sequence_buckets)
        raise ValueError(
            f".max_batch_context: {plain.max_batch_context} leaves a lone sequence, padded to {rows} rows, a context of"
            f" {longest}, and the shortest request has {least} tokens; use {rows * least} or more, or a smaller first"
            " of sequence_buckets"
        )
    return plain


def _truth(where: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{where}: {_shown(value)} is neither True nor False; use one of these")
    return bool(value)


def _count(name: str, value: object, bound: Bound) -> int | None:
    if name not in _MAY_BE_NONE:
        return _whole(f".{name}", value, bound)
    return None if value is None else _whole(f".{name}", value, bound, otherwise=", or None for no limit")


def _ascending(name: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes) or np.ndim(values) != 1:
        raise TypeError(f".{name}: {_shown(values)} is no sequence of whole numbers; use one such as (1, 8, 64)")
    if len(values) > bounds.DEVICE_BUCKETS_MAX:
        raise ValueError(f".{name}: {len(values)} buckets are too many; use at most {bounds.DEVICE_BUCKETS_MAX}")
    plain = tuple(_whole(f".{name}[{k}]", value, bounds.DEVICE_COUNT) for k, value in enumerate(values))
    for k, (before, after) in enumerate(itertools.pairwise(plain), 1):
        if after <= before:
            raise ValueError(f".{name}[{k}]: {after} follows {before}; put them in ascending order, each of them once")
    return plain


def _whole(where: str, value: object, bound: Bound, otherwise: str = "") -> int:
    """A whole number, numpy's included; True and 1.0 are none."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{where}: {_shown(value)} is not a whole number; give one {bound}{otherwise}")
    number = int(value)
    if number not in bound:
        remedy = f"{bound.low} or more" if number < bound.low else f"{bound.high} or less"
        raise ValueError(f"{where}: {number} is not {bound}; use {remedy}{otherwise}")
    return number


def _shown(value: object) -> str:
    """A value on one line, and not too long."""
    try:
        text = repr(value)
    except Exception:  # it is a plug-in's, and only to be shown
        return f"a {type(value).__name__}"
    return quoted(value) if isinstance(value, str) else quoted(" ".join(text.split()))[1:-1]
