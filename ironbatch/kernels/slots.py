"""Slots, as a web worker uses them: claim, submit, cancel, collect, settle.

A slot's life: free -> claimed (compare-and-swap on its owner word) -> submitted -> published, step by step -> finished
-> released, which frees it. The scheduler's half of it stands in `kernels/intake.py` and `kernels/plan.py`.

A request for n choices has n slots, claimed all or none and linked in ascending order by their `next_choice`; the
first, which is choice 0, is the parent. Each is published, cancelled and released by itself.
"""

from __future__ import annotations

import numpy as np

from ironbatch import layout, limits
from ironbatch.kernels.atomics import compare_and_swap, exchange, load_acquire, store_release
from ironbatch.kernels.emission import mix
from ironbatch.kernels.histogram import bucket_of
from ironbatch.kernels.jit import inline, kernel
from ironbatch.kernels.lanes import must_ring_scheduler, push_hint
from ironbatch.kernels.shared import (
    ARRIVAL_NS,
    CANCELLED,
    CHOICE_INDEX,
    CHUNKS_DELIVERED,
    ERROR_CODE,
    FLAGS,
    GENERATION,
    INTER_TOKEN_US,
    LANE_WORDS,
    METRICS_WORDS,
    NEXT_CHOICE,
    NUM_SLOTS,
    OWNER,
    PARENT_SLOT,
    PROMPT_TOKENS,
    PUBLISHED,
    SEED,
    SLOT_WORDS,
    SUBMITTED,
    TOKEN_ROW_TOKENS,
    TOKENS_DELIVERED,
    TTFT_US,
    USABLE_SLOTS,
    WORKER_SLEEPING,
    open_shared,
    published_generation,
    published_produced,
    published_reason,
)

NEWS_WORDS = 5
"""Words of one collected row: slot, tokens seen before, tokens produced now, finish reason, error code."""

NS_PER_US = 1_000


REQUEST_FIELDS = (
    "arrival_ns",
    "seed",
    "prompt_tokens",
    "max_new_tokens",
    "priority",
    "flags",
    "deadline_ns",
    "temperature",
    "top_p",
    "top_k",
    "salt_a",
    "salt_b",
)
"""What a worker writes between claim and submit. Which choice the slot is, the claim has written."""

_REQUEST_WORDS = tuple(layout.word(layout.SLOT, name) for name in REQUEST_FIELDS)
_SEED_MASK = np.uint64(limits.SEED.high)


@inline
def _try_claim(shared, slot, owner):
    """Claim one slot, as the only choice of its request. Returns whether it was free."""
    row = slot * SLOT_WORDS
    if load_acquire(shared.slots, row + OWNER) != 0:
        return False
    if compare_and_swap(shared.slots, row + OWNER, 0, owner) != 0:
        return False
    generation = (shared.slots[row + GENERATION] + 1) & layout.GENERATION_MASK
    shared.slots[row + GENERATION] = max(generation, 1)  # 0 never names a generation
    shared.slots[row + NEXT_CHOICE] = layout.NO_SLOT
    shared.slots[row + CHOICE_INDEX] = 0
    shared.slots[row + PARENT_SLOT] = slot
    return True


@kernel("int64(intp, int64, int64)")
def slot_claim(address, owner, start):
    """Claim a free slot for `owner`, looking from `start` on. Returns the slot, or -1 when all are taken."""
    shared = open_shared(address)
    num_slots = shared.header[NUM_SLOTS]
    for k in range(num_slots):
        slot = (start + k) % num_slots
        if _try_claim(shared, slot, owner):
            return slot
    return -1


@kernel("int64(intp, int64, int64, int64)")
def slots_claim(address, owner, start, count):
    """Claim `count` of the usable slots for the choices of one request, all or none, looking from `start` on.

    Two workers that each need what the other holds both go without, and tell their clients to try again.

    Returns the parent, from which `next_choice` leads through all of them in ascending order; -1 when too few are free.
    """
    shared = open_shared(address)
    num_slots = shared.header[USABLE_SLOTS] if shared.header[USABLE_SLOTS] > 0 else shared.header[NUM_SLOTS]
    parent = last = layout.NO_SLOT
    claimed = 0
    for k in range(num_slots):
        slot = (start + k) % num_slots
        if not _try_claim(shared, slot, owner):
            continue
        if slot < last or last == layout.NO_SLOT:  # the first of all, or the first beyond the table's end
            shared.slots[slot * SLOT_WORDS + NEXT_CHOICE] = parent
            parent = slot
        else:
            shared.slots[slot * SLOT_WORDS + NEXT_CHOICE] = shared.slots[last * SLOT_WORDS + NEXT_CHOICE]
            shared.slots[last * SLOT_WORDS + NEXT_CHOICE] = slot
        last = slot
        claimed += 1
        if claimed == count:
            break
    slot = parent
    for index in range(claimed):
        row = slot * SLOT_WORDS
        slot = shared.slots[row + NEXT_CHOICE]  # read before the slot may be somebody else's
        if claimed < count:
            store_release(shared.slots, row + OWNER, 0)
        else:
            shared.slots[row + CHOICE_INDEX] = index
            shared.slots[row + PARENT_SLOT] = parent
    return parent if claimed == count else -1


@inline
def _choice_seed(seed, index):
    if index == 0:
        return seed
    return np.int64(mix(seed, index) & _SEED_MASK)


@kernel("int64(int64, int64)")
def choice_seed(seed, index):
    """The seed of choice `index`: the request's own for choice 0, else 63 bits mixed from both."""
    return _choice_seed(seed, index)


@kernel("int64(intp, int64)")
def slots_share_request(address, parent):
    """Write the parent's request, prompt included, to its other choices, each with its own seed. Before the submit."""
    shared = open_shared(address)
    source = parent * SLOT_WORDS
    has_token_ids = shared.slots[source + FLAGS] & layout.FLAG_TOKEN_IDS
    prompt_tokens = shared.slots[source + PROMPT_TOKENS] if has_token_ids else 0
    token_row = shared.header[TOKEN_ROW_TOKENS]
    slot = shared.slots[source + NEXT_CHOICE]
    while slot != layout.NO_SLOT:
        row = slot * SLOT_WORDS
        for word in _REQUEST_WORDS:
            shared.slots[row + word] = shared.slots[source + word]
        shared.slots[row + SEED] = _choice_seed(shared.slots[source + SEED], shared.slots[row + CHOICE_INDEX])
        for k in range(prompt_tokens):
            shared.tokens[slot * token_row + k] = shared.tokens[parent * token_row + k]
        slot = shared.slots[row + NEXT_CHOICE]
    return 0


@kernel("int64(intp, int64, int64)")
def slot_submit(address, lane, parent):
    """Hand a claimed request, written in all its slots, to the scheduler: one hint, for the parent.

    The parent is submitted last: whoever sees that it is finds its other choices submitted too.

    Returns 1: ring the scheduler; 0: it is awake; -1: lane full.
    """
    shared = open_shared(address)
    row = parent * SLOT_WORDS
    slot = shared.slots[row + NEXT_CHOICE]
    while slot != layout.NO_SLOT:
        store_release(shared.slots, slot * SLOT_WORDS + SUBMITTED, shared.slots[slot * SLOT_WORDS + GENERATION])
        slot = shared.slots[slot * SLOT_WORDS + NEXT_CHOICE]
    generation = shared.slots[row + GENERATION]
    store_release(shared.slots, row + SUBMITTED, generation)
    if push_hint(shared, lane, parent, generation) < 0:
        return -1
    return must_ring_scheduler(shared)


@kernel("int64(intp, int64, int64)")
def slot_cancel(address, lane, slot):
    """Ask the scheduler to end a submitted slot. Returns as `slot_submit` does; the end is published as any other."""
    shared = open_shared(address)
    row = slot * SLOT_WORDS
    generation = shared.slots[row + GENERATION]
    store_release(shared.slots, row + CANCELLED, generation)
    if push_hint(shared, lane, slot, generation) < 0:
        return -1
    return must_ring_scheduler(shared)


@kernel("int64(intp, int64)")
def slot_release(address, slot):
    """Give a slot back. Only its owner may, and only unsubmitted or after its end was published."""
    shared = open_shared(address)
    store_release(shared.slots, slot * SLOT_WORDS + OWNER, 0)
    return 0


@kernel("int64(intp, int64, int32[::1], int64, int64[::1], int64[::1])")
def slots_collect(address, lane, active, active_count, seen, news):
    """What the scheduler has published for this lane since the last call.

    Args:
        address: the segment.
        lane: the caller's.
        active: int32[>= active_count], the slots that the caller has submitted and not settled.
        active_count: how many.
        seen: int64[num_slots], the tokens of each slot that the caller knows of.
        news: int64[num_slots * NEWS_WORDS], receives one row a slot with news.

    The worker is armed first and looks afterwards: whatever is published once this has returned rings its doorbell, so
    one look a wake is enough and no wake is lost. Returns the number of rows.
    """
    shared = open_shared(address)
    exchange(shared.lanes, lane * LANE_WORDS + WORKER_SLEEPING, 1)
    count = 0
    for k in range(active_count):
        slot = active[k]
        row = slot * SLOT_WORDS
        published = load_acquire(shared.slots, row + PUBLISHED)
        if published_generation(published) != shared.slots[row + GENERATION]:
            continue
        produced = published_produced(published)
        reason = published_reason(published)
        if produced == seen[slot] and reason == layout.FINISH_NONE:
            continue
        out = count * NEWS_WORDS
        news[out] = slot
        news[out + 1] = seen[slot]
        news[out + 2] = produced
        news[out + 3] = reason
        news[out + 4] = shared.slots[row + ERROR_CODE] if reason == layout.FINISH_ERROR else 0
        count += 1
    return count


@kernel("int64(intp, int64, int32[::1], int64, int64[::1], int64[::1], int64, int64[::1], int64)")
def slots_settle(address, lane, active, active_count, seen, news, news_count, last_ns, now_ns):
    """After the news were handed to the sockets: time them, and release the slots that have finished.

    Args: as `slots_collect`, and
        news_count: rows of `news`.
        last_ns: int64[num_slots], when each slot's last tokens were handed on; kept here.
        now_ns: the time at which these were.

    k tokens that come together count as k gaps of a k-th each, in every choice. The time to first token is that of
    choice 0, since a request waits once: its other choices share the parent's prefill. Returns the new active_count.
    """
    shared = open_shared(address)
    metrics = (1 + lane) * METRICS_WORDS
    for k in range(news_count):
        slot = news[k * NEWS_WORDS]
        before = news[k * NEWS_WORDS + 1]
        produced = news[k * NEWS_WORDS + 2]
        if produced > before:
            if before == 0:
                if shared.slots[slot * SLOT_WORDS + CHOICE_INDEX] == 0:
                    waited_ns = now_ns - shared.slots[slot * SLOT_WORDS + ARRIVAL_NS]
                    shared.metrics[metrics + TTFT_US + bucket_of(waited_ns // NS_PER_US)] += 1
            else:
                gap_us = (now_ns - last_ns[slot]) // ((produced - before) * NS_PER_US)
                shared.metrics[metrics + INTER_TOKEN_US + bucket_of(gap_us)] += produced - before
            last_ns[slot] = now_ns
            seen[slot] = produced
            shared.metrics[metrics + TOKENS_DELIVERED] += produced - before
            shared.metrics[metrics + CHUNKS_DELIVERED] += 1
        if news[k * NEWS_WORDS + 3] != layout.FINISH_NONE:
            seen[slot] = -1
            store_release(shared.slots, slot * SLOT_WORDS + OWNER, 0)
    kept = 0
    for k in range(active_count):
        if seen[active[k]] >= 0:
            active[kept] = active[k]
            kept += 1
    return kept
