"""How a sequence ends before its time, or leaves the running set to come back."""

from __future__ import annotations

import numpy as np

from ironbatch import layout
from ironbatch.kernels.atomics import store_release
from ironbatch.kernels.blocks import release_blocks
from ironbatch.kernels.forks import is_in_group, leave_group
from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.prefix import register_prefix
from ironbatch.kernels.queues import dequeue, enqueue, note_forget, note_preemption, remove_running
from ironbatch.kernels.records import (
    COMPUTED,
    PRODUCED,
    SEQUENCE_WORDS,
    STATUS,
    STATUS_RUNNING,
    STATUS_WAITING,
)
from ironbatch.kernels.shared import (
    ERROR_CODE,
    GENERATION,
    OWNER,
    PUBLISHED,
    SLOT_WORDS,
    lane_of_owner,
    published_word,
)
from ironbatch.kernels.waits import end_wait

METRIC_ABORTED = layout.word(layout.METRICS, "sequences_aborted")
METRIC_FAILED = layout.word(layout.METRICS, "sequences_failed")

# As words and not as constants, of which numba would compile a version each.
KV_GOOD = np.int64(1)
KV_LOST = np.int64(0)


@inline
def leave_running(state, shared, sequence, is_kv_good):
    """Take a running sequence out of the set and its group, and free its blocks.

    What it has computed is registered in the prefix cache first, unless the KV is lost or in doubt.
    """
    if is_in_group(state, sequence):
        leave_group(state, shared, sequence)
    if is_kv_good != 0:
        register_prefix(state, shared, sequence)
    release_blocks(state, sequence)
    remove_running(state, sequence)
    note_forget(state, sequence)


@subroutine
def detach(state, shared, sequence, is_kv_good):
    """Take a live sequence out of the queue or the running set and free its blocks."""
    status = state.sequences[sequence * SEQUENCE_WORDS + STATUS]
    if status == STATUS_WAITING:
        dequeue(state, sequence)
        end_wait(state, shared, sequence)
        if is_in_group(state, sequence):
            leave_group(state, shared, sequence)
    elif status == STATUS_RUNNING:
        leave_running(state, shared, sequence, is_kv_good)


@inline
def publish_end(state, shared, slot, produced, reason, error_code):
    """Store a slot's last word; after it the scheduler does not touch the slot again."""
    row = slot * SLOT_WORDS
    shared.slots[row + ERROR_CODE] = error_code
    word = published_word(shared.slots[row + GENERATION], reason, produced)
    store_release(shared.slots, row + PUBLISHED, word)
    state.lane_news[lane_of_owner(shared.slots[row + OWNER])] = 1
    if reason == layout.FINISH_CANCELLED:
        shared.metrics[METRIC_ABORTED] += 1
    elif reason == layout.FINISH_ERROR:
        shared.metrics[METRIC_FAILED] += 1


@subroutine
def end_sequence(state, shared, sequence, reason, error_code):
    """End a live sequence before its time and publish why. After an error of the backend its KV is in doubt."""
    produced = state.sequences[sequence * SEQUENCE_WORDS + PRODUCED]
    detach(state, shared, sequence, np.int64(reason != layout.FINISH_ERROR))
    publish_end(state, shared, sequence, produced, reason, error_code)


@subroutine
def preempt(state, shared, victim, is_kv_good):
    """Preempt a running sequence by recompute: its blocks are released, it waits at its old place."""
    leave_running(state, shared, victim, is_kv_good)
    note_preemption(state, shared, victim)
    state.sequences[victim * SEQUENCE_WORDS + COMPUTED] = 0
    enqueue(state, victim)
