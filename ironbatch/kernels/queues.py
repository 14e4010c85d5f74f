"""The running set and the waiting queue, both sorted by seniority: (priority class, arrival_ns, slot)."""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.blocks import release_blocks
from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.shared import SLOT_PREEMPTIONS, SLOT_WORDS
from ironbatch.kernels.state import (
    COMPUTED,
    FORGET_COUNT,
    NEXT,
    PREEMPTIONS,
    PREVIOUS,
    PRIORITY_CLASS,
    RUNNING_COUNT,
    SEQUENCE_WORDS,
    STATUS,
    STATUS_NONE,
    STATUS_RUNNING,
    STATUS_WAITING,
    WAITING_COUNT,
)
from ironbatch.limits import PRIORITY_CLASSES

METRIC_PREEMPTIONS = layout.word(layout.METRICS, "preemptions")

END = -1


@inline
def is_senior(state, a, b):
    """Whether sequence `a` goes before sequence `b`."""
    class_a = state.sequences[a * SEQUENCE_WORDS + PRIORITY_CLASS]
    class_b = state.sequences[b * SEQUENCE_WORDS + PRIORITY_CLASS]
    if class_a != class_b:
        return class_a < class_b
    if state.arrival_ns[a] != state.arrival_ns[b]:
        return state.arrival_ns[a] < state.arrival_ns[b]
    return a < b


@subroutine
def enqueue(state, sequence):
    """Put `sequence` into its class of the waiting queue, at its place by seniority.

    The place is looked for from the tail, where arrivals belong, unless the head is junior: then it goes there, as the
    preempted do. So both cost a step or two however long the queue is.
    """
    row = sequence * SEQUENCE_WORDS
    rank = state.sequences[row + PRIORITY_CLASS]
    head = state.queue_heads[rank]
    before = state.queue_tails[rank]
    if head != END and is_senior(state, sequence, head):
        before = END
    while before != END and is_senior(state, sequence, before):
        before = state.sequences[before * SEQUENCE_WORDS + PREVIOUS]
    after = head if before == END else state.sequences[before * SEQUENCE_WORDS + NEXT]
    state.sequences[row + PREVIOUS] = before
    state.sequences[row + NEXT] = after
    if before == END:
        state.queue_heads[rank] = sequence
    else:
        state.sequences[before * SEQUENCE_WORDS + NEXT] = sequence
    if after == END:
        state.queue_tails[rank] = sequence
    else:
        state.sequences[after * SEQUENCE_WORDS + PREVIOUS] = sequence
    state.sequences[row + STATUS] = STATUS_WAITING
    state.header[WAITING_COUNT] += 1


@subroutine
def dequeue(state, sequence):
    """Take `sequence`, wherever it stands, out of the waiting queue."""
    row = sequence * SEQUENCE_WORDS
    rank = state.sequences[row + PRIORITY_CLASS]
    before = state.sequences[row + PREVIOUS]
    after = state.sequences[row + NEXT]
    if before == END:
        state.queue_heads[rank] = after
    else:
        state.sequences[before * SEQUENCE_WORDS + NEXT] = after
    if after == END:
        state.queue_tails[rank] = before
    else:
        state.sequences[after * SEQUENCE_WORDS + PREVIOUS] = before
    state.sequences[row + STATUS] = STATUS_NONE
    state.header[WAITING_COUNT] -= 1


@inline
def first_waiting(state, rank):
    """The most senior waiting sequence of class `rank` or a lower one, or END."""
    while rank < PRIORITY_CLASSES:
        if state.queue_heads[rank] != END:
            return state.queue_heads[rank]
        rank += 1
    return END


@inline
def insert_running(state, sequence):
    """Put `sequence` at its place in the running set; at the end, unless its class is higher than another's."""
    k = state.header[RUNNING_COUNT]
    while k > 0 and is_senior(state, sequence, state.running[k - 1]):
        state.running[k] = state.running[k - 1]
        k -= 1
    state.running[k] = sequence
    state.sequences[sequence * SEQUENCE_WORDS + STATUS] = STATUS_RUNNING
    state.header[RUNNING_COUNT] += 1


@subroutine
def remove_running(state, sequence):
    """Take `sequence` out of the running set, which keeps its order. Its blocks are untouched."""
    count = state.header[RUNNING_COUNT]
    kept = 0
    for k in range(count):
        if state.running[k] != sequence:
            state.running[kept] = state.running[k]
            kept += 1
    state.header[RUNNING_COUNT] = kept
    state.sequences[sequence * SEQUENCE_WORDS + STATUS] = STATUS_NONE


@inline
def note_forget(state, sequence):
    """The backend may drop what it keeps for `sequence`; it is told before it executes again."""
    count = state.header[FORGET_COUNT]
    state.forget[count] = sequence
    state.header[FORGET_COUNT] = count + 1


@subroutine
def preempt_newest(state, shared):
    """Preempt the least senior running sequence by recompute: its blocks are free, it waits at its old place.

    Returns the sequence.
    """
    shared.metrics[METRIC_PREEMPTIONS] += 1
    count = state.header[RUNNING_COUNT] - 1
    victim = state.running[count]
    state.header[RUNNING_COUNT] = count
    release_blocks(state, victim)
    row = victim * SEQUENCE_WORDS
    state.sequences[row + COMPUTED] = 0
    state.sequences[row + PREEMPTIONS] += 1
    shared.slots[victim * SLOT_WORDS + SLOT_PREEMPTIONS] = state.sequences[row + PREEMPTIONS]
    note_forget(state, victim)
    enqueue(state, victim)
    return victim
