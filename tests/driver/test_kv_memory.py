"""Block ids as offsets and addresses, wherever the blocks are."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ironbatch.driver.kv_memory import KVMemory

KV_OFF = 4096
BLOCK_BYTES = 24
DEVICE_BLOCKS = 20


def device_memory() -> NDArray[np.uint8]:
    """A mapping in which no two places that are close look alike."""
    size = KV_OFF + DEVICE_BLOCKS * BLOCK_BYTES
    return (np.arange(size, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8)


def claim(memory: NDArray[np.uint8], first: int, count: int) -> KVMemory:
    return KVMemory(memory, kv_off=KV_OFF, first=first, num_blocks=count, block_bytes=BLOCK_BYTES)


@pytest.mark.parametrize("first", [0, 1, 7])
def test_a_block_is_where_the_formula_says(first: int) -> None:
    memory = device_memory()
    kv = claim(memory, first, 13)
    for block in range(13):
        offset = KV_OFF + (first + block) * BLOCK_BYTES
        assert kv.offset(block) == offset
        assert kv.address(block) == memory.ctypes.data + offset
        assert kv.device_id(block) == first + block
        assert kv.block(block).tobytes() == memory[offset : offset + BLOCK_BYTES].tobytes()
        assert ctypes.string_at(kv.address(block), BLOCK_BYTES) == kv.block(block).tobytes()


@given(kv_off=st.integers(0, 100), first=st.integers(0, 10), blocks=st.integers(0, 10), block_bytes=st.integers(1, 9))
def test_blocks_fit_exactly_or_not_at_all(kv_off: int, first: int, blocks: int, block_bytes: int) -> None:
    needed = kv_off + (first + blocks) * block_bytes
    shape = {"kv_off": kv_off, "first": first, "num_blocks": blocks, "block_bytes": block_bytes}
    kv = KVMemory(np.zeros(needed, np.uint8), **shape)
    if blocks:
        assert kv.offset(blocks - 1) + block_bytes == needed
    if needed:
        with pytest.raises(ValueError, match=f"do not lie in {needed - 1} bytes"):
            KVMemory(np.zeros(needed - 1, np.uint8), **shape)


def test_a_claim_does_not_begin_before_the_memory() -> None:
    with pytest.raises(ValueError, match="5 blocks of 24 bytes from byte -24 on do not lie in 4576 bytes"):
        KVMemory(device_memory(), first=-1, num_blocks=5, block_bytes=BLOCK_BYTES)


@pytest.mark.parametrize("block", [-1, 5, 2**31, -(2**63)])
def test_an_id_out_of_the_claim_is_an_error_and_changes_nothing(block: int) -> None:
    memory = device_memory()
    kv = claim(memory, 3, 5)
    with pytest.raises(IndexError, match=rf"block {block} is not one of 0\.\.4"):
        kv.offset(block)
    with pytest.raises(IndexError):
        kv.address(block)
    with pytest.raises(IndexError):
        kv.device_id(block)
    with pytest.raises(IndexError):
        kv.block(block)
    with pytest.raises(IndexError):
        kv.copy_blocks([(block, 0)])
    with pytest.raises(IndexError):
        kv.copy_blocks([(0, block)])
    with pytest.raises(IndexError):
        kv.zero_blocks([block])
    assert np.array_equal(memory, device_memory())


@given(
    first=st.integers(0, 15),
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12),
    zeros=st.lists(st.integers(0, 4), max_size=3),
)
def test_copies_are_byte_exact_and_one_after_the_other(
    first: int, pairs: list[tuple[int, int]], zeros: list[int]
) -> None:
    memory = device_memory()
    kv = claim(memory, first, 5)
    expected = device_memory()
    blocks = [bytes(kv.block(block)) for block in range(5)]
    for source, target in pairs:
        blocks[target] = blocks[source]
    for block in zeros:
        blocks[block] = bytes(BLOCK_BYTES)
    start = KV_OFF + first * BLOCK_BYTES
    expected[start : start + 5 * BLOCK_BYTES] = np.frombuffer(b"".join(blocks), np.uint8)
    kv.copy_blocks(pairs)
    kv.zero_blocks(zeros)
    assert np.array_equal(memory, expected)


def test_a_block_is_a_view() -> None:
    memory = device_memory()
    kv = claim(memory, 2, 4)
    kv.block(1)[:] = 255
    assert (memory[kv.offset(1) : kv.offset(2)] == 255).all()
    assert kv.block(1).shape == (BLOCK_BYTES,)
    assert np.shares_memory(kv.block(1), memory)


def test_host_blocks_begin_as_zeros() -> None:
    kv = KVMemory.host(6, 16)
    assert (kv.num_blocks, kv.block_bytes, kv.first, kv.start_offset) == (6, 16, 0, 0)
    assert kv.address(5) - kv.address(0) == 5 * 16
    assert not any(kv.block(block).any() for block in range(6))
