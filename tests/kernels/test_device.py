"""The reference device's kernels against plain Python that reads the same bytes with `struct`.

Batches are sound ones, sound ones with a few words changed, and noise; so most of what a hostile client could write is
tried. The suite runs with bounds checking too, where a read past the records would end it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import pytest

from ironbatch.kernels import device as kernels
from ironbatch.kernels.device import check_batch, run_batch, spoil_batch, write_status
from ironbatch.kernels.device_records import OP_COPY_BLOCKS, OP_STEP, OP_ZERO_BLOCKS, STATUS, STEP_EMITS, tokens_bytes
from ironbatch.kernels.device_status import is_well_signaled
from ironbatch.kernels.mock_kv import POISON
from tests.driver.records import copy, step, zero

BLOCKS: Final = 12
SIZE: Final = 4  # positions of a block
MINE: Final = (2, 3, 5, 6, 7, 11)  # the blocks of who submits
OWNER: Final = 2
MASK: Final = 2**64 - 1
WORDS: Final = (0, 1, 2, 3, 4, 5, 8, 11, 12, 16, 24, 79, 80, 84, 96, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
"""What a changed word becomes: what sizes, counts and ids turn over at."""


# ------------------------------------------------------------------------------------------------ the oracle: soundness


class Problem(NamedTuple):
    """What the verdict says of a bad batch."""

    problem: int
    record: int
    item: int
    value: int


@dataclass
class Row:
    """A STEP as the oracle reads it."""

    user: int
    sequence: int
    seed: int
    context: int
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    emits: bool


@dataclass
class Parsed:
    """A sound batch: what is done to the KV in order, and the rows."""

    actions: list[tuple[str, tuple[int, ...] | Row]] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        return [what for _, what in self.actions if isinstance(what, Row)]


class Unsound(Exception):
    """(problem, item, value) of the record that is read."""


def require(holds: bool, problem: int, value: int = 0, item: int = -1) -> None:  # noqa: FBT001 - as an assertion
    if not holds:
        raise Unsound(problem, item, value)


def require_mine(ids: tuple[int, ...]) -> None:
    for item, block in enumerate(ids):
        require(block in MINE, kernels.BAD_BLOCK, block, item)


def parse_step(record: bytes, size: int, *, emits: bool) -> Row:
    require(size >= 80, kernels.BAD_SIZE, size)
    user, sequence, seed, context, new, count, reserved0 = struct.unpack_from("<8xQQQIIII", record)
    (reserved1,) = struct.unpack_from("<Q", record, 72)
    require(reserved0 == reserved1 == 0, kernels.BAD_RESERVED)
    require(context > 0, kernels.BAD_CONTEXT)
    require(0 < new <= context, kernels.BAD_NEW, new)
    require(count == -(-context // SIZE), kernels.BAD_BLOCK_COUNT, count)
    require(size == 80 + 4 * count + 4 * new, kernels.BAD_SIZE, size)
    blocks = struct.unpack_from(f"<{count}I", record, 80)
    tokens = struct.unpack_from(f"<{new}i", record, 80 + 4 * count)
    require_mine(blocks)
    for item, token in enumerate(tokens, count):
        require(token >= 0, kernels.BAD_TOKEN, token, item)
    return Row(user, sequence, seed, context, blocks, tokens, emits)


def parse_record(left: bytes) -> tuple[int, str, tuple[int, ...] | Row]:
    require(len(left) >= 16, kernels.BAD_SIZE, len(left))
    op, flags, size = struct.unpack_from("<HHI", left)
    require(16 <= size <= len(left), kernels.BAD_SIZE, size)
    require(flags == 0 or (op == OP_STEP and flags == STEP_EMITS), kernels.BAD_FLAGS, flags)
    if op == OP_STEP:
        return size, "write", parse_step(left, size, emits=flags == STEP_EMITS)
    require(op in (OP_COPY_BLOCKS, OP_ZERO_BLOCKS), kernels.BAD_OP, op)
    require((size - 16) % (8 if op == OP_COPY_BLOCKS else 4) == 0, kernels.BAD_SIZE, size)
    ids = struct.unpack_from(f"<{(size - 16) // 4}I", left, 16)
    require_mine(ids)
    return size, "copy" if op == OP_COPY_BLOCKS else "zero", ids


def parse(batch: bytes) -> Parsed | Problem:
    parsed, start = Parsed(), 0
    while start < len(batch):
        try:
            size, action, what = parse_record(batch[start:])
        except Unsound as unsound:
            problem, item, value = unsound.args
            return Problem(problem, len(parsed.actions), item, value)
        parsed.actions.append((action, what))
        start += -(-size // 8) * 8
    return parsed


# -------------------------------------------------------------------------------------------------- the oracle: the run


def token_after(seed: int, context: list[int]) -> int:
    """A hash of the context, mixed with the seed and the position by splitmix64, as docs/driver.md has it."""
    hashed = 0x243F6A8885A308D3
    for token in context:
        hashed = (hashed ^ token & MASK) * 0x9E3779B97F4A7C15 & MASK
        hashed ^= hashed >> 32
    bits = (seed ^ hashed) + (len(context) + 1) * 0x9E3779B97F4A7C15 & MASK
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
    return (bits ^ bits >> 31) % 31_999 + 1


def run(parsed: Parsed, kv: list[int]) -> bytes:
    """Apply a batch to the KV, a list of BLOCKS * SIZE ids. Returns the bytes of its results."""
    for action, what in parsed.actions:
        if isinstance(what, Row):
            for position, token in enumerate(what.tokens, what.context - len(what.tokens)):
                kv[what.blocks[position // SIZE] * SIZE + position % SIZE] = token
        elif action == "copy":
            for source, target in zip(what[::2], what[1::2], strict=True):
                kv[target * SIZE : target * SIZE + SIZE] = kv[source * SIZE : source * SIZE + SIZE]
        else:
            for block in what:
                kv[block * SIZE : block * SIZE + SIZE] = [0] * SIZE
    results = b""
    for row in parsed.rows:
        context = [kv[row.blocks[k // SIZE] * SIZE + k % SIZE] for k in range(row.context)]
        head = struct.pack("<HHIQQII", 4, 0, 32 + 4 * row.emits, row.user, row.sequence, row.emits, 0)
        results += head + (struct.pack("<ii", token_after(row.seed, context), 0) if row.emits else b"")
    return results


def spoil(parsed: Parsed, kv: list[int]) -> None:
    """What the batch would write is POISON; nothing else changes."""
    for action, what in parsed.actions:
        if isinstance(what, Row):
            for position in range(what.context - len(what.tokens), what.context):
                kv[what.blocks[position // SIZE] * SIZE + position % SIZE] = POISON
        else:
            for block in what[1::2] if action == "copy" else what:
                kv[block * SIZE : block * SIZE + SIZE] = [POISON] * SIZE


# ------------------------------------------------------------------------------------------------------------- batches


def sound_record(rng: random.Random) -> bytes:
    """One that may be run, with a block twice here and there, and every id that an int32 has room for."""
    kind = rng.random()
    if kind < 0.2:
        return copy(*((rng.choice(MINE), rng.choice(MINE)) for _ in range(rng.randrange(4))))
    if kind < 0.35:
        return zero(*rng.choices(MINE, k=rng.randrange(4)))
    context = rng.randint(1, 3 * SIZE)
    new = rng.choice([1, rng.randint(1, context), context])
    return step(
        rng.choices(MINE, k=-(-context // SIZE)),
        [rng.choice([0, 1, 2**31 - 1, rng.randrange(2**31)]) for _ in range(new)],
        context=context,
        emits=rng.random() < 0.7,
        seed=rng.randrange(2**64),
        user=rng.randrange(2**64),
        sequence=rng.randrange(2**64),
        top_k=rng.randrange(2**63),
    )


def spoilt(batch: bytes, rng: random.Random) -> bytes:
    """A few words changed, or cut off, or put in."""
    words = [batch[k : k + 4] for k in range(0, len(batch), 4)]
    for _ in range(rng.randint(1, 3)):
        if not words:
            break
        place = rng.randrange(len(words))
        change = rng.random()
        if change < 0.6:
            words[place] = struct.pack("<I", rng.choice([*WORDS, rng.randrange(2**32)]))
        elif change < 0.7:
            words[place] = bytes([byte ^ 1 << rng.randrange(8) for byte in words[place]])
        elif change < 0.85:
            del words[place : place + 2 * rng.randint(1, 4)]
        else:
            words[place:place] = words[rng.randrange(len(words)) :][: 2 * rng.randint(1, 20)]
    return b"".join(words[: len(words) // 2 * 2])


def batches(seed: int, count: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        kind = rng.random()
        batch = b"".join(sound_record(rng) for _ in range(rng.randrange(5)))
        if kind < 0.3:
            yield batch
        elif kind < 0.9:
            yield spoilt(batch, rng)
        else:
            yield rng.randbytes(8 * rng.randrange(24))


class Bench:
    """A device's tables, each between two guards that nothing may change."""

    GUARD: Final = np.full(64, 0x5A5A5A5A5A5A5A5A, np.int64)

    def __init__(self) -> None:
        self._owners = self._guarded(BLOCKS // 2)
        self.owners = self._owners[64:-64].view(np.int32)
        self.owners[:] = 1
        self.owners[list(MINE)] = OWNER
        self._kv = self._guarded(BLOCKS * SIZE // 2)
        self.kv = self._kv[64:-64].view(np.int32)
        self.kv[:] = range(BLOCKS * SIZE)
        self.verdict = np.zeros(kernels.VERDICT_WORDS, np.int64)

    def _guarded(self, words: int) -> np.ndarray:
        return np.concatenate([self.GUARD, np.zeros(words, np.int64), self.GUARD])

    def check(self, batch: bytes) -> int:
        self._records = np.frombuffer(batch, np.int64).copy()
        return int(
            check_batch(
                self._records.ctypes.data,
                len(batch),
                self.owners.ctypes.data,
                BLOCKS,
                OWNER,
                SIZE,
                self.verdict.ctypes.data,
            )
        )

    def spoil(self, batch: bytes) -> None:
        spoil_batch(self._records.ctypes.data, len(batch), self.kv.ctypes.data, BLOCKS, SIZE)

    def run(self, batch: bytes, rows: int) -> bytes:
        results = self._guarded(rows * tokens_bytes(1) // 8)
        written = run_batch(
            self._records.ctypes.data,
            len(batch),
            self.kv.ctypes.data,
            BLOCKS,
            SIZE,
            results[64:].ctypes.data,
        )
        for table in (results, self._kv, self._owners):
            assert (table[:64] == self.GUARD).all()
            assert (table[-64:] == self.GUARD).all()
        assert (results[64 + written // 8 : -64] == 0).all()
        return results[64:].tobytes()[:written]


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("seed", range(8))
def test_every_batch_is_refused_or_run_as_the_oracle_says(seed: int) -> None:
    bench, kv = Bench(), list(range(BLOCKS * SIZE))
    seen = {"run": 0, "refused": 0}
    for batch in batches(seed, 800):
        parsed = parse(batch)
        problem = bench.check(batch)
        verdict = bench.verdict.tolist()
        if isinstance(parsed, Problem):
            assert problem == verdict[kernels.PROBLEM]
            told = Problem(problem, verdict[kernels.RECORD], verdict[kernels.ITEM], verdict[kernels.VALUE])
            assert told == parsed, batch.hex(" ", 4)
            seen["refused"] += 1
        else:
            assert problem == 0, batch.hex(" ", 4)
            assert verdict[kernels.STEPS] == len(parsed.rows)
            assert bench.run(batch, len(parsed.rows)) == run(parsed, kv)
            seen["run"] += 1
        assert bench.kv.tolist() == kv
    assert min(seen.values()) > 100


def test_batch_that_fails_at_its_worst_touches_only_what_it_was_to_write() -> None:
    bench, kv = Bench(), list(range(BLOCKS * SIZE))
    spoilt_ones = 0
    for batch in batches(99, 600):
        parsed = parse(batch)
        if isinstance(parsed, Parsed):
            bench.check(batch)
            bench.spoil(batch)
            spoil(parsed, kv)
            assert bench.kv.tolist() == kv
            spoilt_ones += len(parsed.actions)
            assert bench.run(batch, len(parsed.rows)) == run(parsed, kv)  # the next one finds tokens again
    assert spoilt_ones > 100


def test_every_problem_is_found() -> None:
    """The batches above hold each of them, so none is found by luck alone."""
    bench = Bench()
    found = {bench.check(batch) for seed in range(8) for batch in batches(seed, 800)}
    assert found == set(range(kernels.BAD_TOKEN + 1))


def test_what_a_batch_holds() -> None:
    bench = Bench()
    records = [
        step([2], [1, 2, 3]),
        copy((2, 3)),
        zero(5),
        step([2, 3, 5], [4], context=11),
        copy(),
        step([6, 7], [1] * 6, context=7, emits=False),
        step([6], [1], context=3, emits=False),
    ]
    assert bench.check(b"".join(records)) == 0
    names = ("RECORD", "STEPS", "NEW_TOKENS", "PREFILLS", "LONGEST_CONTEXT", "COPIES", "ZEROS")
    assert [bench.verdict[getattr(kernels, name)] for name in names] == [7, 4, 11, 3, 11, 2, 1]


def test_padding_is_looked_at_by_nobody() -> None:
    """A record of an odd number of ids, whose padding is noise."""
    bench = Bench()
    records = (zero(2, 3, 5), step([6], [9, 8, 7, 6], context=4), zero(7))
    noisy = b"".join(record[:-4] + b"\xff" * 4 for record in records)
    parsed = parse(noisy)
    assert isinstance(parsed, Parsed)
    assert bench.check(noisy) == 0
    assert bench.run(noisy, 1) == run(parsed, list(range(BLOCKS * SIZE)))


@pytest.mark.parametrize(
    ("signaled", "failed", "fence", "is_well"),
    [(0, 0, 1, 0), (1, 0, 1, 1), (5, 0, 3, 1), (5, 3, 3, 0), (5, 3, 2, 0), (5, 3, 4, 1), (2**62, 0, 2**62, 1)],
)
def test_the_page_says_only_what_is_certain(signaled: int, failed: int, fence: int, is_well: int) -> None:
    """A fence up to one that has failed may be well itself; the device is asked."""
    page = np.zeros(1, STATUS)
    write_status(page.ctypes.data, signaled, failed, 7)
    assert (page["signaled"], page["failed"], page["reset_count"]) == (signaled, failed, 7)
    assert is_well_signaled(page.ctypes.data, fence) == is_well
