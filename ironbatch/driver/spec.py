"""What a reference device is like: its size, its shape limits, its pace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ironbatch.driver import abi
from ironbatch.errors import ConfigError
from ironbatch.limits import DEVICE_CONTEXT, DEVICE_COUNT, GIB, MIB, TOTAL_KV_BLOCKS, Bound

PAGE_BYTES: Final = 4096
"""Of a status page, which has no neighbour in its page of memory; rings and the KV arena begin at multiples of it."""

POSITION_BYTES: Final = 4
"""A position's KV is its token id, an int32."""

FENCES_KEPT: Final = 64
"""Of so many failed batches of a context, the newest, the device still knows how they failed."""

BLOCK_BYTES: Final = Bound(POSITION_BYTES, MIB)
RING_BYTES: Final = Bound(PAGE_BYTES, GIB)
CONTEXTS: Final = Bound(1, 1024)
LATENCY_US: Final = Bound(0, 60_000_000)
LONGEST_STEP_US: Final = Bound(1, 600_000_000)
IN_FLIGHT: Final = Bound(1, FENCES_KEPT)
MAX_MAP_BYTES: Final = 64 * GIB
BUCKETS_MAX: Final = 12  # as many as GET_LIMITS has room for
ABI_NUMBER: Final = Bound(0, 2**16 - 1)

_NO_LIMIT: Final = 0
_BOUNDS: Final = {
    "blocks": TOTAL_KV_BLOCKS,
    "block_bytes": BLOCK_BYTES,
    "ring_bytes": RING_BYTES,
    "contexts": CONTEXTS,
    "step_latency_us": LATENCY_US,
    "longest_step_us": LONGEST_STEP_US,
    "max_seqs": Bound(_NO_LIMIT, DEVICE_COUNT.high),
    "max_tokens": Bound(_NO_LIMIT, DEVICE_COUNT.high),
    "max_prefill_seqs": Bound(_NO_LIMIT, DEVICE_COUNT.high),
    "max_in_flight": IN_FLIGHT,
    "max_batch_context": Bound(_NO_LIMIT, DEVICE_CONTEXT.high),
}
_MULTIPLES: Final = {"block_bytes": POSITION_BYTES, "ring_bytes": PAGE_BYTES}


@dataclass(frozen=True)
class DeviceSpec:
    """A reference device as its owner wants it. A limit of 0 limits nothing.

    Raises:
        ConfigError: one line for each flag with its value, its bounds and the remedy.
    """

    blocks: int = 4096
    block_bytes: int = 64
    ring_bytes: int = MIB
    """Of each context's ring."""

    contexts: int = 8
    """How many may have the device open at the same time."""

    step_latency_us: int = 200
    """What each batch takes; one runs at a time."""

    longest_step_us: int = 500_000
    """Within so long after its submission a fence is signalled, or else is taken for lost."""

    caps: int = abi.CAP_MMAP | abi.CAP_COPY | abi.CAP_ZERO | abi.CAP_RESET
    max_seqs: int = _NO_LIMIT
    max_tokens: int = _NO_LIMIT
    max_prefill_seqs: int = _NO_LIMIT
    max_in_flight: int = 4
    max_batch_context: int = _NO_LIMIT
    """Padded rows x longest context."""

    mixes: bool = True
    """Whether a batch may hold decodes and prefill chunks."""

    seq_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    abi: tuple[int, int] = (abi.ABI_MAJOR, abi.ABI_MINOR)
    """What GET_INFO says; another one than the true is of use to tests only."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)

    @property
    def block_tokens(self) -> int:
        """Positions of a block."""
        return self.block_bytes // POSITION_BYTES

    @cached_property
    def kv_off(self) -> int:
        """Where the KV arena begins: after all status pages and all rings."""
        return self.contexts * (PAGE_BYTES + self.ring_bytes)

    @property
    def kv_bytes(self) -> int:
        """Size of the KV arena."""
        return self.blocks * self.block_bytes

    @property
    def map_bytes(self) -> int:
        """Size of the memory, whole pages."""
        return -(-(self.kv_off + self.kv_bytes) // PAGE_BYTES) * PAGE_BYTES

    @cached_property
    def row_limit(self) -> int:
        """The most STEP records of a batch: max_seqs, or the largest bucket; 0: no limit."""
        return _smaller(self.max_seqs, self.seq_buckets)

    @cached_property
    def token_limit(self) -> int:
        """The most new tokens of a batch: max_tokens, or the largest bucket; 0: no limit."""
        return _smaller(self.max_tokens, self.token_buckets)

    def padded_rows(self, rows: int) -> int:
        """The bucket that so many STEP records are padded to; without buckets, `rows`."""
        return next((bucket for bucket in self.seq_buckets if bucket >= rows), rows)

    def status_off(self, context: int) -> int:
        """Where a context's status page begins."""
        return context * PAGE_BYTES

    def ring_off(self, context: int) -> int:
        """Where a context's ring begins."""
        return self.contexts * PAGE_BYTES + context * self.ring_bytes

    @property
    def caution(self) -> str:
        """What an operator should know of a spec that is valid; mostly nothing."""
        waits_us = self.contexts * self.max_in_flight * self.step_latency_us
        if waits_us <= self.longest_step_us:
            return ""
        return (
            f"--longest-step-us {self.longest_step_us}: with {self.contexts} contexts that have {self.max_in_flight}"
            f" batches in flight each, a fence may take {waits_us} us, and clients take it for lost before that; use"
            f" {waits_us}, or lower --contexts or --max-in-flight"
        )

    def _problems(self) -> Iterator[str]:
        for name, bound in _BOUNDS.items():
            value = getattr(self, name)
            if value not in bound:
                remedy = f"{bound.low} or more" if value < bound.low else f"{bound.high} or less"
                yield f"{_flag(name)}: {value} is not {bound}; use {remedy}"
            elif value % _MULTIPLES.get(name, 1) != 0:
                step = _MULTIPLES[name]
                yield f"{_flag(name)}: {value} is not a multiple of {step}; use {-(-value // step) * step}"
        yield from self._cross_problems()

    def _cross_problems(self) -> Iterator[str]:
        if self.step_latency_us > self.longest_step_us >= LONGEST_STEP_US.low:
            yield (
                f"--longest-step-us: {self.longest_step_us} is less than --step-latency-us {self.step_latency_us}, so"
                f" every fence would be late; use {self.step_latency_us} or more"
            )
        if self.caps & ~sum(abi.CAPS.values()):
            yield f"--caps: {self.caps:#x} has unknown bits; use some of {', '.join(abi.CAPS)}"
        if self.map_bytes > MAX_MAP_BYTES:
            yield (
                f"--blocks x --block-bytes and --contexts x --ring-bytes: {self.map_bytes // MIB} MiB are more than"
                f" {MAX_MAP_BYTES // MIB}; use fewer or smaller ones"
            )
        yield from _bucket_problems("seq_buckets", self.seq_buckets)
        yield from _bucket_problems("token_buckets", self.token_buckets)
        if any(number not in ABI_NUMBER for number in self.abi):
            yield f"--abi: {self.abi} are not two numbers {ABI_NUMBER}; use {abi.ABI_MAJOR}.{abi.ABI_MINOR}"


def _bucket_problems(name: str, buckets: tuple[int, ...]) -> Iterator[str]:
    if len(buckets) > BUCKETS_MAX:
        yield f"{_flag(name)}: {len(buckets)} buckets are too many; use at most {BUCKETS_MAX}"
    for bucket in buckets:
        if bucket not in DEVICE_COUNT:
            yield f"{_flag(name)}: {bucket} is not {DEVICE_COUNT}; leave it out"
    for before, after in itertools.pairwise(buckets):
        if after <= before:
            yield f"{_flag(name)}: {after} follows {before}; put them in ascending order, each of them once"


def _smaller(limit: int, buckets: tuple[int, ...]) -> int:
    return min((value for value in (limit, *buckets[-1:]) if value != _NO_LIMIT), default=_NO_LIMIT)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
