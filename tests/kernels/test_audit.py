"""The audit finds each fault that it has a name for: one is put into a sound state at a time."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from ironbatch.kernels.arena import Geometry, StateArena
from ironbatch.kernels.audit import audit
from ironbatch.kernels.records import IN_CACHE, STATUS_NONE, STATUS_RUNNING, STATUS_WAITING
from ironbatch.kernels.violations import NOT_INTACT, SOUND, VIOLATIONS
from ironbatch.scheduler.step import AuditFailed
from tests.support import ScriptedBackend, SmallEngine, small_engine

NUM_BLOCKS = 24
RUNNING = 3


def busy_engine(engine: SmallEngine) -> StateArena:
    """Three running sequences of two blocks each (two decode, one still prefills), four waiting ones, free blocks."""
    worker = engine.worker()
    for k in range(RUNNING):
        worker.submit(6, 9, arrival_ns=10 * k)
    for k in range(4):
        worker.submit(6, 9, arrival_ns=100 + 10 * k)
    engine.step()
    arena = engine.scheduler.arena
    assert engine.running() == [0, 1, 2]
    assert engine.waiting() == [3, 4, 5, 6]
    assert arena.header["free_count"] == NUM_BLOCKS - 2 * RUNNING
    return arena


def set_free(arena: StateArena, index: int, block: int) -> None:
    arena.views["free_blocks"][index] = block


def leak(arena: StateArena) -> None:
    arena.header["free_count"] -= 1


def double_free(arena: StateArena) -> None:
    set_free(arena, 1, arena.views["free_blocks"][0])


def free_while_held(arena: StateArena) -> None:
    """As a release that forgets to take the block out of the table."""
    count = arena.header["free_count"]
    block = arena.views["block_tables"][0, 0]
    set_free(arena, count, block)
    arena.views["refcounts"][block] = 0
    arena.header["free_count"] += 1


def alias(arena: StateArena) -> None:
    """Two sequences write the same block; the one that it took the place of is free, so that none is missing."""
    table = arena.views["block_tables"]
    set_free(arena, arena.header["free_count"], table[1, 0])
    arena.views["refcounts"][table[1, 0]] = 0
    arena.header["free_count"] += 1
    table[1, 0] = table[0, 0]


def in_sequence(sequence: int, **fields: int) -> Callable[[StateArena], None]:
    def put(arena: StateArena) -> None:
        for name, value in fields.items():
            arena.views["sequences"][sequence][name] = value

    return put


def in_view(view: str, index: object, value: int) -> Callable[[StateArena], None]:
    def put(arena: StateArena) -> None:
        arena.views[view][index] = value

    return put


def in_header(**fields: int) -> Callable[[StateArena], None]:
    def put(arena: StateArena) -> None:
        for name, value in fields.items():
            arena.header[name] = value

    return put


def swap_running(arena: StateArena) -> None:
    arena.views["running"][:2] = [1, 0]


def swap_waiting(arena: StateArena) -> None:
    """Two waiting sequences change their seniority, but not their places."""
    arrivals = arena.views["arrival_ns"]
    arrivals[3], arrivals[4] = arrivals[4], arrivals[3]


def circle(arena: StateArena) -> None:
    sequences = arena.views["sequences"]
    sequences[6]["next"] = 3
    sequences[3]["previous"] = 6


def table_without_end(arena: StateArena) -> None:
    in_sequence(0, block_count=3)(arena)
    arena.views["block_tables"][0, 2] = NUM_BLOCKS


def forgotten_blocks(arena: StateArena) -> None:
    """A sequence that has ended keeps its blocks."""
    in_sequence(2, status=STATUS_NONE)(arena)
    arena.header["running_count"] -= 1


FAULTS: dict[str, tuple[int, Callable[[StateArena], None]]] = {
    "negative id in the free list": (1, in_view("free_blocks", 0, -1)),
    "id past the pool in the free list": (1, in_view("free_blocks", 0, NUM_BLOCKS)),
    "more free ids than blocks": (1, in_header(free_count=NUM_BLOCKS + 1)),
    "negative number of free ids": (1, in_header(free_count=-1)),
    "double free": (2, double_free),
    "free block with a reference": (3, in_view("refcounts", NUM_BLOCKS - 1, 1)),
    "negative id in a table": (4, in_view("block_tables", (1, 0), -1)),
    "id past the pool in a table": (4, table_without_end),
    "reference too many": (5, in_view("refcounts", 0, 2)),
    "reference too few": (5, in_view("refcounts", 0, 0)),
    "freed while it is held": (5, free_while_held),
    "aliased block": (5, alias),
    "leak": (6, leak),
    "context without blocks": (7, in_sequence(0, produced_tokens=3)),
    "running set not sorted": (8, swap_running),
    "running set over its limit": (8, in_header(running_limit=RUNNING - 1)),
    "member of the running set that waits": (9, in_sequence(1, status=STATUS_WAITING)),
    "running sequence outside the set": (9, in_sequence(12, status=STATUS_RUNNING)),
    "blocks of an ended sequence": (9, forgotten_blocks),
    "waiting queue not sorted": (10, swap_waiting),
    "waiting count": (11, in_header(waiting_count=5)),
    "broken link": (11, in_sequence(4, previous=5)),
    "wrong tail": (11, in_view("queue_tails", 8, 5)),
    "wrong class": (11, in_sequence(4, priority_class=0)),
    "idle sequence in the queue": (11, in_sequence(4, status=STATUS_NONE)),
    "links in a circle": (11, circle),
    "waiting with computed tokens": (12, in_sequence(5, computed_tokens=1)),
    "computed past the context": (13, in_sequence(0, computed_tokens=7)),
    "computed below nothing": (13, in_sequence(0, computed_tokens=-1)),
    "produced what was asked for, and still runs": (13, in_sequence(0, produced_tokens=1, max_new_tokens=1)),
}


def hold_blocks_while_waiting(arena: StateArena) -> None:
    block = arena.views["free_blocks"][arena.header["free_count"] - 1]
    arena.header["free_count"] -= 1
    arena.views["refcounts"][block] = 1
    arena.views["block_tables"][4, 0] = block
    in_sequence(4, block_count=1)(arena)


FAULTS["waiting with blocks"] = (12, hold_blocks_while_waiting)


# ------------------------------------------------------------------------------------- what is shared, cached, promised

HELD, PARENT, FORK = 0, 1, 2  # slots of the running sequences


def sharing_engine(engine: SmallEngine) -> StateArena:
    """A chain of evictable blocks; a running sequence with a chain of cached ones; a group that prefills."""
    worker = engine.worker()
    for first_token in (100, 0):
        worker.submit(13, 1, prompt_token_ids=list(range(first_token, first_token + 13)))
        engine.step()
        worker.collect()
    worker.submit(13, 20, prompt_token_ids=list(range(13)))
    worker.submit_group(30, 8, 2, arrival_ns=5)
    engine.step()
    arena = engine.scheduler.arena
    assert engine.running() == [HELD, PARENT, FORK]
    assert [arena.header[name] for name in ("evictable_count", "pending_forks")] == [3, 1]
    assert arena.views["sequences"][HELD]["cached_blocks"] == 3
    return arena


def chain(arena: StateArena) -> list[int]:
    """The evictable blocks, the oldest first, which is the chain's last."""
    blocks = [int(arena.header["oldest"])]
    while len(blocks) < 3:
        blocks.append(int(arena.views["cached_blocks"][blocks[-1]]["newer"]))
    return blocks


def in_chain(place: int, **fields: int) -> Callable[[StateArena], None]:
    """Change the record of one of the evictable blocks."""

    def put(arena: StateArena) -> None:
        for name, value in fields.items():
            arena.views["cached_blocks"][chain(arena)[place]][name] = value

    return put


def in_fork(sequence: int, **fields: int) -> Callable[[StateArena], None]:
    def put(arena: StateArena) -> None:
        for name, value in fields.items():
            arena.views["forks"][sequence][name] = value

    return put


def cache_what_is_written(arena: StateArena) -> None:
    arena.views["refcounts"][arena.views["block_tables"][HELD, 3]] |= IN_CACHE


def share_what_is_written(arena: StateArena) -> None:
    """Two tables, two references: but both will write it."""
    tables, count = arena.views["block_tables"], arena.header["free_count"]
    freed, shared = tables[PARENT, 7], tables[HELD, 3]
    arena.views["refcounts"][[freed, shared]] = [0, 2]
    set_free(arena, count, freed)
    arena.header["free_count"] += 1
    tables[PARENT, 7] = shared


def forget_in_index(arena: StateArena) -> None:
    """A block without a record of its bucket: a hit that will never be found, and an eviction that finds no end."""
    index = arena.views["index"]
    block = chain(arena)[0]
    bucket = int(arena.views["cached_blocks"][block]["hash"]) & (len(index) - 1)
    index[bucket] = -1


def change_content(arena: StateArena) -> None:
    arena.views["block_tokens"][chain(arena)[1], 2] += 1


def evict_parents_first(arena: StateArena) -> None:
    """The eviction list the other way round, its links sound."""
    blocks = chain(arena)[::-1]
    arena.header["oldest"], arena.header["newest"] = blocks[0], blocks[-1]
    for block, older, newer in zip(blocks, [-1, *blocks], [*blocks[1:], -1], strict=False):
        arena.views["cached_blocks"][block]["older"] = older
        arena.views["cached_blocks"][block]["newer"] = newer


def swap_chain(arena: StateArena) -> None:
    table = arena.views["block_tables"][HELD]
    table[:2] = table[[1, 0]].copy()


SHARING_FAULTS: dict[str, tuple[int, Callable[[StateArena], None]]] = {
    "table past its row": (4, in_sequence(HELD, block_count=1000)),
    "block in the cache that will be written": (14, cache_what_is_written),
    "block in two tables that will be written": (14, share_what_is_written),
    "evictable count": (15, in_header(evictable_count=2)),
    "eviction list's oldest": (15, in_header(oldest=-1)),
    "eviction list's newest": (15, in_header(newest=20)),
    "eviction list in a circle": (15, lambda arena: in_chain(2, newer=chain(arena)[0])(arena)),
    "eviction list's link back": (15, in_chain(1, older=7)),
    "not in the index": (16, forget_in_index),
    "uid of nothing": (16, in_chain(0, uid=0)),
    "index in a circle": (16, lambda arena: in_chain(0, bucket_next=chain(arena)[0])(arena)),
    "index past the pool": (16, in_chain(0, bucket_next=NUM_BLOCKS)),
    "stale content": (17, change_content),
    "parent that is gone": (18, in_chain(0, parent_a=999)),
    "parent that is no block": (18, in_chain(0, parent_block=NUM_BLOCKS)),
    "parents evicted first": (18, evict_parents_first),
    "more cached than registered": (19, in_sequence(HELD, cached_blocks=4)),
    "chain out of order": (19, swap_chain),
    "promise": (20, in_header(reserved_count=0)),
    "pending forks": (20, in_header(pending_forks=0)),
    "owed copies": (20, in_header(owed_copies=1)),
    "number of forks": (20, in_fork(PARENT, fork_count=2)),
    "parent without its fork": (20, in_fork(PARENT, first_fork=-1)),
    "fork of somebody else": (20, in_fork(FORK, parent=HELD)),
    "group without its mark": (20, in_sequence(PARENT, flags=0)),
    "promise to nobody": (20, in_fork(HELD, reserved_blocks=1)),
    "lane that is none": (13, in_sequence(HELD, lane=99)),
    **{
        f"{name} that is not the slot's": (21, in_sequence(HELD, **{name: value}))
        for name, value in {"generation": 9, "max_new_tokens": 19, "first_class": 9, "lane": 1}.items()
    },
    "seed that is not the slot's": (21, in_view("seeds", HELD, 77)),
    "arrival that is not the slot's": (21, in_view("arrival_ns", HELD, -1)),
    "lane of a fork that is not the slot's": (21, in_sequence(FORK, lane=1)),
}


AUDITED_TABLES = (
    *("sequences", "forks", "running", "queue_heads", "queue_tails", "free_blocks", "refcounts", "block_tables"),
    *("cached_blocks", "block_tokens", "index"),
)
AUDITED_COUNTS = (
    *("running_count", "waiting_count", "free_count", "evictable_count", "reserved_count", "pending_forks"),
    *("owed_copies", "oldest", "newest"),
)


def run_audit(engine: SmallEngine) -> int:
    return int(audit(engine.scheduler.arena.address, engine.segment.address, np.zeros(NUM_BLOCKS, np.int32)))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    key, put = FAULTS[fault]
    with small_engine(ScriptedBackend, total_kv_blocks=NUM_BLOCKS, max_running_seqs=RUNNING) as engine:
        arena = busy_engine(engine)
        assert run_audit(engine) == SOUND
        put(arena)
        assert VIOLATIONS.get(run_audit(engine)) == VIOLATIONS[key]
        assert run_audit(engine) == key


@pytest.mark.parametrize("fault", SHARING_FAULTS)
def test_fault_of_sharing_is_found(fault: str) -> None:
    key, put = SHARING_FAULTS[fault]
    with small_engine(ScriptedBackend, total_kv_blocks=NUM_BLOCKS, kv_block_size=4) as engine:
        arena = sharing_engine(engine)
        assert run_audit(engine) == SOUND
        put(arena)
        assert VIOLATIONS.get(run_audit(engine)) == VIOLATIONS[key]
        assert run_audit(engine) == key


WILD = (-(2**31), -2, 2**31 - 1)


@pytest.mark.parametrize("wild", WILD)
def test_nothing_in_the_arena_leads_the_audit_out_of_it(wild: int) -> None:
    """Every word of every table in turn is garbage. (In the leg with bounds checks an index past a table raises.)"""
    with small_engine(ScriptedBackend, total_kv_blocks=NUM_BLOCKS, kv_block_size=4) as engine:
        arena = sharing_engine(engine)
        for name in AUDITED_TABLES:
            table = arena.views[name]
            words = table.view(np.int64 if name == "cached_blocks" else np.int32).reshape(-1)
            for k in range(len(words)):
                before = words[k]
                words[k] = wild
                run_audit(engine)
                words[k] = before
        for name in AUDITED_COUNTS:
            before = int(arena.header[name])
            arena.header[name] = wild
            run_audit(engine)
            arena.header[name] = before
        assert run_audit(engine) == SOUND


def test_each_violation_is_shown_by_a_fault() -> None:
    assert {key for key, _ in [*FAULTS.values(), *SHARING_FAULTS.values()]} == set(VIOLATIONS) - {NOT_INTACT}


@pytest.mark.parametrize("name", [*Geometry._fields, "sequences", "index", "kv_slot_mapping"])
def test_sizes_and_offsets_that_kernels_trust_are_compared_first(name: str) -> None:
    if name == "sequence_buckets":
        name = "bucket_count"
    with small_engine(ScriptedBackend) as engine:
        engine.scheduler.audit()
        engine.scheduler.arena.header[name] += 1
        with pytest.raises(AuditFailed, match=re.escape(VIOLATIONS[NOT_INTACT])):
            engine.scheduler.audit()


def test_blocks_that_are_shared_rightly_are_sound() -> None:
    with small_engine(ScriptedBackend, total_kv_blocks=NUM_BLOCKS, max_running_seqs=RUNNING) as engine:
        arena = busy_engine(engine)
        alias(arena)
        arena.views["refcounts"][arena.views["block_tables"][0, 0]] = 2
        assert run_audit(engine) == SOUND


def test_audit_does_not_depend_on_what_its_scratch_holds() -> None:
    with small_engine(ScriptedBackend, total_kv_blocks=NUM_BLOCKS, max_running_seqs=RUNNING) as engine:
        arena = busy_engine(engine)
        assert audit(arena.address, engine.segment.address, np.full(NUM_BLOCKS, 77, np.int32)) == SOUND
