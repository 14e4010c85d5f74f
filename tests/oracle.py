"""Slow, obvious versions of what the kernels do. Lists, dicts and Python's integers; nothing here is clever.

The policy, docs/scheduling.md, is in scheduler_oracle.py.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

# ------------------------------------------------------------------------------------------------------------- blocks


class OutOfBlocks(Exception):
    """Nothing was changed."""


class TargetInUse(Exception):
    """Nothing was changed."""


@dataclass
class BlockPool:
    """Who holds how many blocks, and which of them are shared. Ids come from the allocator under test."""

    num_blocks: int
    block_size: int
    tables: dict[int, list[int]] = field(default_factory=dict)

    @property
    def refcounts(self) -> Counter[int]:
        return Counter(block for table in self.tables.values() for block in table)

    @property
    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - set(self.refcounts)

    def missing(self, sequence: int, tokens: int) -> int:
        """How many new blocks `tokens` positions need. Raises OutOfBlocks."""
        missing = max(math.ceil(tokens / self.block_size) - len(self.tables.get(sequence, [])), 0)
        if missing > len(self.free):
            raise OutOfBlocks
        return missing

    def grow(self, sequence: int, new_blocks: list[int]) -> None:
        assert set(new_blocks) <= self.free, "a block that somebody holds was handed out"
        assert len(set(new_blocks)) == len(new_blocks)
        self.tables.setdefault(sequence, []).extend(new_blocks)

    def release(self, sequence: int) -> int:
        before = len(self.free)
        self.tables.pop(sequence, None)
        return len(self.free) - before

    def shared_by_fork(self, parent: int, child: int, tokens: int) -> tuple[list[int], bool]:
        """The blocks that both then hold, and whether the child needs one more, for a copy of the partial last."""
        if parent == child or self.tables.get(child):
            raise TargetInUse
        full, partial = divmod(tokens, self.block_size)
        if partial and not self.free:
            raise OutOfBlocks
        return self.tables.get(parent, [])[:full], partial > 0


# -------------------------------------------------------------------------------------------------------------- lanes


class Lane:
    """A bounded queue."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: deque[tuple[int, int]] = deque()

    def push(self, slot: int, generation: int) -> bool:
        if len(self.entries) == self.capacity:
            return False
        self.entries.append((slot, generation))
        return True

    def drain(self, limit: int) -> list[tuple[int, int]]:
        return [self.entries.popleft() for _ in range(min(limit, len(self.entries)))]


# ----------------------------------------------------------------------------------------------------------- emission

_MASK = 2**64 - 1


def splitmix64(seed: int, index: int) -> int:
    """The `index`-th output of splitmix64 from `seed` (Steele, Lea, Flood; the reference's C, in Python)."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mock_token(seed: int, position: int, eos_token_id: int, eos_threshold: int, vocabulary: int) -> int:
    """The top 30 bits decide on the end of the sequence, all bits on the token; token 0 is left to the end."""
    bits = splitmix64(seed, position)
    if bits // 2**34 < eos_threshold:
        return eos_token_id
    return bits % (vocabulary - 1) + 1


# ---------------------------------------------------------------------------------------------------------- histogram


def bucket_bounds(sub_buckets: int, octaves: int) -> list[int]:
    """Lower bounds of log-linear buckets: single values first, then `sub_buckets` to an octave."""
    bounds = list(range(sub_buckets))
    for octave in range(octaves):
        bounds += [(sub_buckets + k) << octave for k in range(sub_buckets)]
    return bounds


def percentile(values: list[int], fraction: float) -> int:
    """The smallest value that at least `fraction` of all are not above."""
    return sorted(values)[max(math.ceil(round(fraction * len(values), 6)), 1) - 1]
