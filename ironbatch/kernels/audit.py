"""The invariants of the scheduler's state, re-derived from scratch: in tests after every step, in production at times.

What is derived from what: reference counts from block tables and owed copies; free list and eviction list from the
reference counts; the cache's index from the blocks' records; a record's hash from its tokens and its parent's.
"""

from __future__ import annotations

from ironbatch.kernels.audit_blocks import audit_free, audit_references, audit_writable, count_references
from ironbatch.kernels.audit_cache import audit_chains, audit_contents, audit_eviction_list, audit_index
from ironbatch.kernels.audit_sequences import audit_groups, audit_running, audit_slots, audit_statuses, audit_waiting
from ironbatch.kernels.jit import kernel, subroutine
from ironbatch.kernels.shared import open_shared
from ironbatch.kernels.state import PREFIX_CACHE, WAITING_COUNT, open_state
from ironbatch.kernels.violations import SOUND


@subroutine
def audit_block_ledger(state, scratch):
    """Everything about blocks, in the order in which one check relies on another."""
    violation = audit_free(state, scratch)
    if violation == SOUND:
        violation = count_references(state, scratch)
    if violation == SOUND:
        violation = audit_references(state, scratch)
    if violation == SOUND:
        violation = audit_writable(state)
    if violation != SOUND or state.header[PREFIX_CACHE] == 0:
        return violation
    violation = audit_eviction_list(state, scratch)
    if violation == SOUND:
        violation = audit_index(state)
    if violation == SOUND:
        violation = audit_contents(state, scratch)
    if violation == SOUND:
        violation = audit_chains(state)
    return violation


@kernel("int64(intp, intp, int32[::1])")
def audit(state_address, segment_address, scratch):
    """Check every invariant between steps. `scratch`: int32[num_blocks]. Returns SOUND or a key of VIOLATIONS.

    The arena's sizes and offsets are taken for granted here: see `StateArena.is_intact`.
    """
    state = open_state(state_address)
    shared = open_shared(segment_address)
    violation = audit_running(state)
    if violation == SOUND:
        violation = audit_block_ledger(state, scratch)
    if violation != SOUND:
        return violation
    waiting = audit_waiting(state)
    if waiting < 0:
        return -waiting
    if waiting != state.header[WAITING_COUNT]:
        return 11
    violation = audit_statuses(state)
    if violation == SOUND:
        violation = audit_groups(state)
    return violation if violation != SOUND else audit_slots(state, shared)
