"""The audit finds each fault that it has a name for: one is put into a sound state at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ironbatch.kernels.audit import SOUND, VIOLATIONS, audit
from ironbatch.kernels.state import STATUS_NONE, STATUS_RUNNING, STATUS_WAITING, StateArena
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


def run_audit(arena: StateArena) -> int:
    return int(audit(arena.address, np.zeros(NUM_BLOCKS, np.int32)))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    key, put = FAULTS[fault]
    with small_engine(ScriptedBackend, total_kv_blocks=NUM_BLOCKS, max_running_seqs=RUNNING) as engine:
        arena = busy_engine(engine)
        assert run_audit(arena) == SOUND
        put(arena)
        assert VIOLATIONS.get(run_audit(arena)) == VIOLATIONS[key]
        assert run_audit(arena) == key


def test_each_violation_is_shown_by_a_fault() -> None:
    assert {key for key, _ in FAULTS.values()} == set(VIOLATIONS)


def test_blocks_that_are_shared_rightly_are_sound() -> None:
    with small_engine(ScriptedBackend, total_kv_blocks=NUM_BLOCKS, max_running_seqs=RUNNING) as engine:
        arena = busy_engine(engine)
        alias(arena)
        arena.views["refcounts"][arena.views["block_tables"][0, 0]] = 2
        assert run_audit(arena) == SOUND


def test_audit_does_not_depend_on_what_its_scratch_holds() -> None:
    with small_engine(ScriptedBackend, total_kv_blocks=NUM_BLOCKS, max_running_seqs=RUNNING) as engine:
        arena = busy_engine(engine)
        assert audit(arena.address, np.full(NUM_BLOCKS, 77, np.int32)) == SOUND
