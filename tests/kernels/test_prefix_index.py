"""The cache's index and eviction list against a dictionary and a list, with hashes that collide and that do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ironbatch.kernels import blocks, prefix_index
from ironbatch.kernels.arena import Geometry, StateArena
from ironbatch.kernels.jit import kernel
from ironbatch.kernels.prefix_index import ROOT_SIGN
from ironbatch.kernels.records import IN_CACHE, NOBODY
from ironbatch.kernels.state import open_state
from tests.support import machine_settings

BLOCKS = 6
SIZE = 2


@kernel("int64(intp)")
def take(address):
    return blocks.take_block(open_state(address))


@kernel("int64(intp, int64)")
def release(address, block):
    blocks.release_block(open_state(address), block)
    return 0


@kernel("int64(intp, int64)")
def root_hash(address, salt):
    return prefix_index.root_hash(open_state(address), salt | ROOT_SIGN, 0)


@kernel("int64(intp, int64, int32[::1])")
def block_hash(address, parent_hash, tokens):
    return prefix_index.block_hash(open_state(address), parent_hash, tokens, 0)


@kernel("int64(intp, int64, int64, int32[::1])")
def find(address, wanted_hash, parent_a, tokens):
    return prefix_index.find_block(open_state(address), wanted_hash, parent_a, 0, tokens, 0)


@kernel("int64(intp, int64, int64, int64, int64, int32[::1])")
def insert(address, block, own_hash, parent_a, parent_block, tokens):
    prefix_index.index_insert(open_state(address), block, own_hash, parent_a, 0, parent_block, tokens, 0)
    return 0


@kernel("int64(intp, int64)")
def share(address, block):
    state = open_state(address)
    if state.refcounts[block] == IN_CACHE:
        prefix_index.evictable_remove(state, block)
    state.refcounts[block] += 1
    return 0


def small_arena(*, block_size: int = SIZE, collides: bool = False, hash_seed: int = 0) -> StateArena:
    arena = StateArena(
        Geometry(
            num_slots=1,
            num_lanes=1,
            num_blocks=BLOCKS,
            block_size=block_size,
            max_request_tokens=BLOCKS * block_size,
            running_limit=1,
            batch_tokens=1,
            prefix_cache=True,
            hash_seed=hash_seed,
        )
    )
    if collides:
        arena.header["hash_mask"] = 0
    return arena


class IndexMachine(RuleBasedStateMachine):
    """Blocks under few keys: (parent's uid or a salt, tokens). Ids are the kernel's, all else is the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.references: dict[int, int] = {}  # of blocks that are held or cached
        self.keys: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # of cached blocks: parent hash, parent, tokens
        self.evictable: list[int] = []  # the oldest first

    @initialize(collides=st.booleans(), hash_seed=st.integers(0, 2**63 - 1))
    def make(self, collides: bool, hash_seed: int) -> None:  # noqa: FBT001 - hypothesis draws it
        self.arena = small_arena(collides=collides, hash_seed=hash_seed)
        self.address = self.arena.address

    @precondition(lambda self: self.arena.header["free_count"] or self.evictable)
    @rule()
    def take_a_block(self) -> None:
        is_free = self.arena.header["free_count"] > 0
        block = take(self.address)
        assert block not in self.references if is_free else block == self.evictable[0]
        if not is_free:
            self.evictable.pop(0)
            del self.keys[block]
        self.references[block] = 1

    @rule(data=st.data())
    def look_for(self, data: st.DataObject) -> None:
        """Whether the key is there or not, the answer is the dictionary's; if it is not, a held block may get it."""
        parents = [(root_hash(self.address, salt), salt | ROOT_SIGN, NOBODY) for salt in (0, 1, 2**62)]
        records = self.arena.views["cached_blocks"]
        parents += [(int(records[block]["hash"]), int(records[block]["uid"]), block) for block in sorted(self.keys)]
        parent_hash, parent, parent_block = data.draw(st.sampled_from(parents))
        tokens = data.draw(st.tuples(*[st.sampled_from((0, 1, 65, 321, 2**31 - 1))] * SIZE))
        ids = np.array(tokens, np.int32)
        own_hash = block_hash(self.address, parent_hash, ids)
        known = [block for block, key in self.keys.items() if key == (parent_hash, parent, tokens)]
        assert find(self.address, own_hash, parent, ids) == (known[0] if known else NOBODY)
        held = [block for block in self.references if block not in self.keys and block != parent_block]
        if not known and held:
            insert(self.address, held[0], own_hash, parent, parent_block, ids)
            self.keys[held[0]] = (parent_hash, parent, tokens)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def share_a_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.keys)))
        share(self.address, block)
        self.references[block] += 1
        if block in self.evictable:
            self.evictable.remove(block)

    @precondition(lambda self: any(self.references.values()))
    @rule(data=st.data())
    def release_a_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(block for block, count in self.references.items() if count)))
        release(self.address, block)
        self.references[block] -= 1
        if self.references[block] == 0 and block in self.keys:
            self.evictable.append(block)
        elif self.references[block] == 0:
            del self.references[block]

    @invariant()
    def lists_agree(self) -> None:
        order, block = [], int(self.arena.header["oldest"])
        while block != NOBODY:
            order.append(block)
            block = int(self.arena.views["cached_blocks"][block]["newer"])
        assert order == self.evictable
        assert self.arena.header["evictable_count"] == len(self.evictable)
        assert self.arena.header["free_count"] == BLOCKS - len(self.references)
        uids = [int(self.arena.views["cached_blocks"][block]["uid"]) for block in self.keys]
        assert len(set(uids)) == len(uids)
        assert all(0 < uid < self.arena.header["next_uid"] for uid in uids)


TestIndex = IndexMachine.TestCase
TestIndex.settings = machine_settings(max_examples=150, stateful_step_count=40)


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
@given(data=st.data())
def test_hash_depends_on_seed_parent_and_each_token(block_size: int, data: st.DataObject) -> None:
    tokens = np.array(
        data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=block_size, max_size=block_size)), np.int32
    )
    place = data.draw(st.integers(0, block_size - 1))
    other = tokens.copy()
    other[place] ^= data.draw(st.integers(1, 2**31 - 1))
    arena = small_arena(block_size=block_size)
    parent = data.draw(st.integers(-(2**63), 2**63 - 1))
    own = block_hash(arena.address, parent, tokens)
    assert own == block_hash(arena.address, parent, tokens)
    assert own != block_hash(arena.address, parent, other)
    assert own != block_hash(arena.address, parent ^ 1, tokens)


def test_two_processes_hash_differently() -> None:
    assert len({root_hash(small_arena(hash_seed=seed).address, 0) for seed in range(100)}) == 100


def test_hashes_fill_the_buckets_evenly() -> None:
    """Consecutive token ids, as any tokenizer makes them, and chains: no bucket of 64 gets three times its share."""
    arena = small_arena()
    counts = np.zeros(64, int)
    chained = root_hash(arena.address, 0)
    for k in range(6400):
        chained = block_hash(arena.address, chained if k % 7 else 0, np.array([k % 50, k // 50], np.int32))
        counts[chained & 63] += 1
    assert counts.max() < 3 * counts.mean()
