"""Slow, obvious versions of what the kernels do. Lists, dicts and Python's integers; nothing here is clever."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

# ---------------------------------------------------------------------------------------------------------- scheduler


@dataclass
class Sequence:
    """One live request, as the scheduler sees it."""

    slot: int
    prompt: int
    max_new: int
    priority: int = 0
    arrival_ns: int = 0
    ignore_eos: bool = False
    produced: int = 0
    computed: int = 0
    blocks: int = 0
    preemptions: int = 0

    @property
    def seniority(self) -> tuple[int, int, int]:
        return (self.priority, self.arrival_ns, self.slot)

    @property
    def context(self) -> int:
        return self.prompt + self.produced


class Row(NamedTuple):
    """What one sequence computes in a step."""

    slot: int
    first: int
    new: int
    context: int
    emits: bool
    offset: int


class End(NamedTuple):
    """How a sequence ended, and with how many tokens."""

    reason: str
    produced: int


@dataclass
class Scheduler:
    """The policy in full: decodes, then running prefills, then admission, each in the order of seniority."""

    num_blocks: int
    block_size: int
    batch_tokens: int
    running_limit: int
    tokens_per_step: int = 1
    eos_token_id: int = -1
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    ended: dict[int, End] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.num_blocks - sum(sequence.blocks for sequence in self.running)

    def submit(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self._sort()

    def cancel(self, slot: int) -> None:
        for group in (self.waiting, self.running):
            for sequence in [member for member in group if member.slot == slot]:
                group.remove(sequence)
                self.ended[slot] = End("cancelled", sequence.produced)

    def plan(self) -> list[Row]:
        self.preempted = []
        rows: list[Row] = []
        decoding = [sequence for sequence in self.running if sequence.context - sequence.computed == 1]
        for sequence in decoding:
            if sequence in self.running and self._grow(sequence):
                self._add(rows, sequence, 1)
        for sequence in self.running:
            if sequence.context - sequence.computed > 1:
                self._add(rows, sequence, sequence.context - sequence.computed)
        while self.waiting and not self.preempted and len(self.running) < self.running_limit:
            sequence = self.waiting[0]
            wanted = self._blocks_for_next(sequence)
            if wanted > self.free or self._budget(rows) == 0:
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.blocks = wanted
            self._add(rows, sequence, sequence.context)
        self._sort()
        return rows

    def commit(self, rows: list[Row], outputs: list[list[int]]) -> None:
        for row, tokens in zip(rows, outputs, strict=True):
            (sequence,) = (member for member in self.running if member.slot == row.slot)
            if not row.emits:
                sequence.computed = row.context
                continue
            for token in tokens:
                sequence.produced += 1
                if token == self.eos_token_id and not sequence.ignore_eos:
                    self._end(sequence, "stop")
                    break
                if sequence.produced == sequence.max_new:
                    self._end(sequence, "length")
                    break
            # The last token of a context is always computed with the step that emits the next.
            sequence.computed = sequence.context - 1

    def preempt_all(self) -> None:
        for sequence in list(self.running):
            self._preempt(sequence)

    def _blocks_for_next(self, sequence: Sequence) -> int:
        """Blocks for the context and whatever the next emission can add to it."""
        most = min(sequence.context + self.tokens_per_step, sequence.prompt + sequence.max_new)
        return math.ceil(most / self.block_size)

    def _grow(self, sequence: Sequence) -> bool:
        wanted = max(self._blocks_for_next(sequence), sequence.blocks)
        while self.free < wanted - sequence.blocks:
            victim = max(self.running, key=lambda member: member.seniority)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks = wanted
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        victim.blocks = 0
        victim.computed = 0
        victim.preemptions += 1
        self.preempted.append(victim.slot)
        self.submit(victim)

    def _budget(self, rows: list[Row]) -> int:
        return self.batch_tokens - sum(row.new for row in rows)

    def _add(self, rows: list[Row], sequence: Sequence, wanted: int) -> None:
        chunk = min(wanted, self._budget(rows))
        if chunk > 0:
            context = sequence.computed + chunk
            offset = sum(row.new for row in rows)
            rows.append(Row(sequence.slot, sequence.computed, chunk, context, context == sequence.context, offset))

    def _end(self, sequence: Sequence, reason: str) -> None:
        self.running.remove(sequence)
        self.ended[sequence.slot] = End(reason, sequence.produced)

    def _sort(self) -> None:
        self.waiting.sort(key=lambda sequence: sequence.seniority)
        self.running.sort(key=lambda sequence: sequence.seniority)


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
