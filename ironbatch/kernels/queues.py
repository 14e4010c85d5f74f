"""The running set and the waiting queue, both sorted by seniority: (priority class, arrival_ns, slot)."""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.records import (
    COMPUTED,
    FIRST_CLASS,
    NEXT,
    NOBODY,
    PREEMPTIONS,
    PREVIOUS,
    PRIORITY_CLASS,
    PRODUCED,
    PROMPT,
    SEQUENCE_WORDS,
    STATUS,
    STATUS_NONE,
    STATUS_RUNNING,
    STATUS_WAITING,
)
from ironbatch.kernels.shared import SLOT_PREEMPTIONS, SLOT_WORDS
from ironbatch.kernels.state import (
    AGING_NS,
    BLOCKED_SEQUENCE,
    DENIED_SEQUENCE,
    FORGET_COUNT,
    NEXT_AGING_NS,
    RUNNING_CHANGED,
    RUNNING_COUNT,
    WAITING_COUNT,
)
from ironbatch.kernels.waits import begin_wait
from ironbatch.limits import PRIORITY_CLASSES

METRIC_PREEMPTIONS = layout.word(layout.METRICS, "preemptions")

END = NOBODY
NEVER_NS = (1 << 63) - 1


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
def link(state, sequence):
    """Put `sequence` into the queue of its class, at its place by seniority.

    The place is looked for from the tail, where arrivals belong, unless the head is junior: then it goes there, as the
    preempted do. So both cost a step or two however long the queue is.
    """
    rank = state.sequences[sequence * SEQUENCE_WORDS + PRIORITY_CLASS]
    head = state.queue_heads[rank]
    before = state.queue_tails[rank]
    if head != END and is_senior(state, sequence, head):
        before = END
    while before != END and is_senior(state, sequence, before):
        before = state.sequences[before * SEQUENCE_WORDS + PREVIOUS]
    link_behind(state, sequence, before)


@inline
def link_behind(state, sequence, before):
    """Put `sequence` into the queue of its class behind `before`; with END, in front of all."""
    row = sequence * SEQUENCE_WORDS
    rank = state.sequences[row + PRIORITY_CLASS]
    after = state.queue_heads[rank] if before == END else state.sequences[before * SEQUENCE_WORDS + NEXT]
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


@subroutine
def unlink(state, sequence):
    """Take `sequence` out of the queue of its class, wherever it stands."""
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
    if state.header[BLOCKED_SEQUENCE] == sequence:
        state.header[BLOCKED_SEQUENCE] = NOBODY
    if state.header[DENIED_SEQUENCE] == sequence:
        state.header[DENIED_SEQUENCE] = NOBODY


@inline
def enqueue(state, sequence):
    """`sequence` waits from now on."""
    link(state, sequence)
    begin_wait(state, sequence)
    note_aging(state, sequence)
    state.sequences[sequence * SEQUENCE_WORDS + STATUS] = STATUS_WAITING
    state.header[WAITING_COUNT] += 1


@inline
def dequeue(state, sequence):
    """`sequence` waits no more."""
    unlink(state, sequence)
    state.sequences[sequence * SEQUENCE_WORDS + STATUS] = STATUS_NONE
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
def next_waiting(state, sequence):
    """Who comes after `sequence` in the queue, or END."""
    after = state.sequences[sequence * SEQUENCE_WORDS + NEXT]
    if after != END:
        return after
    return first_waiting(state, state.sequences[sequence * SEQUENCE_WORDS + PRIORITY_CLASS] + 1)


@inline
def remaining_tokens(state, sequence):
    """Positions of the sequence's context whose KV is not computed; 1 means that it decodes."""
    row = sequence * SEQUENCE_WORDS
    return state.sequences[row + PROMPT] + state.sequences[row + PRODUCED] - state.sequences[row + COMPUTED]


@inline
def insert_running(state, sequence):
    """Put `sequence` at its place in the running set; at the end, unless it is senior to another."""
    k = state.header[RUNNING_COUNT]
    while k > 0 and is_senior(state, sequence, state.running[k - 1]):
        state.running[k] = state.running[k - 1]
        k -= 1
    state.running[k] = sequence
    state.sequences[sequence * SEQUENCE_WORDS + STATUS] = STATUS_RUNNING
    state.header[RUNNING_COUNT] += 1
    state.header[RUNNING_CHANGED] = 1


@subroutine
def remove_running(state, sequence):
    """Take `sequence` out of the running set, which keeps its order. Its blocks are untouched."""
    count = state.header[RUNNING_COUNT]
    kept = count - 1 if state.running[count - 1] == sequence else 0  # the last one goes most often
    for k in range(0 if kept == 0 else count, count):
        if state.running[k] != sequence:
            state.running[kept] = state.running[k]
            kept += 1
    state.header[RUNNING_COUNT] = kept
    state.header[RUNNING_CHANGED] = 1
    state.sequences[sequence * SEQUENCE_WORDS + STATUS] = STATUS_NONE


@inline
def aged_class(state, sequence, now_ns):
    """The class that `sequence` has by now: one less for each span of ageing since its arrival."""
    spans = max(now_ns - state.arrival_ns[sequence], 0) // state.header[AGING_NS]
    return max(state.sequences[sequence * SEQUENCE_WORDS + FIRST_CLASS] - spans, 0)


@inline
def note_aging(state, sequence):
    """Let `next_aging_ns` be no later than the time at which the waiting `sequence` rises."""
    row = sequence * SEQUENCE_WORDS
    rank = state.sequences[row + PRIORITY_CLASS]
    if rank > 0 and state.header[AGING_NS] > 0:
        spans = state.sequences[row + FIRST_CLASS] - rank + 1
        due_ns = state.arrival_ns[sequence] + spans * state.header[AGING_NS]
        state.header[NEXT_AGING_NS] = min(state.header[NEXT_AGING_NS], due_ns)


@inline
def merge(state, sequence):
    """As `link`, for sequences that come in the order of seniority: the search goes on where the last one ended."""
    rank = state.sequences[sequence * SEQUENCE_WORDS + PRIORITY_CLASS]
    before = state.queue_hints[rank]
    after = state.queue_heads[rank] if before == END else state.sequences[before * SEQUENCE_WORDS + NEXT]
    while after != END and is_senior(state, after, sequence):
        before = after
        after = state.sequences[before * SEQUENCE_WORDS + NEXT]
    link_behind(state, sequence, before)
    state.queue_hints[rank] = sequence


@subroutine
def age_waiting(state, now_ns):
    """Move every waiting sequence to the class of its age, and see when the next one rises.

    Each class is merged into those above it in one pass, however many rise at once.
    """
    state.header[NEXT_AGING_NS] = NEVER_NS
    for rank in range(1, PRIORITY_CLASSES):
        for higher in range(rank):
            state.queue_hints[higher] = END
        sequence = state.queue_heads[rank]
        while sequence != END:
            after = state.sequences[sequence * SEQUENCE_WORDS + NEXT]
            present = aged_class(state, sequence, now_ns)
            if present < rank:
                unlink(state, sequence)
                state.sequences[sequence * SEQUENCE_WORDS + PRIORITY_CLASS] = present
                merge(state, sequence)
            note_aging(state, sequence)
            sequence = after


@subroutine
def age_running(state, now_ns):
    """Give every running sequence the class of its age, and sort them anew by insertion: few change places."""
    count = state.header[RUNNING_COUNT]
    for k in range(count):
        sequence = state.running[k]
        present = aged_class(state, sequence, now_ns)
        state.sequences[sequence * SEQUENCE_WORDS + PRIORITY_CLASS] = min(
            state.sequences[sequence * SEQUENCE_WORDS + PRIORITY_CLASS], present
        )
        place = k
        while place > 0 and is_senior(state, sequence, state.running[place - 1]):
            state.running[place] = state.running[place - 1]
            place -= 1
        state.running[place] = sequence


@inline
def note_preemption(state, shared, sequence):
    """Count one, where its client can see it too."""
    row = sequence * SEQUENCE_WORDS
    shared.metrics[METRIC_PREEMPTIONS] += 1
    state.sequences[row + PREEMPTIONS] += 1
    shared.slots[sequence * SLOT_WORDS + SLOT_PREEMPTIONS] = state.sequences[row + PREEMPTIONS]


@inline
def note_forget(state, sequence):
    """The backend may drop what it keeps for `sequence`; it is told before it executes again."""
    count = state.header[FORGET_COUNT]
    state.forget[count] = sequence
    state.header[FORGET_COUNT] = count + 1
