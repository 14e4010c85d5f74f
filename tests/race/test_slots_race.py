"""Slots between processes: one owner at a time, and whoever reads a published word finds the tokens it speaks of."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numba import carray

from ironbatch import layout
from ironbatch.kernels import slots
from ironbatch.kernels.atomics import address_to_words, fetch_add, load_acquire, store_release
from ironbatch.kernels.jit import callable_in_kernels, inline, kernel
from ironbatch.kernels.shared import (
    GENERATION,
    NUM_SLOTS,
    OWNER,
    PUBLISHED,
    SLOT_WORDS,
    SUBMITTED,
    open_shared,
    published_generation,
    published_produced,
    published_reason,
    published_word,
)
from ironbatch.kernels.slots import NEXT_CHOICE
from ironbatch.shm.segment import Segment
from tests.race.processes import LINE_WORDS, Patience, race, scratch_of, shared_segment

pytestmark = pytest.mark.race

CONTROL_S = 15.0
SPINS = 2_000

SOUND = 0
TORN = 1
STALE = 2
"""A word spoke of something that was not there."""

slot_claim = callable_in_kernels(slots.slot_claim)
slots_claim = callable_in_kernels(slots.slots_claim)
slot_submit = callable_in_kernels(slots.slot_submit)
slot_release = callable_in_kernels(slots.slot_release)

# ------------------------------------------------------------------------------------------------ claim and release

CLAIMANTS = 4
CLAIMS = 1_000_000
FEW_SLOTS = {"max_running_seqs": 3, "max_queued_requests": 0}  # fewer than claimants: sometimes all are taken

ALL_TAKEN = -1
SHARED = -2  # somebody else was in the slot

# Scratch words of each slot: how many are in it, and how often it was used.
INSIDE = 0
USES = 1


@inline
def claim_unlocked(shared, owner, start, num_slots):
    """The control: as `slot_claim`, but whoever finds the owner word 0 simply stores its own."""
    for k in range(num_slots):
        row = ((start + k) % num_slots) * SLOT_WORDS
        if load_acquire(shared.slots, row + OWNER) == 0:
            store_release(shared.slots, row + OWNER, owner)
            shared.slots[row + GENERATION] += 1
            return (start + k) % num_slots
    return -1


@kernel("int64(intp, intp, int64, int64, int64, int64)")
def claim_often(address, scratch_address, owner, first, end, is_control):
    """Claim, use and release slots. Returns how many claims are done: fewer when all slots are taken; or SHARED."""
    shared = open_shared(address)
    num_slots = shared.header[NUM_SLOTS]
    scratch = carray(address_to_words(scratch_address), num_slots * LINE_WORDS)
    for claim in range(first, end):
        start = (claim * 7 + owner) % num_slots
        slot = claim_unlocked(shared, owner, start, num_slots) if is_control else slot_claim(address, owner, start)
        if slot < 0:
            return claim
        inside = fetch_add(scratch, slot * LINE_WORDS + INSIDE, 1)
        scratch[slot * LINE_WORDS + USES] += 1  # a plain addition, so that two owners would lose one
        is_mine = load_acquire(shared.slots, slot * SLOT_WORDS + OWNER) == owner
        if inside != 0 or not is_mine:
            return SHARED
        fetch_add(scratch, slot * LINE_WORDS + INSIDE, -1)
        slot_release(address, slot)
    return end


def claim(lane: int, is_control: int, segment: Segment) -> bool:
    """Claim until all claims are done. Returns whether a slot was ever shared."""
    owner = layout.owner_word(lane, 1)
    patience = Patience("for a free slot")
    done = 0
    while 0 <= done < CLAIMS:
        done = claim_often(segment.address, scratch_of(segment), owner, done, CLAIMS, is_control)
        if 0 <= done < CLAIMS:
            if is_control and segment.tokens[0, -1]:
                return False
            patience.wait()
    if done == SHARED:
        segment.tokens[0, -1] = 1  # a shared slot may never be free again: the others stop too
    return done == SHARED


def test_slot_never_has_two_owners() -> None:
    with shared_segment(**FEW_SLOTS) as segment:
        assert not any(race(segment, [partial(claim, lane, 0) for lane in range(CLAIMANTS)]))
        scratch = segment.tokens.reshape(-1).view(np.int64)[: LINE_WORDS * len(segment.slots)].reshape(-1, LINE_WORDS)
        assert scratch[:, INSIDE].tolist() == [0] * len(segment.slots)
        assert scratch[:, USES].sum() == CLAIMANTS * CLAIMS
        assert segment.slots["generation"].tolist() == scratch[:, USES].tolist()
        assert not segment.slots["owner"].any()


def test_control_claims_without_compare_and_swap_share_slots() -> None:
    patience = Patience("for a slot with two owners", CONTROL_S)
    is_shared = False
    while not is_shared:
        with shared_segment(**FEW_SLOTS) as segment:
            is_shared = any(race(segment, [partial(claim, lane, 1) for lane in range(CLAIMANTS)]))
        patience.wait()


# --------------------------------------------------------------------------------------- several slots, all or none

GROUP = 3
GROUP_CLAIMS = 200_000
GROUP_SLOTS = {"max_running_seqs": 7, "max_queued_requests": 0}  # room for two groups and a part of a third


@kernel("int64(intp, intp, int64, int64, int64)")
def claim_groups(address, scratch_address, owner, first, end):
    """As `claim_often`, but GROUP slots at a time; SHARED too when a slot is missing from its chain."""
    shared = open_shared(address)
    num_slots = shared.header[NUM_SLOTS]
    scratch = carray(address_to_words(scratch_address), num_slots * LINE_WORDS)
    for claim in range(first, end):
        parent = slots_claim(address, owner, (claim * 5 + owner) % num_slots, GROUP)
        if parent < 0:
            return claim
        count = 0
        slot = parent
        while slot != layout.NO_SLOT and count < GROUP:
            inside = fetch_add(scratch, slot * LINE_WORDS + INSIDE, 1)
            scratch[slot * LINE_WORDS + USES] += 1
            if inside != 0 or load_acquire(shared.slots, slot * SLOT_WORDS + OWNER) != owner:
                return SHARED
            count += 1
            slot = shared.slots[slot * SLOT_WORDS + NEXT_CHOICE]
        if count != GROUP or slot != layout.NO_SLOT:
            return SHARED
        slot = parent
        for _ in range(GROUP):
            following = shared.slots[slot * SLOT_WORDS + NEXT_CHOICE]
            fetch_add(scratch, slot * LINE_WORDS + INSIDE, -1)
            slot_release(address, slot)
            slot = following
    return end


def claim_group(lane: int, segment: Segment) -> bool:
    """Claim until all claims are done. Returns whether a slot was ever shared, or a group not whole."""
    owner = layout.owner_word(lane, 1)
    patience = Patience("for enough free slots")
    done = 0
    while 0 <= done < GROUP_CLAIMS:
        done = claim_groups(segment.address, scratch_of(segment), owner, done, GROUP_CLAIMS)
        patience.wait()
    return done == SHARED


def test_groups_are_claimed_whole_and_never_shared() -> None:
    with shared_segment(**GROUP_SLOTS) as segment:
        assert not any(race(segment, [partial(claim_group, lane) for lane in range(CLAIMANTS)]))
        scratch = segment.tokens.reshape(-1).view(np.int64)[: LINE_WORDS * len(segment.slots)].reshape(-1, LINE_WORDS)
        assert scratch[:, INSIDE].tolist() == [0] * len(segment.slots)
        assert scratch[:, USES].sum() == CLAIMANTS * GROUP_CLAIMS * GROUP
        assert not segment.slots["owner"].any(), "what a failed claim had taken is free again"


# ---------------------------------------------------------------------------------------- children before the parent

SUBMISSIONS = 15_000
CHOICES = 7  # all slots, so that slot 0 is the parent


@kernel("int64(intp, intp, int64, int64, int64)")
def submit_groups(address, acks_address, first, end, is_control):
    """Submit all slots as one request, again and again. Returns the next life: `end`, unless the reader is slow.

    The control submits the parent first.
    """
    shared = open_shared(address)
    acks = carray(address_to_words(acks_address), LINE_WORDS)
    for life in range(first, end):
        spins = 0
        while load_acquire(acks, 0) < life - 1:
            spins += 1
            if spins == SPINS:
                return life
        parent = slots_claim(address, 1, 0, CHOICES)
        if is_control:
            store_release(shared.slots, parent * SLOT_WORDS + SUBMITTED, life)
        slot_submit(address, 0, parent)  # the lane soon is full, which is of no matter here
        for slot in range(CHOICES):
            slot_release(address, slot)
    return end


@kernel("int64(intp, intp, int64[::1], int64)")
def look_at_groups(address, acks_address, progress, end):
    """The scheduler: whenever the parent is submitted, so are the others. Returns STALE or SOUND."""
    shared = open_shared(address)
    acks = carray(address_to_words(acks_address), LINE_WORDS)
    spins = 0
    while progress[0] < end and spins < SPINS:
        if load_acquire(shared.slots, SUBMITTED) != progress[0]:
            spins += 1
            continue
        for slot in range(1, CHOICES):
            if load_acquire(shared.slots, slot * SLOT_WORDS + SUBMITTED) != progress[0]:
                return STALE
        store_release(acks, 0, progress[0])
        progress[0] += 1
        spins = 0
    return SOUND


def submit_all(is_control: int, segment: Segment) -> None:
    patience = Patience("for the reader")
    life = 1
    while life < SUBMISSIONS and not segment.header["draining"]:
        life = submit_groups(segment.address, scratch_of(segment), life, SUBMISSIONS, is_control)
        patience.wait()


def look(segment: Segment) -> int:
    progress = np.array([1], np.int64)
    patience = Patience("for the submitter")
    found = SOUND
    while found == SOUND and progress[0] < SUBMISSIONS:
        found = int(look_at_groups(segment.address, scratch_of(segment), progress, SUBMISSIONS))
        patience.wait()
    segment.header["draining"] = 1
    return found


def found_by_looking(is_control: int) -> int:
    with shared_segment(**GROUP_SLOTS) as segment:
        _, found = race(segment, [partial(submit_all, is_control), look])
        return int(found)


def test_whoever_sees_the_parent_submitted_sees_its_choices_so() -> None:
    assert found_by_looking(is_control=0) == SOUND


def test_control_a_parent_submitted_first_is_seen_alone() -> None:
    patience = Patience("for a parent without its choices", CONTROL_S)
    while found_by_looking(is_control=1) != STALE:
        patience.wait()


# ------------------------------------------------------------------------------------------------ publish and read

READERS = 2
LIVES = 15_000  # generations of the one slot that is published
MAX_LENGTH = 48
PROMPT = 16  # tokens before those that are published


@inline
def length_of(life):
    """Differs from life to life, so that a word put together from two of them is found out."""
    return 1 + (life * 0x9E3779B1 >> 9) % MAX_LENGTH


@inline
def token_of(life, k):
    return (life * 0x85EBCA77 + k * 0xC2B2AE3D) & 0x7FFFFFFF


@kernel("int64(intp, intp, int64, int64, int64)")
def publish_lives(address, acks_address, first, end, is_control):
    """The scheduler: publish slot 0 through its lives. Returns the next life: `end`, unless readers are slow.

    The control publishes each token before it writes it.
    """
    shared = open_shared(address)
    acks = carray(address_to_words(acks_address), READERS * LINE_WORDS)
    for life in range(first, end):
        for reader in range(READERS):
            spins = 0
            while load_acquire(acks, reader * LINE_WORDS) < life - 1:
                spins += 1
                if spins == SPINS:
                    return life
        length = length_of(life)
        for k in range(length):
            word = published_word(life, layout.FINISH_LENGTH if k + 1 == length else layout.FINISH_NONE, k + 1)
            if is_control:
                store_release(shared.slots, PUBLISHED, word)
            shared.tokens[PROMPT + k] = token_of(life, k)
            store_release(shared.slots, PUBLISHED, word)
    return end


@kernel("int64(intp, intp, int64, int64, int64[::1])")
def read_lives(address, acks_address, reader, end, progress):
    """A worker: follow slot 0 until life `end` - 1 is over. Returns TORN or STALE; SOUND also when nothing is new.

    progress: the life that is read, and the tokens of it that were.
    """
    shared = open_shared(address)
    acks = carray(address_to_words(acks_address), READERS * LINE_WORDS)
    spins = 0
    while progress[0] < end and spins < SPINS:
        word = load_acquire(shared.slots, PUBLISHED)
        life = published_generation(word)
        produced = published_produced(word)
        is_over = published_reason(word) != layout.FINISH_NONE
        if life == progress[0] - 1 or (life == progress[0] and produced == progress[1]):
            spins += 1
            continue
        length = length_of(life)
        if life != progress[0] or produced < progress[1] or produced > length or is_over != (produced == length):
            return TORN
        for k in range(produced):
            if shared.tokens[PROMPT + k] != token_of(life, k):
                return STALE
        progress[1] = produced
        spins = 0
        if is_over:
            progress[0] = life + 1
            progress[1] = 0
            store_release(acks, reader * LINE_WORDS, life)
    return SOUND


def acks_of(segment: Segment) -> int:
    """Where each reader says which life it has seen the end of: scratch memory behind the tokens of slot 0."""
    return int(segment.tokens[1:].ctypes.data)


def publish(is_control: int, segment: Segment) -> None:
    patience = Patience("for the readers")
    life = 1
    while life < LIVES and not segment.header["draining"]:
        life = publish_lives(segment.address, acks_of(segment), life, LIVES, is_control)
        patience.wait()


def read(reader: int, segment: Segment) -> int:
    progress = np.array([1, 0], np.int64)
    patience = Patience("for the publisher")
    found = SOUND
    while found == SOUND and progress[0] < LIVES and not segment.header["draining"]:
        found = int(read_lives(segment.address, acks_of(segment), reader, LIVES, progress))
        patience.wait()
    if found != SOUND:
        segment.header["draining"] = 1  # the others need not go on
    return found


def found_by_readers(is_control: int) -> set[int]:
    with shared_segment() as segment:
        _, *found = race(segment, [partial(publish, is_control), *(partial(read, reader) for reader in range(READERS))])
        return set(found)


def test_published_word_is_never_torn_and_its_tokens_are_there() -> None:
    assert found_by_readers(is_control=0) == {SOUND}


def test_control_tokens_written_after_they_are_published_are_missed() -> None:
    patience = Patience("for a token that is not there", CONTROL_S)
    while STALE not in found_by_readers(is_control=1):
        patience.wait()
