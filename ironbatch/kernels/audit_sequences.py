"""Part of the audit: running set, waiting queue and groups."""

from __future__ import annotations

from ironbatch.kernels.forks import NOT_FORKED
from ironbatch.kernels.jit import subroutine
from ironbatch.kernels.queues import END, is_senior
from ironbatch.kernels.records import (
    BLOCKS,
    COMPUTED,
    FIRST_CLASS,
    FIRST_FORK,
    FORK_COUNT,
    FORK_PARENT,
    FORK_WORDS,
    IN_GROUP,
    LANE,
    MAX_NEW,
    NEXT,
    NEXT_FORK,
    NOBODY,
    PREVIOUS,
    PRIORITY_CLASS,
    PRODUCED,
    PROMPT,
    REQUEST_FLAGS,
    RESERVED_BLOCKS,
    SEQ_FLAGS,
    SEQ_GENERATION,
    SEQUENCE_WORDS,
    SOURCE_BLOCK,
    STATUS,
    STATUS_NONE,
    STATUS_RUNNING,
    STATUS_WAITING,
)
from ironbatch.kernels.shared import (
    ARRIVAL_NS,
    FLAGS,
    GENERATION,
    MAX_NEW_TOKENS,
    OWNER,
    PRIORITY,
    PROMPT_TOKENS,
    PUBLISHED,
    SEED,
    SLOT_WORDS,
    lane_of_owner,
    published_generation,
    published_produced,
)
from ironbatch.kernels.state import (
    BLOCK_SHIFT,
    NUM_LANES,
    NUM_SLOTS,
    OWED_COPIES,
    PENDING_FORKS,
    RESERVED_COUNT,
    RUNNING_COUNT,
    RUNNING_LIMIT,
)
from ironbatch.kernels.violations import SOUND
from ironbatch.limits import PRIORITY_CLASSES, PRIORITY_MIN


@subroutine
def audit_running(state):
    """The running set: sorted, within its limit, every context backed."""
    count = state.header[RUNNING_COUNT]
    if not 0 <= count <= state.header[RUNNING_LIMIT]:
        return 8
    for k in range(count):
        sequence = state.running[k]
        if not 0 <= sequence < state.header[NUM_SLOTS]:
            return 9
        row = sequence * SEQUENCE_WORDS
        if state.sequences[row + STATUS] != STATUS_RUNNING:
            return 9
        if k > 0 and not is_senior(state, state.running[k - 1], sequence):
            return 8
        context = state.sequences[row + PROMPT] + state.sequences[row + PRODUCED]
        computed = state.sequences[row + COMPUTED]
        if state.forks[sequence * FORK_WORDS + FORK_PARENT] != NOBODY:
            if computed != NOT_FORKED or state.sequences[row + BLOCKS] != 0:
                return 20
        elif not 0 <= computed < context:
            return 13
        elif state.sequences[row + BLOCKS] << state.header[BLOCK_SHIFT] < context:
            return 7
        if not 0 <= state.sequences[row + PRODUCED] < state.sequences[row + MAX_NEW]:
            return 13
        if not 0 <= state.sequences[row + LANE] < state.header[NUM_LANES]:
            return 13
    return SOUND


@subroutine
def audit_waiting(state):
    """The waiting queue: linked both ways, sorted, and without blocks. Returns minus a violation, or the count."""
    count = 0
    for rank in range(PRIORITY_CLASSES):
        before = END
        sequence = state.queue_heads[rank]
        while sequence != END:
            if not 0 <= sequence < state.header[NUM_SLOTS]:
                return -11
            row = sequence * SEQUENCE_WORDS
            if state.sequences[row + PREVIOUS] != before or state.sequences[row + STATUS] != STATUS_WAITING:
                return -11
            if state.sequences[row + PRIORITY_CLASS] != rank:
                return -11
            if before != END and not is_senior(state, before, sequence):
                return -10
            if state.sequences[row + BLOCKS] != 0 or state.sequences[row + COMPUTED] != 0:
                return -12
            count += 1
            if count > state.header[NUM_SLOTS]:
                return -11
            before = sequence
            sequence = state.sequences[row + NEXT]
        if state.queue_tails[rank] != before:
            return -11
    return count


@subroutine
def audit_groups(state):
    """Forks and parents name each other, and what is promised to running forks adds up."""
    pending = 0
    promised = 0
    owed = 0
    for sequence in range(state.header[NUM_SLOTS]):
        row = sequence * FORK_WORDS
        parent = state.forks[row + FORK_PARENT]
        first = state.forks[row + FIRST_FORK]
        source = state.forks[row + SOURCE_BLOCK]
        is_in_use = parent != NOBODY or first != NOBODY or source != NOBODY
        status = state.sequences[sequence * SEQUENCE_WORDS + STATUS]
        if is_in_use and (
            status == STATUS_NONE or state.sequences[sequence * SEQUENCE_WORDS + SEQ_FLAGS] & IN_GROUP == 0
        ):
            return 20
        owed += 1 if source != NOBODY else 0
        if parent != NOBODY:
            if not 0 <= parent < state.header[NUM_SLOTS]:
                return 20
            if state.sequences[parent * SEQUENCE_WORDS + STATUS] != status:
                return 20
            if status == STATUS_RUNNING:
                pending += 1
                promised += state.forks[row + RESERVED_BLOCKS]
        elif state.forks[row + RESERVED_BLOCKS] != 0:
            return 20
        count = 0
        while first != NOBODY:
            if not 0 <= first < state.header[NUM_SLOTS] or count == state.header[NUM_SLOTS]:
                return 20
            if state.forks[first * FORK_WORDS + FORK_PARENT] != sequence:
                return 20
            count += 1
            first = state.forks[first * FORK_WORDS + NEXT_FORK]
        if count != state.forks[row + FORK_COUNT]:
            return 20
    is_sum = promised == state.header[RESERVED_COUNT] and owed == state.header[OWED_COPIES]
    return SOUND if is_sum and pending == state.header[PENDING_FORKS] else 20


@subroutine
def audit_statuses(state):
    """The running set and the queue hold every sequence that says so, and no other one holds blocks."""
    running = 0
    for sequence in range(state.header[NUM_SLOTS]):
        status = state.sequences[sequence * SEQUENCE_WORDS + STATUS]
        if status == STATUS_RUNNING:
            running += 1
        elif status != STATUS_WAITING and state.sequences[sequence * SEQUENCE_WORDS + BLOCKS] != 0:
            return 9
    return SOUND if running == state.header[RUNNING_COUNT] else 9


@subroutine
def audit_slots(state, shared):
    """What a live sequence was told by its slot, and how far the slot says that it has come."""
    for sequence in range(state.header[NUM_SLOTS]):
        fields = sequence * SEQUENCE_WORDS
        if state.sequences[fields + STATUS] == STATUS_NONE:
            continue
        row = sequence * SLOT_WORDS
        generation = state.sequences[fields + SEQ_GENERATION]
        rank = min(max(shared.slots[row + PRIORITY] - PRIORITY_MIN, 0), PRIORITY_CLASSES - 1)
        flags = state.sequences[fields + SEQ_FLAGS] & REQUEST_FLAGS
        published = shared.slots[row + PUBLISHED]
        produced = published_produced(published) if published_generation(published) == generation else 0
        is_same = (
            generation == shared.slots[row + GENERATION]
            and state.sequences[fields + LANE] == lane_of_owner(shared.slots[row + OWNER])
            and state.sequences[fields + FIRST_CLASS] == rank
            and state.sequences[fields + PRIORITY_CLASS] <= rank
            and state.sequences[fields + PROMPT] == shared.slots[row + PROMPT_TOKENS]
            and state.sequences[fields + MAX_NEW] == shared.slots[row + MAX_NEW_TOKENS]
            and state.sequences[fields + PRODUCED] == produced
            and flags == shared.slots[row + FLAGS] & REQUEST_FLAGS
            and state.arrival_ns[sequence] == shared.slots[row + ARRIVAL_NS]
            and state.seeds[sequence] == shared.slots[row + SEED]
        )
        if not is_same:
            return 21
    return SOUND
