"""KV blocks and the prefix cache of docs/scheduling.md in slow Python: a block is an object, the cache is a dict."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

Salt = tuple[int, int]
Key = tuple[int | Salt, tuple[int, ...]]
"""The id of the block before it, or the salt for the first one, and the tokens."""


@dataclass(eq=False)
class Block:
    """KV memory for `block_size` positions. Equal to itself alone."""

    refs: int = 0
    key: Key | None = None
    cache_id: int = 0  # counted up and never used again, so that a key names one chain for ever

    @property
    def is_cached(self) -> bool:
        return self.key is not None


@dataclass
class Pool:
    """Held, evictable and free blocks, and what of them can be found again."""

    num_blocks: int
    block_size: int
    has_cache: bool = True
    held: set[Block] = field(default_factory=set)
    evictable: list[Block] = field(default_factory=list)  # least recently released first
    cached: dict[Key, Block] = field(default_factory=dict)
    cache_ids: int = 0
    evictions: int = 0
    merges: int = 0

    @property
    def free(self) -> int:
        return self.num_blocks - len(self.held) - len(self.evictable)

    def take(self) -> Block:
        """A block of one's own: a free one if there is any, else the one that was released longest ago."""
        if self.free == 0:
            evicted = self.evictable.pop(0)
            assert evicted.key is not None
            del self.cached[evicted.key]
            self.evictions += 1
        block = Block(refs=1)
        self.held.add(block)
        return block

    def share(self, block: Block) -> Block:
        if block.refs == 0:
            self.evictable.remove(block)
            self.held.add(block)
        block.refs += 1
        return block

    def drop(self, block: Block) -> None:
        block.refs -= 1
        if block.refs == 0:
            self.held.remove(block)
            if block.is_cached:
                self.evictable.append(block)

    def match(self, salt: Salt, token_ids: Items[int]) -> list[Block]:
        """Cached blocks that hold the beginning of `token_ids`, but never all of it."""
        found: list[Block] = []
        for key_tokens in self._full_blocks(token_ids, len(token_ids) - 1):
            block = self.cached.get((found[-1].cache_id if found else salt, key_tokens))
            if block is None:
                break
            found.append(block)
        return found

    def register(self, table: list[Block], salt: Salt, token_ids: Items[int], computed: int) -> None:
        """Put the full blocks of `table` into the cache; of two equal ones the first to come stays."""
        if not self.has_cache:
            return
        parent: int | Salt = salt
        for k, key_tokens in enumerate(self._full_blocks(token_ids, computed)):
            key = (parent, key_tokens)
            if key not in self.cached:
                self.cache_ids += 1
                table[k].key, table[k].cache_id = key, self.cache_ids
                self.cached[key] = table[k]
            elif self.cached[key] is not table[k]:
                self.drop(table[k])
                table[k] = self.share(self.cached[key])
                self.merges += 1
            parent = table[k].cache_id

    def clear(self) -> None:
        """The backend has lost what was in the blocks."""
        self.held.clear()
        self.evictable.clear()
        self.cached.clear()

    def _full_blocks(self, token_ids: Items[int], count: int) -> list[tuple[int, ...]]:
        size = self.block_size
        return [tuple(token_ids[k : k + size]) for k in range(0, count // size * size, size)]

    def check(self, references: list[Block]) -> None:
        """Everything from scratch; `references` has each block once for each of its holders."""
        assert self.free >= 0
        assert set(references) == self.held
        assert all(block.refs == references.count(block) for block in self.held)
        assert all(block.refs == 0 and block.is_cached for block in self.evictable)
        assert len(set(self.evictable)) == len(self.evictable)
        assert set(self.cached.values()) == {block for block in self.held if block.is_cached} | set(self.evictable)
        assert all(block.key == key for key, block in self.cached.items())
        self._check_eviction_order()

    def _check_eviction_order(self) -> None:
        """No block outlives the one before it, without which it cannot be found."""
        by_id = {block.cache_id: block for block in self.cached.values()}
        for block in self.cached.values():
            assert block.key is not None
            parent = block.key[0]
            if isinstance(parent, tuple):
                continue
            assert parent in by_id, "a cached block's parent has been evicted"
            if by_id[parent].refs == 0:
                assert block.refs == 0, "a block is held and the one before it is not"
                assert self.evictable.index(block) < self.evictable.index(by_id[parent])
