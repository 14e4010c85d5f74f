"""The mock's KV against an oracle that knows the request alone, and one fault of each kind, which changes the token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.kernels.arena import Geometry, StateArena
from ironbatch.kernels.emission import EOS_SCALE, VOCABULARY
from ironbatch.kernels.mock_kv import POISON, mock_kv_execute, mock_kv_tokens
from ironbatch.limits import SEED, TOKEN_ID
from tests import oracle

SIZE = 4  # positions of a block
NUM_BLOCKS = 12
U64 = 2**64 - 1

SEEDS = st.integers(SEED.low, SEED.high)
PROMPTS = st.lists(st.integers(TOKEN_ID.low, TOKEN_ID.high), min_size=1, max_size=20)


def hashed(context: list[int]) -> int:
    """Multiply and xorshift from token to token, with the first digits of pi before the first."""
    value = 0x243F6A8885A308D3
    for token in context:
        value = ((value ^ (token & U64)) * 0x9E3779B97F4A7C15) & U64
        value ^= value >> 32
    return value


def token_after(seed: int, context: list[int], eos: int = -1, threshold: int = 0) -> int:
    return oracle.mock_token(seed ^ hashed(context), len(context), eos, threshold, VOCABULARY)


def expected_tokens(seed: int, prompt: list[int], count: int, eos: int = -1, threshold: int = 0) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(token_after(seed, context, eos, threshold))
    return context[len(prompt) :]


def tokens_of_kernel(seed: int, prompt: list[int], count: int, eos: int = -1, threshold: int = 0) -> list[int]:
    context = np.array(prompt + [POISON] * (count + 1), np.int32)
    assert mock_kv_tokens(seed, context, len(prompt), count, eos, threshold) == count
    assert context[: len(prompt)].tolist() == prompt
    assert context[-1] == POISON
    return context[len(prompt) : -1].tolist()


class Hand:
    """An arena whose plans are made by hand, and the KV memory beside it."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, block_size: int = SIZE, eos_token_id: int = -1) -> None:
        geometry = Geometry(
            num_slots=4,
            num_lanes=1,
            num_blocks=num_blocks,
            block_size=block_size,
            max_request_tokens=num_blocks * block_size,
            running_limit=4,
            batch_tokens=128,
            eos_token_id=eos_token_id,
        )
        self.arena = StateArena(geometry)
        self.views = self.arena.views
        self.size = block_size
        self.memory = np.full(num_blocks * (block_size + 1), POISON, np.int32)
        self.kv = self.memory[: num_blocks * block_size].reshape(num_blocks, block_size)
        self.poisoned = self.memory[num_blocks * block_size :]
        self.poisoned[:] = 1
        self.rows: list[tuple[int, int, list[int], int]] = []
        self.copies: list[tuple[int, int]] = []

    def hold(self, sequence: int, *blocks: int) -> None:
        """Give a sequence its block table; all of its blocks are held once more."""
        self.views["block_tables"][sequence, : len(blocks)] = blocks
        self.views["refcounts"][list(blocks)] += 1

    def release(self, *blocks: int) -> None:
        self.views["refcounts"][list(blocks)] -= 1

    def row(self, sequence: int, first: int, tokens: list[int], emits: int = 1) -> None:
        self.rows.append((sequence, first, tokens, emits))

    def execute(self, break_it: Callable[[Hand], Any] | None = None, threshold: int = 0, **terms: int) -> list[int]:
        """Run the plan that was made. Returns what its rows emit."""
        offset = 0
        tables = [self.views[name] for name in ("token_ids", "positions", "kv_slot_mapping")]
        for k, (sequence, first, tokens, emits) in enumerate(self.rows):
            row = self.views["rows"][k]
            context = first + len(tokens)
            row["sequence"], row["first_position"], row["context_tokens"] = sequence, first, context
            row["new_tokens"], row["token_offset"], row["emits"] = len(tokens), offset, emits
            for position, token in enumerate(tokens, first):
                block = int(self.views["block_tables"][sequence, position // self.size])
                values = (token, position, block * self.size + position % self.size)
                for table, value in zip(tables, values, strict=True):
                    table[offset] = value
                offset += 1
        self.views["copies"][: len(self.copies)] = np.array(self.copies, np.int32).reshape(-1, 2)
        header = self.arena.header
        header["row_count"], header["plan_tokens"], header["copy_count"] = len(self.rows), offset, len(self.copies)
        if break_it is not None:
            break_it(self)
        names = ("base_ns", "prefill_token_ns", "sequence_ns", "kv_token_ns")
        latencies = [terms.get(name, 0) for name in names]
        self.step_ns = mock_kv_execute(self.arena.address, self.memory.ctypes.data, threshold, *latencies)
        emitted = sum(emits for *_, emits in self.rows)
        self.rows, self.copies = [], []
        return self.views["output_tokens"][:emitted].tolist()  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------- what the request alone gives


@given(seed=SEEDS, prompt=PROMPTS, count=st.integers(0, 8), threshold=st.sampled_from([0, EOS_SCALE // 4, EOS_SCALE]))
def test_tokens_are_the_oracles(seed: int, prompt: list[int], count: int, threshold: int) -> None:
    assert tokens_of_kernel(seed, prompt, count, 7, threshold) == expected_tokens(seed, prompt, count, 7, threshold)


@given(seed=SEEDS, prompt=PROMPTS)
def test_token_without_end_is_a_token(seed: int, prompt: list[int]) -> None:
    (token,) = tokens_of_kernel(seed, prompt, 1)
    assert 0 < token < VOCABULARY


def test_every_part_of_the_request_counts() -> None:
    base = [5, 6, 7, 8, 9]
    variants = [
        base,
        base[::-1],
        [6, 5, *base[2:]],
        [*base[:4], 10],
        base[:4],
        [0, *base],
        [*base, 0],
        [5, 6, 7, 8, -9],
    ]
    assert len({tokens_of_kernel(seed, prompt, 4)[-1] for seed in (1, 2) for prompt in variants}) == 2 * len(variants)


def test_no_token_is_poison() -> None:
    assert POISON not in TOKEN_ID
    assert POISON < -1


# ---------------------------------------------------------------------------------------------------- a sound engine


@given(
    seed=SEEDS,
    prompt=st.lists(st.integers(TOKEN_ID.low, TOKEN_ID.high), min_size=1, max_size=30),
    size=st.sampled_from([1, 2, 4, 8]),
    cuts=st.sets(st.integers(1, 29)),
    order=st.randoms(use_true_random=False),
    threshold=st.sampled_from([0, EOS_SCALE // 4]),
)
def test_chunks_and_decodes_emit_what_the_request_gives(
    seed: int, prompt: list[int], size: int, cuts: set[int], order: Any, threshold: int
) -> None:
    hand = Hand(num_blocks=40, block_size=size, eos_token_id=7)
    blocks = order.sample(range(40), -(-40 // size) if size > 1 else 40)
    hand.hold(2, *blocks)
    hand.views["seeds"][2] = seed
    ends = [*sorted(cut for cut in cuts if cut < len(prompt)), len(prompt)]
    first = 0
    for end in ends:
        hand.row(2, first, prompt[first:end], emits=int(end == len(prompt)))
        emitted = hand.execute(threshold=threshold)
        first = end
    for _ in range(5):
        hand.row(2, len(prompt) + len(emitted) - 1, emitted[-1:])
        emitted += hand.execute(threshold=threshold)
    assert emitted == expected_tokens(seed, prompt, 6, 7, threshold)


def test_rows_emit_in_order_and_only_those_that_end() -> None:
    hand = Hand()
    for sequence, blocks in enumerate([(3, 1), (0, 7), (5, 6)]):
        hand.hold(sequence, *blocks)
        hand.views["seeds"][sequence] = sequence + 20
        hand.row(sequence, 0, [sequence, 9, 9, 9, 9], emits=int(sequence != 1))
    assert hand.execute() == [token_after(20, [0, 9, 9, 9, 9]), token_after(22, [2, 9, 9, 9, 9])]


def test_time_is_that_of_the_latency_model() -> None:
    hand = Hand()
    hand.hold(0, 0, 1)
    hand.hold(1, 2, 3)
    hand.row(0, 0, [1] * 5)
    hand.row(1, 6, [1])
    hand.execute(base_ns=1_000_000, prefill_token_ns=10_000, sequence_ns=100, kv_token_ns=1)
    assert hand.step_ns == 1_000_000 + 5 * 10_000 + 2 * 100 + (5 + 7)


def test_blocks_that_nobody_holds_are_poisoned_and_cached_ones_are_not() -> None:
    hand = Hand()
    hand.hold(0, 4, 5)
    hand.row(0, 0, list(range(1, 9)))
    hand.execute()
    hand.release(4)
    hand.views["refcounts"][5] = -(2**31)  # kept by the cache: anything but 0
    hand.execute()
    assert hand.kv[4].tolist() == [POISON] * SIZE
    assert hand.poisoned[4] == 1
    assert hand.kv[5].tolist() == [5, 6, 7, 8]


def test_block_handed_on_within_a_step_keeps_nothing_of_its_last_holder() -> None:
    hand = Hand()
    hand.hold(0, 4)
    hand.row(0, 0, [1, 2, 3, 4])
    hand.execute()
    hand.hold(1, 4)  # freed and given away between two executions
    hand.row(1, 0, [9])
    hand.execute()
    assert hand.kv[4].tolist() == [9, POISON, POISON, POISON]
    hand.row(1, 1, [8, 7])
    hand.execute()
    assert hand.kv[4].tolist() == [9, 8, 7, POISON]


def test_prefix_hit_is_read_through_the_block_table() -> None:
    hand = Hand()
    prompt = [11, 12, 13, 14, 15, 16]
    hand.hold(0, 3, 4)
    hand.row(0, 0, prompt)
    hand.execute()
    hand.hold(1, 3, 8)
    hand.views["seeds"][1] = 5
    hand.row(1, SIZE, [15, 16, 17])
    assert hand.execute() == [token_after(5, [*prompt, 17])]


def forked(hand: Hand) -> None:
    """Sequence 0 has six positions in blocks 3 and 4; sequence 1 shares the first and gets a copy of the other in 8."""
    hand.hold(0, 3, 4)
    hand.row(0, 0, [11, 12, 13, 14, 15, 16])
    hand.execute()
    hand.hold(1, 3, 8)
    hand.views["seeds"][1] = 5
    hand.copies = [(4, 8)]
    hand.row(1, 5, [16])


def test_fork_computes_its_own_last_position_over_a_copy() -> None:
    hand = Hand()
    forked(hand)
    assert hand.execute() == [token_after(5, [11, 12, 13, 14, 15, 16])]
    assert hand.kv[8].tolist() == [15, 16, POISON, POISON]


def test_copies_are_done_in_order_and_before_anything_is_written() -> None:
    hand = Hand()
    hand.hold(0, 0)
    hand.hold(1, 1)
    hand.hold(2, 2)
    hand.row(0, 0, [1, 2])
    hand.execute()
    hand.copies = [(0, 1), (1, 2)]
    hand.row(0, 1, [9])
    hand.execute()
    assert hand.kv[:3, :2].tolist() == [[1, 9], [1, 2], [1, 2]]
    assert hand.poisoned[:3].tolist() == [0, 0, 0]


def test_copy_of_a_poisoned_block_is_one() -> None:
    hand = Hand()
    hand.hold(0, 0)
    hand.hold(1, 1)
    hand.row(1, 0, [1])
    hand.execute()
    hand.copies = [(0, 1)]
    hand.execute()
    assert (hand.kv[1].tolist(), hand.poisoned[1]) == ([POISON] * SIZE, 1)


# -------------------------------------------------------------------------------------------------------------- faults


def running(hand: Hand) -> None:
    """Sequence 1 decodes its seventh position; sequence 0 stands beside it with other tokens."""
    hand.hold(0, 5, 6)
    hand.hold(1, 3, 8)
    hand.views["seeds"][1] = 5
    hand.row(0, 0, [21, 22, 23, 24, 25, 26, 27], emits=0)
    hand.row(1, 0, [11, 12, 13, 14, 15, 16], emits=0)
    hand.execute()
    hand.row(1, 6, [17])


def wrong_table_entry(hand: Hand) -> None:
    hand.views["block_tables"][1, 0] = 5


def table_entries_swapped(hand: Hand) -> None:
    hand.views["block_tables"][1, :2] = [8, 3]


def table_entry_that_nobody_holds(hand: Hand) -> None:
    hand.views["block_tables"][1, 0] = 0


def wrong_slot_mapping(hand: Hand) -> None:
    hand.views["kv_slot_mapping"][0] += 1


def mapping_into_another_block(hand: Hand) -> None:
    hand.views["kv_slot_mapping"][0] = 6 * SIZE + 2


def wrong_token(hand: Hand) -> None:
    hand.views["token_ids"][0] += 1


def freed_too_early(hand: Hand) -> None:
    hand.release(3)


def wrong_seed(hand: Hand) -> None:
    hand.views["seeds"][1] += 1


def position_skipped(hand: Hand) -> None:
    hand.views["kv_slot_mapping"][0] = 8 * SIZE + 3
    hand.views["rows"]["context_tokens"][0] += 1


FAULTS = [
    wrong_table_entry,
    table_entries_swapped,
    table_entry_that_nobody_holds,
    wrong_slot_mapping,
    mapping_into_another_block,
    wrong_token,
    freed_too_early,
    wrong_seed,
    position_skipped,
]


def test_without_a_fault_it_emits_what_the_request_gives() -> None:
    hand = Hand()
    running(hand)
    assert hand.execute() == [token_after(5, [11, 12, 13, 14, 15, 16, 17])]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_changes_the_token(fault: Callable[[Hand], None]) -> None:
    hand = Hand()
    running(hand)
    assert hand.execute(fault) != [token_after(5, [11, 12, 13, 14, 15, 16, 17])]


def copy_missed(hand: Hand) -> None:
    hand.arena.header["copy_count"] = 0


def copy_the_wrong_way(hand: Hand) -> None:
    hand.views["copies"][0] = (8, 4)


def copy_of_another_block(hand: Hand) -> None:
    hand.views["copies"][0] = (3, 8)


def source_freed_before_the_copy(hand: Hand) -> None:
    hand.release(4)


COPY_FAULTS = [copy_missed, copy_the_wrong_way, copy_of_another_block, source_freed_before_the_copy]


@pytest.mark.parametrize("fault", COPY_FAULTS, ids=lambda fault: fault.__name__)
def test_fault_of_a_copy_changes_the_token(fault: Callable[[Hand], None]) -> None:
    hand = Hand()
    forked(hand)
    assert hand.execute(fault) != [token_after(5, [11, 12, 13, 14, 15, 16])]


def test_prefix_that_was_never_computed_changes_the_token() -> None:
    hand = Hand()
    hand.hold(1, 3, 8)
    hand.row(1, SIZE, [15, 16])
    assert hand.execute() != [token_after(0, [11, 12, 13, 14, 15, 16])]


def test_position_counted_as_computed_in_a_block_handed_on_changes_the_token() -> None:
    """The new holder has the very tokens that the last one left behind, and still has to compute them."""
    hand = Hand()
    prompt = [11, 12, 13]
    hand.hold(0, 4)
    hand.row(0, 0, prompt)
    hand.execute()
    hand.row(1, 0, prompt[:1], emits=0)
    hand.hold(1, 4)
    hand.execute()
    hand.row(1, 2, prompt[2:])  # position 1 is skipped
    assert hand.execute() != [token_after(0, prompt)]


def test_two_that_write_one_place_change_the_token() -> None:
    """As if both had forked onto one partial block, and neither had got a copy."""
    hand = Hand()
    running(hand)
    hand.views["block_tables"][0, 1] = 8
    hand.row(0, 6, [28], emits=0)
    assert hand.execute() != [token_after(5, [11, 12, 13, 14, 15, 16, 17])]
