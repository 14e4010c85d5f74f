"""The shared layout: who writes which cache line, and where the tables stand for any configuration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch import layout, limits
from ironbatch.config import Config

CREATOR, SUPERVISOR, SCHEDULER, OWNER, ARBITER, WORKER, ANYONE = (
    "creator",
    "supervisor",
    "scheduler",
    "the slot's owner",
    "arbiter",
    "worker",
    "anyone, by exchange",
)

# Every shared word, with its one writer; a word that is missing here fails the test below. `owner` is given back by the
# scheduler when its worker has died, and a sleeping flag is taken back by whoever rings: both by atomic operations.
WRITERS: dict[str, dict[str, str]] = {
    "HEADER": {
        **dict.fromkeys(
            [
                "magic",
                "layout_version",
                "segment_bytes",
                "num_slots",
                "num_lanes",
                "lane_entries",
                "max_model_len",
                "token_row_tokens",
                "lanes_offset",
                "entries_offset",
                "slots_offset",
                "tokens_offset",
                "metrics_offset",
                "max_request_tokens",
                "created_ns",
                "running_offset",
                "texts_offset",
                "text_row_bytes",
            ],
            CREATOR,
        ),
        **dict.fromkeys(["epoch", "draining", "streams_end_ns", "device_hung"], SUPERVISOR),
        **dict.fromkeys(
            [
                "heartbeat_ns",
                "scheduler_ready",
                "step_started_ns",
                "in_device_call",
                "longest_step_ns",
                "scheduler_pid",
                "longest_request_tokens",
                "most_choices",
                "usable_slots",
                "backend_problem",
                "listed_epoch",
                "listed_count",
                "in_quarantine",
            ],
            SCHEDULER,
        ),
        "scheduler_sleeping": ANYONE,
    },
    "LANE": {
        "tail": WORKER,
        **dict.fromkeys(["head", "reaped_generation"], SCHEDULER),
        "worker_sleeping": ANYONE,
        **dict.fromkeys(["generation", "dead_generation"], ARBITER),
        **dict.fromkeys(["worker_pid", "serving_generation", "drained_generation"], WORKER),
    },
    "SLOT": {
        **dict.fromkeys(
            [
                "owner",
                "generation",
                "submitted",
                "cancelled",
                "arrival_ns",
                "seed",
                "prompt_tokens",
                "max_new_tokens",
                "priority",
                "flags",
                "choice_index",
                "parent_slot",
                "deadline_ns",
                "temperature",
                "top_p",
                "top_k",
                "next_choice",
                "salt_a",
                "salt_b",
            ],
            OWNER,
        ),
        **dict.fromkeys(
            [
                "published",
                "error_code",
                "preemptions",
                "suspicion",
                "admitted_generation",
                "cached_tokens",
                *(f"waited_{reason}_ns" for reason in layout.WAIT_REASONS),
            ],
            SCHEDULER,
        ),
    },
}


def fields_of(dtype: np.dtype[np.void]) -> dict[str, tuple[int, int]]:
    """Name -> first byte, byte after the last."""
    assert dtype.fields is not None
    return {name: (int(place), int(place) + field.itemsize) for name, (field, place) in dtype.fields.items()}


TABLES = {"HEADER": layout.HEADER, "LANE": layout.LANE, "SLOT": layout.SLOT, "METRICS": layout.METRICS}


@pytest.mark.parametrize("table", WRITERS)
def test_no_two_writers_share_a_cache_line(table: str) -> None:
    fields = fields_of(TABLES[table])
    assert fields.keys() == WRITERS[table].keys(), "a word without a writer, or a writer without a word"
    writers: dict[int, set[str]] = {}
    for name, (start, end) in fields.items():
        for line in range(start // layout.CACHE_LINE_BYTES, -(-end // layout.CACHE_LINE_BYTES)):
            writers.setdefault(line, set()).add(WRITERS[table][name])
    assert all(len(who) == 1 for who in writers.values()), writers


@pytest.mark.parametrize("table", TABLES)
def test_rows_are_whole_lines_and_fields_are_aligned_words_that_do_not_overlap(table: str) -> None:
    dtype = TABLES[table]
    assert dtype.itemsize % layout.CACHE_LINE_BYTES == 0
    spans = sorted(fields_of(dtype).values())
    assert all(start % layout.WORD_BYTES == 0 and (end - start) % layout.WORD_BYTES == 0 for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[0][0] == 0
    assert spans[-1][1] <= dtype.itemsize


def test_the_sleeping_flags_have_lines_of_their_own() -> None:
    """Whoever rings writes them: they would take the line away from the cursors beside them."""
    for dtype, flag in ((layout.HEADER, "scheduler_sleeping"), (layout.LANE, "worker_sleeping")):
        fields = fields_of(dtype)
        line = fields[flag][0] // layout.CACHE_LINE_BYTES
        assert [name for name, (start, _) in fields.items() if start // layout.CACHE_LINE_BYTES == line] == [flag]


def test_word_is_an_index_in_words() -> None:
    assert layout.word(layout.HEADER, "magic") == 0
    assert layout.word(layout.HEADER, "layout_version") == 1
    for dtype in TABLES.values():
        for name, (start, _) in fields_of(dtype).items():
            assert layout.word(dtype, name) * layout.WORD_BYTES == start


def test_the_magic_reads_as_text() -> None:
    assert layout.MAGIC.to_bytes(8, "little") == b"INBATCH1" or layout.MAGIC.to_bytes(8, "big") == b"INBATCH1"


def test_every_finish_and_error_has_its_own_number() -> None:
    finishes = [value for name, value in vars(layout).items() if name.startswith("FINISH_")]
    errors = [value for name, value in vars(layout).items() if name.startswith("ERROR_") and isinstance(value, int)]
    assert len(set(finishes)) == len(finishes)
    assert len(set(errors)) == len(errors)
    assert set(layout.ERROR_MESSAGES) == set(errors) - {layout.ERROR_NONE}
    assert all(0 <= value < 256 for value in finishes), "eight bits of the published word"
    assert all(message.isascii() and '"' not in message and "\\" not in message for message in errors_as_sent())


def test_waits_are_counted_by_reason_in_one_order() -> None:
    """Kernels find a reason's word by its number, from the first one on."""
    reasons = {name: value for name, value in vars(layout).items() if name.startswith("WAIT_") and name.isupper()}
    del reasons["WAIT_REASONS"]
    assert reasons == {f"WAIT_{reason.upper()}": k for k, reason in enumerate(layout.WAIT_REASONS)}
    for dtype, unit in ((layout.SLOT, "ns"), (layout.METRICS, "us")):
        words = [layout.word(dtype, f"waited_{reason}_{unit}") for reason in layout.WAIT_REASONS]
        assert words == list(range(words[0], words[0] + len(words)))


def errors_as_sent() -> list[str]:
    """They are put into a line of JSON as they are."""
    return list(layout.ERROR_MESSAGES.values())


def test_a_published_word_holds_the_longest_sequence() -> None:
    assert limits.MAX_MODEL_LEN.high <= layout.PUBLISHED_PRODUCED_MASK
    largest = (layout.GENERATION_MASK << layout.PUBLISHED_GENERATION_SHIFT) | (
        1 << layout.PUBLISHED_GENERATION_SHIFT
    ) - 1
    assert largest < 2**63


@given(st.integers(0, limits.num_lanes(limits.WORKERS.high) - 1), st.integers(1, 2**40))
def test_owner_words_are_not_zero_and_name_their_owner(lane: int, generation: int) -> None:
    word = layout.owner_word(lane, generation)
    assert 0 < word < 2**63
    assert (word & layout.OWNER_LANE_MASK) - 1 == lane
    assert word >> layout.OWNER_LANE_BITS == generation


# --------------------------------------------------------------------------------------------------------- offsets

lengths = st.integers(limits.MAX_MODEL_LEN.low, limits.MAX_MODEL_LEN.high) | st.integers(1, 5000)
sizes = st.fixed_dictionaries(
    {
        "num_slots": st.integers(1, limits.MAX_SLOTS) | st.integers(1, 2000),
        "num_lanes": st.integers(limits.num_lanes(1), limits.num_lanes(limits.WORKERS.high)),
        "max_model_len": lengths,
    }
)


@given(sizes)
def test_tables_follow_each_other_without_overlap(sizes: dict[str, int]) -> None:
    slots, lanes, longest = sizes["num_slots"], sizes["num_lanes"], sizes["max_model_len"]
    where = layout.offsets(**sizes)
    tables = [
        (0, layout.HEADER.itemsize),
        (where.lanes, lanes * layout.LANE.itemsize),
        (where.entries, lanes * layout.lane_entries(slots) * layout.LANE_ENTRY.itemsize),
        (where.slots, slots * layout.SLOT.itemsize),
        (where.tokens, slots * layout.token_row_tokens(longest) * layout.TOKEN_BYTES),
        (where.running, layout.running_bytes(slots)),
        (where.metrics, (1 + lanes) * layout.METRICS.itemsize),
        (where.total, 0),
    ]
    for (start, length), (following, _) in itertools.pairwise(tables):
        assert start + length == following, "neither an overlap nor a gap"
        assert following % layout.CACHE_LINE_BYTES == 0
    assert layout.segment_bytes(**sizes) == where.total


@given(st.integers(1, limits.MAX_SLOTS))
def test_a_lane_holds_four_entries_a_slot_and_is_a_power_of_two(num_slots: int) -> None:
    entries = layout.lane_entries(num_slots)
    assert limits.is_power_of_two(entries)
    assert layout.LANE_ENTRIES_PER_SLOT * num_slots <= entries < 2 * layout.LANE_ENTRIES_PER_SLOT * num_slots


@given(lengths)
def test_a_token_row_holds_the_longest_sequence_in_whole_lines(max_model_len: int) -> None:
    row_bytes = layout.token_row_tokens(max_model_len) * layout.TOKEN_BYTES
    assert row_bytes % layout.CACHE_LINE_BYTES == 0
    assert max_model_len * layout.TOKEN_BYTES <= row_bytes < max_model_len * layout.TOKEN_BYTES + 2 * 64 + 1


@given(st.integers(1, limits.MAX_SLOTS))
def test_the_table_of_the_running_holds_every_slot_in_whole_lines(num_slots: int) -> None:
    length = layout.running_bytes(num_slots)
    assert length % layout.CACHE_LINE_BYTES == 0
    assert 4 * num_slots <= length < 4 * num_slots + layout.CACHE_LINE_BYTES


def test_a_suspicion_holds_the_longest_sequence_and_each_count() -> None:
    produced_bits = layout.SUSPICION_EPOCH_SHIFT - layout.SUSPICION_PRODUCED_SHIFT
    assert (1 << produced_bits) - 1 == layout.PUBLISHED_PRODUCED_MASK
    assert (1 << layout.SUSPICION_ALONE_SHIFT) - 1 == layout.SUSPICION_DEATHS_MASK
    assert layout.SUSPICION_DEATHS_MASK << layout.SUSPICION_ALONE_SHIFT < 1 << layout.SUSPICION_PRODUCED_SHIFT


@pytest.mark.parametrize("max_model_len", [2**k for k in range(4, 21)])
def test_the_usual_lengths_do_not_make_a_stride_that_is_a_power_of_two(max_model_len: int) -> None:
    row_bytes = layout.token_row_tokens(max_model_len) * layout.TOKEN_BYTES
    assert not limits.is_power_of_two(row_bytes) or row_bytes < 4096


def test_no_length_makes_all_rows_fall_on_the_same_cache_sets() -> None:
    strides = {length: layout.token_row_tokens(length) * layout.TOKEN_BYTES for length in range(1, 40_000)}
    colliding = [length for length, stride in strides.items() if stride % 4096 == 0]
    assert colliding == []


@given(
    st.integers(1, 500),
    st.integers(0, 2000),
    st.integers(1, 64),
    st.integers(2, 20_000),
)
def test_what_the_configuration_estimates_is_near_the_truth(
    running: int, queued: int, workers: int, max_model_len: int
) -> None:
    """`limits.approximate_segment_bytes` bounds a segment before the layout is known."""
    config = Config(max_running_seqs=running, max_queued_requests=queued, workers=workers, max_model_len=max_model_len)
    exact = layout.segment_bytes(
        num_slots=config.num_slots, num_lanes=config.num_lanes, max_model_len=config.max_model_len
    )
    rest = (1 + config.num_lanes) * (layout.METRICS.itemsize + layout.LANE.itemsize)
    rest += config.num_lanes * layout.lane_entries(config.num_slots) * layout.LANE_ENTRY.itemsize
    estimate = limits.approximate_segment_bytes(config.num_slots, config.max_model_len)
    rest += layout.running_bytes(config.num_slots)
    padding = 2 * layout.CACHE_LINE_BYTES * config.num_slots
    assert estimate <= exact <= estimate + padding + rest + layout.HEADER.itemsize


def test_the_defaults_fit_a_containers_shm() -> None:
    config = Config()
    total = layout.segment_bytes(
        num_slots=config.num_slots, num_lanes=config.num_lanes, max_model_len=config.max_model_len
    )
    assert total < 32 * 2**20
