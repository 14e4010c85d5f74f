"""The block allocator against the oracle: who holds what, who shares what, and nothing changed by a refusal."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ironbatch.kernels.allocator import (
    NO_ROOM,
    NOTHING_TO_COPY,
    TARGET_IN_USE,
    BlockAllocator,
    OutOfBlocks,
    blocks_fork,
    blocks_reserve,
)
from tests import oracle
from tests.support import machine_settings

SEQUENCES = 5
MAX_TOKENS = 40

SEQUENCE = st.integers(0, SEQUENCES - 1)


class BlockMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 14), block_size=st.sampled_from([1, 2, 4, 16]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockAllocator(SEQUENCES, num_blocks, block_size, MAX_TOKENS)
        self.pool = oracle.BlockPool(num_blocks, block_size)

    @rule(sequence=SEQUENCE, tokens=st.integers(0, MAX_TOKENS))
    def reserve(self, sequence: int, tokens: int) -> None:
        try:
            missing = self.pool.missing(sequence, tokens)
        except oracle.OutOfBlocks:
            with pytest.raises(OutOfBlocks):
                self.blocks.reserve(sequence, tokens)
            return
        held = len(self.blocks.table(sequence))
        self.blocks.reserve(sequence, tokens)
        new = self.blocks.table(sequence)[held:].tolist()
        assert len(new) == missing
        self.pool.grow(sequence, new)

    @rule(sequence=SEQUENCE)
    def release(self, sequence: int) -> None:
        assert self.blocks.release(sequence) == self.pool.release(sequence)

    @rule(parent=SEQUENCE, child=SEQUENCE, fraction=st.floats(0, 1))
    def fork(self, parent: int, child: int, fraction: float) -> None:
        tokens = int(fraction * len(self.blocks.table(parent)) * self.pool.block_size)
        try:
            shared, needs_copy = self.pool.shared_by_fork(parent, child, tokens)
        except oracle.TargetInUse:
            with pytest.raises(ValueError, match="is live"):
                self.blocks.fork(parent, child, tokens)
            return
        except oracle.OutOfBlocks:
            with pytest.raises(OutOfBlocks):
                self.blocks.fork(parent, child, tokens)
            return
        copy = self.blocks.fork(parent, child, tokens)
        self.pool.tables[child] = list(shared)
        if not needs_copy:
            assert copy is None
            return
        target = int(self.blocks.table(child)[-1])
        assert copy == (self.pool.tables[parent][len(shared)], target)
        self.pool.grow(child, [target])

    @invariant()
    def all_agree(self) -> None:
        for sequence in range(SEQUENCES):
            assert self.blocks.table(sequence).tolist() == self.pool.tables.get(sequence, [])
        counts = self.pool.refcounts
        assert [self.blocks.refcount(k) for k in range(self.pool.num_blocks)] == [
            counts[k] for k in range(self.pool.num_blocks)
        ]
        free = self.blocks.arena.views["free_blocks"][: self.blocks.free_count].tolist()
        assert sorted(free) == sorted(self.pool.free)

    def teardown(self) -> None:
        if hasattr(self, "blocks"):
            for sequence in range(SEQUENCES):
                self.blocks.release(sequence)
            assert self.blocks.free_count == self.pool.num_blocks


BlockMachine.TestCase.settings = machine_settings(max_examples=80, stateful_step_count=40)
TestBlocks = BlockMachine.TestCase


def state_of(blocks: BlockAllocator) -> bytes:
    """The allocator's whole memory."""
    return blocks.arena._memory.tobytes()


def test_exhaustion_is_an_answer_and_allocates_nothing() -> None:
    blocks = BlockAllocator(num_sequences=3, num_blocks=4, block_size=4, max_tokens=64)
    blocks.reserve(0, 9)
    before = state_of(blocks)
    assert blocks_reserve(blocks.arena.address, 1, 5) == NO_ROOM
    assert blocks_reserve(blocks.arena.address, 0, 17) == NO_ROOM
    assert blocks_reserve(blocks.arena.address, 0, 65) == NO_ROOM  # longer than any sequence
    assert state_of(blocks) == before
    with pytest.raises(OutOfBlocks, match="5 tokens do not fit: 1 "):
        blocks.reserve(1, 5)
    assert blocks_reserve(blocks.arena.address, 1, 4) == 1


def test_reserving_less_gives_nothing_back() -> None:
    blocks = BlockAllocator(num_sequences=1, num_blocks=4, block_size=4, max_tokens=64)
    assert blocks_reserve(blocks.arena.address, 0, 12) == 3
    assert blocks_reserve(blocks.arena.address, 0, 1) == 3
    assert blocks.free_count == 1


@pytest.mark.parametrize(
    ("child", "tokens", "answer"),
    [(0, 4, TARGET_IN_USE), (1, 4, TARGET_IN_USE), (2, 8, NOTHING_TO_COPY), (2, 7, NO_ROOM)],
)
def test_fork_that_is_refused_changes_nothing(child: int, tokens: int, answer: int) -> None:
    blocks = BlockAllocator(num_sequences=3, num_blocks=3, block_size=4, max_tokens=64)
    blocks.reserve(0, 8)
    blocks.reserve(1, 4)
    before = state_of(blocks)
    assert blocks_fork(blocks.arena.address, 0, child, tokens) == answer
    assert (state_of(blocks) == before) == (answer != NOTHING_TO_COPY)


def test_block_is_free_once_its_last_holder_has_gone() -> None:
    blocks = BlockAllocator(num_sequences=3, num_blocks=4, block_size=2, max_tokens=8)
    blocks.reserve(0, 4)
    blocks.fork(0, 1, 4)
    blocks.fork(1, 2, 2)
    assert [blocks.release(0), blocks.release(1), blocks.release(2)] == [0, 1, 1]


def test_the_last_released_are_the_first_handed_out() -> None:
    """So that a lightly loaded pool stays in few cache lines."""
    blocks = BlockAllocator(num_sequences=2, num_blocks=8, block_size=1, max_tokens=8)
    blocks.reserve(0, 3)
    assert blocks.table(0).tolist() == [0, 1, 2]
    blocks.release(0)
    blocks.reserve(1, 3)
    assert blocks.table(1).tolist() == [0, 1, 2]
