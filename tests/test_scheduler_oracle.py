"""The oracle against docs/scheduling.md: each rule in a scenario small enough to be worked out by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.policy_load import CASES, Case, Load
from tests.scheduler_oracle import Scheduler, Sequence

SECOND = 10**9
PROMPT = list(range(100, 110))


def engine(**options: Any) -> Scheduler:
    """Blocks of 4 tokens, and plenty of everything else."""
    return Scheduler(**({"num_blocks": 16, "block_size": 4, "batch_tokens": 64, "running_limit": 8} | options))


def request(slot: int, prompt: int | list[int], max_new: int = 8, **fields: Any) -> Sequence:
    """Arrives at the time of its slot. A prompt is a length, or token ids."""
    length, token_ids = (len(prompt), prompt) if isinstance(prompt, list) else (prompt, None)
    return Sequence(slot, length, max_new, **({"arrival_ns": slot, "prompt_ids": token_ids} | fields))


def step(scheduler: Scheduler, now_ns: int = 1_000, token: int = 7) -> list[tuple[int, int, int]]:
    """One step in which every row that may emits `token`. Returns (slot, first position, new tokens) of each row."""
    rows = scheduler.plan(now_ns)
    scheduler.commit([[token] if row.emits else [] for row in rows])
    scheduler.check()
    return [(row.slot, row.first, row.new) for row in rows]


def slots(sequences: list[Sequence]) -> list[int]:
    return [sequence.slot for sequence in sequences]


# ------------------------------------------------------------------------------------------------------------ plain


def test_decodes_go_before_chunks_and_chunks_before_admission() -> None:
    scheduler = engine(batch_tokens=6)
    for slot, prompt in enumerate((2, 9, 3)):
        scheduler.submit(request(slot, prompt))
    assert step(scheduler) == [(0, 0, 2), (1, 0, 4)]
    assert (slots(scheduler.running), slots(scheduler.waiting)) == ([0, 1], [2])
    assert step(scheduler) == [(0, 2, 1), (1, 4, 5)]
    assert step(scheduler) == [(0, 3, 1), (1, 9, 1), (2, 0, 3)]
    assert scheduler.decode_count == 2


def test_sequence_ends_with_its_last_token_or_with_the_end_of_sequence() -> None:
    scheduler = engine(eos_token_id=7)
    scheduler.submit(request(0, 3, 2, ignore_eos=True))
    scheduler.submit(request(1, 3, 2))
    step(scheduler)
    assert scheduler.ended == {1: ("stop", 1)}
    step(scheduler)
    assert scheduler.ended[0] == ("length", 2)
    assert scheduler.free == 16


def test_positions_are_backed_before_their_tokens_are_computed() -> None:
    scheduler = engine(tokens_per_step=3)
    scheduler.submit(request(0, 3, 20))
    scheduler.submit(request(1, 3, 2))
    scheduler.plan(1_000)
    assert [len(sequence.blocks) for sequence in scheduler.running] == [2, 2]  # 3 + 3, and 3 + 2 positions


# ---------------------------------------------------------------------------------------------------- ageing, priority


def test_waiting_request_rises_one_class_for_each_span_and_keeps_the_class_it_is_admitted_with() -> None:
    scheduler = engine(running_limit=1, aging_ns=SECOND)
    scheduler.submit(request(0, 3, 2, priority=-8))
    step(scheduler)
    low = request(1, 3, priority=-5)
    scheduler.submit(low)
    for now_ns, priority_class in ((SECOND, 3), (SECOND + 1, 2), (2 * SECOND + 1, 1)):
        scheduler.plan(now_ns)
        assert low.priority_class == priority_class
    scheduler.cancel(0, 2 * SECOND + 1)
    step(scheduler, 2 * SECOND + 1)
    step(scheduler, 9 * SECOND)
    assert (low.is_running, low.priority_class) == (True, 1)


def test_nobody_passes_who_has_reached_class_0() -> None:
    """The bound: what arrives later waits behind it, whatever its class."""
    scheduler = engine(running_limit=1, aging_ns=SECOND)
    scheduler.submit(request(0, 3, 30, priority=-8))
    step(scheduler)
    scheduler.submit(request(1, 3, priority=7))
    scheduler.submit(request(2, 3, priority=-8, arrival_ns=15 * SECOND))
    scheduler.plan(15 * SECOND)
    assert slots(scheduler.waiting) == [2, 1]
    scheduler.submit(request(3, 3, priority=-8, arrival_ns=16 * SECOND))
    scheduler.plan(16 * SECOND)
    assert slots(scheduler.waiting) == [1, 2, 3]


def test_higher_class_preempts_the_least_senior_of_strictly_lower_ones_for_a_place() -> None:
    scheduler = engine(running_limit=2)
    scheduler.submit(request(0, 3, priority=1))
    scheduler.submit(request(1, 3, priority=1))
    step(scheduler)
    scheduler.submit(request(2, 3, priority=1))
    scheduler.submit(request(3, 3, priority=0))
    assert step(scheduler) == [(0, 3, 1), (3, 0, 3)]
    assert (scheduler.preempted, slots(scheduler.waiting)) == ([1], [1, 2])


def test_equals_do_not_preempt_each_other() -> None:
    scheduler = engine(running_limit=1)
    scheduler.submit(request(5, 3))
    step(scheduler)
    scheduler.submit(request(0, 3))
    assert step(scheduler) == [(5, 3, 1)]
    assert (scheduler.preempted, scheduler.wait_reason) == ([], "slots")


def test_running_ages_as_well_where_a_preemption_is_weighed() -> None:
    """Both came with priority 0; the one that still waits has risen, and so would the other have."""
    scheduler = engine(running_limit=1, aging_ns=SECOND)
    scheduler.submit(request(0, 3))
    step(scheduler)
    scheduler.submit(request(1, 3))
    step(scheduler, 2 * SECOND + 1)
    assert (scheduler.waiting[0].priority_class, scheduler.running[0].priority_class) == (6, 6)
    assert scheduler.preempted == []
    scheduler.submit(request(2, 3, priority=-3, arrival_ns=2 * SECOND))
    step(scheduler, 2 * SECOND + 1)
    assert scheduler.preempted == [0]  # class 5 against 6


def test_nobody_is_preempted_if_that_would_not_be_enough() -> None:
    scheduler = engine(num_blocks=6)
    scheduler.submit(request(0, 11, priority=-1))  # 3 blocks
    scheduler.submit(request(1, 3, priority=1))  # 1 block
    step(scheduler)
    scheduler.submit(request(2, 15))  # 4 blocks, 2 free, and 1 could be had
    scheduler.plan(1_000)
    assert (scheduler.preempted, scheduler.wait_reason) == ([], "blocks")


def test_victims_are_no_more_than_it_takes() -> None:
    scheduler = engine(num_blocks=6)
    for slot in range(3):
        scheduler.submit(request(slot, 6, 2))  # 2 blocks each, to their end
    step(scheduler)
    scheduler.submit(request(3, 10, 2, priority=-1))  # 3 blocks
    assert step(scheduler) == [(0, 6, 1), (3, 0, 10)]
    assert scheduler.preempted == [2, 1]


@pytest.mark.parametrize(("num_blocks", "rows"), [(5, [(0, 7, 1), (2, 0, 7)]), (4, [(2, 0, 7)])])
def test_blocks_made_free_are_kept_from_the_growth_of_others(num_blocks: int, rows: list[tuple[int, ...]]) -> None:
    """0 needs a third block in the plan in which 1 makes way for 2. With none to spare, 0 gives way itself."""
    scheduler = engine(num_blocks=num_blocks)
    scheduler.submit(request(0, 7, 12))
    scheduler.submit(request(1, 6, 2))
    scheduler.plan(1_000)
    scheduler.commit([[7], [7]])
    scheduler.submit(request(2, 7, 1, priority=-1))  # 2 blocks
    scheduler.plan(1_000)
    assert [(row.slot, row.first, row.new) for row in scheduler.rows] == [(0, 7, 1), (2, 0, 7)][-len(rows) :]
    assert scheduler.preempted == [1, 0][: 3 - len(rows)]


@pytest.mark.parametrize(("others", "preempted"), [(0, [1]), (1, [])])
def test_blocks_that_the_newcomer_would_find_cached_are_nothing_gained(others: int, preempted: list[int]) -> None:
    """It lacks 3 blocks; of the 3 that a victim has it would find 2, so only one more would be there for it."""
    scheduler = engine(num_blocks=5)
    scheduler.submit(request(1, PROMPT[:9], 3, priority=1))
    for slot in range(2, 2 + others):
        scheduler.submit(request(slot, 2, 2, priority=-8))
    step(scheduler)
    scheduler.submit(request(8, [*PROMPT[:8], *range(8)], 4))  # 5 blocks, 2 of them cached
    scheduler.plan(1_000)
    assert scheduler.preempted == preempted
    assert scheduler.live[8].is_running == bool(preempted)


def test_whole_group_is_made_way_for() -> None:
    scheduler = engine(running_limit=4)
    for slot in range(4, 7):
        scheduler.submit(request(slot, 2, priority=7, arrival_ns=slot))
    step(scheduler)
    submit_group(scheduler, 0, 3)
    assert step(scheduler) == [(4, 2, 1), (0, 0, 3)]
    assert scheduler.preempted == [6, 5]


def test_walk_ends_where_the_steps_tokens_are_used_up() -> None:
    scheduler = engine(running_limit=3, batch_tokens=7)
    for slot in range(3):
        scheduler.submit(request(slot, 1))
    step(scheduler)
    for slot in (3, 4):
        scheduler.submit(request(slot, 5, priority=-1))
    step(scheduler)  # one of the three decodes goes; 2 + 5 tokens fill the step
    assert (scheduler.preempted, slots(scheduler.waiting)) == ([2], [4, 2])


# ------------------------------------------------------------------------------------------------------------- growth


def test_growth_preempts_the_least_senior_until_there_is_enough() -> None:
    scheduler = engine(num_blocks=4)
    scheduler.submit(request(0, 7))
    scheduler.submit(request(1, 3))
    scheduler.submit(request(2, 2, 1, arrival_ns=0))
    step(scheduler)  # blocks: 2, 1; 2 has ended
    scheduler.submit(request(3, 1))
    step(scheduler)  # 0 grows into the last block, 1 into its own second: 1 must go
    assert (scheduler.preempted, slots(scheduler.waiting), scheduler.free) == ([1], [1, 3], 1)
    assert scheduler.wait_reason == "blocks"  # in such a step nobody is admitted


def test_victim_that_would_free_nothing_is_left_and_the_requester_gives_way() -> None:
    scheduler = engine(num_blocks=3, tokens_per_step=1)
    senior, junior = request(0, 4, 8), request(1, 4, 8)
    scheduler.submit(senior)
    scheduler.plan(1_000)
    scheduler.commit([[7]])
    senior.produced, senior.computed = 4, 7
    junior.is_running, junior.produced, junior.computed = True, 1, 4  # as a fork that shares all it has
    junior.blocks = [scheduler.pool.share(block) for block in senior.blocks]
    scheduler.running.append(junior)
    scheduler.pool.held.add(scheduler.pool.take())  # somebody else's
    scheduler.plan(1_000)
    assert scheduler.preempted == [0]
    assert slots(scheduler.running) == [1]


# -------------------------------------------------------------------------------------------------------- prefix cache


def test_full_blocks_are_shared_as_soon_as_their_chunk_is_committed() -> None:
    scheduler = engine(batch_tokens=9)
    first, second = request(0, PROMPT), request(1, [*PROMPT[:8], 1, 2, 3])
    scheduler.submit(first)
    step(scheduler)
    scheduler.submit(second)
    assert step(scheduler) == [(0, 9, 1), (1, 8, 3)]
    assert second.blocks[:2] == first.blocks[:2]
    assert (first.query_tokens, first.hit_tokens) == (10, 0)
    assert (second.query_tokens, second.hit_tokens) == (11, 8)
    assert scheduler.free == 16 - 4


def test_nobody_waits_for_a_prefix_that_is_being_computed_and_the_second_copy_is_given_up() -> None:
    scheduler = engine()
    first, second = request(0, PROMPT), request(1, PROMPT)
    scheduler.submit(first)
    scheduler.submit(second)
    scheduler.plan(1_000)
    assert scheduler.free == 16 - 6
    scheduler.commit([[7], [7]])
    scheduler.check()
    assert (scheduler.free, scheduler.counts["merges"]) == (16 - 4, 2)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] is not first.blocks[2]


def test_at_least_one_token_is_computed() -> None:
    scheduler = engine()
    scheduler.submit(request(0, PROMPT[:8], 1))
    step(scheduler)
    scheduler.submit(request(1, PROMPT[:8], 1))
    assert step(scheduler) == [(1, 4, 4)]


def test_generated_blocks_are_registered_at_the_release() -> None:
    scheduler = engine()
    scheduler.submit(request(0, PROMPT, 7))
    for _ in range(7):
        step(scheduler, token=5)
    assert (scheduler.evictable, scheduler.free) == (4, 12)  # 16 positions computed; the last token never was
    scheduler.submit(request(1, [*PROMPT, *[5] * 7]))
    assert step(scheduler) == [(1, 16, 1)]


def test_preempted_sequence_finds_its_own_blocks_again_and_is_counted_once() -> None:
    scheduler = engine(running_limit=1)
    low = request(0, PROMPT, priority=1)
    scheduler.submit(low)
    step(scheduler)
    scheduler.submit(request(1, 3, 1))
    assert step(scheduler) == [(1, 0, 3)]
    assert step(scheduler) == [(0, 8, 3)]
    assert (low.query_tokens, low.hit_tokens, low.preemptions) == (10, 0, 1)


def test_salt_separates_and_a_prompt_of_unknown_tokens_takes_no_part() -> None:
    scheduler = engine()
    scheduler.submit(request(0, PROMPT, 1))
    scheduler.submit(request(1, PROMPT, 1, salt=(1, 2)))
    scheduler.submit(request(2, 10, 1))
    assert step(scheduler) == [(0, 0, 10), (1, 0, 10), (2, 0, 10)]
    assert scheduler.evictable == 4
    scheduler.submit(request(3, PROMPT, 1, salt=(1, 2)))
    unknown = request(4, 10, 1)
    scheduler.submit(unknown)
    assert step(scheduler) == [(3, 8, 2), (4, 0, 10)]
    assert unknown.query_tokens == 0


def test_same_tokens_behind_another_block_are_no_hit() -> None:
    scheduler = engine()
    scheduler.submit(request(0, [1, 1, 1, 1, 2, 2, 2, 2, 3], 1))
    step(scheduler)
    scheduler.submit(request(1, [2, 2, 2, 2, 3], 1))
    scheduler.submit(request(2, [1, 1, 1, 1, 9, 2, 2, 2, 2, 3], 1))
    assert step(scheduler) == [(1, 0, 5), (2, 4, 6)]


def test_free_blocks_are_taken_first_then_the_least_recently_released_children_before_parents() -> None:
    scheduler = engine(num_blocks=4)
    scheduler.submit(request(0, PROMPT[:9], 1))
    step(scheduler)
    assert (scheduler.free, scheduler.evictable) == (2, 2)
    scheduler.submit(request(1, 11, 1))
    step(scheduler)
    assert (scheduler.pool.evictions, scheduler.evictable) == (1, 1)
    scheduler.submit(request(2, PROMPT[:9], 1))
    assert step(scheduler) == [(2, 4, 5)]  # the first block is there, the second was evicted


def test_evictable_hit_is_not_available() -> None:
    scheduler = engine(num_blocks=3)
    scheduler.submit(request(0, PROMPT[:9], 1))
    step(scheduler)
    assert (scheduler.free, scheduler.evictable) == (1, 2)
    scheduler.submit(request(1, [*PROMPT[:8], *range(5)], 1))  # 4 blocks: 2 hits and 2 more
    assert step(scheduler) == []
    assert scheduler.wait_reason == "blocks"


# -------------------------------------------------------------------------------------------------------------- forks


def submit_group(scheduler: Scheduler, first: int, prompt: int | list[int], max_new: int = 8) -> list[Sequence]:
    """Three choices, which arrive together."""
    members = [request(first + k, prompt, max_new) for k in range(3)]
    for member in members:
        member.arrival_ns = first
    scheduler.submit(members[0], members[1:])
    return members


@pytest.mark.parametrize(("prompt", "shared", "copies"), [(10, 2, 2), (9, 2, 0), (8, 1, 2), (1, 0, 0), (4, 0, 2)])
def test_forks_share_full_blocks_and_copy_what_stands_before_their_first_position(
    prompt: int, shared: int, copies: int
) -> None:
    scheduler = engine()
    parent, one, two = submit_group(scheduler, 0, prompt)
    assert step(scheduler) == [(0, 0, prompt)]
    for fork in (one, two):
        assert fork.blocks[:shared] == parent.blocks[:shared]
        assert not set(fork.blocks[shared:]) & set(parent.blocks)
    assert scheduler.reserved == 0
    source = parent.blocks[shared] if copies else None
    assert step(scheduler) == [(0, prompt, 1), (1, prompt - 1, 1), (2, prompt - 1, 1)]
    assert scheduler.copies == [(slot, shared, source) for slot in (1, 2)][:copies]
    step(scheduler)
    assert scheduler.copies == []


def test_group_is_admitted_as_a_whole_or_not_at_all() -> None:
    scheduler = engine(running_limit=3)
    scheduler.submit(request(9, 3, 2, arrival_ns=0))
    step(scheduler)
    submit_group(scheduler, 0, 3)
    assert step(scheduler) == [(9, 3, 1)]
    assert (scheduler.wait_reason, slots(scheduler.running)) == ("slots", [])
    assert step(scheduler) == [(0, 0, 3)]
    assert slots(scheduler.running) == [0, 1, 2]


def test_reserved_blocks_are_promised_and_not_available() -> None:
    scheduler = engine(num_blocks=8, batch_tokens=6)
    submit_group(scheduler, 0, 10)  # 3 blocks, and 1 for each fork
    scheduler.submit(request(3, 12))  # 4 blocks
    assert step(scheduler) == [(0, 0, 6)]
    assert (scheduler.free, scheduler.reserved, scheduler.available) == (5, 2, 3)
    assert step(scheduler) == [(0, 6, 4)]
    assert (scheduler.free, scheduler.reserved, scheduler.wait_reason) == (3, 0, "blocks")


def test_source_of_a_copy_stays_until_the_plan_is_committed() -> None:
    scheduler = engine()
    submit_group(scheduler, 0, 10, 1)
    step(scheduler)
    assert scheduler.ended == {0: ("length", 1)}
    assert scheduler.free == 16 - 2 - 1 - 2  # two shared, the source, one for each fork
    step(scheduler)
    assert scheduler.free == 16


def test_cancelled_fork_gives_its_promise_back_and_the_others_go_on() -> None:
    scheduler = engine(batch_tokens=6)
    submit_group(scheduler, 0, 10)
    step(scheduler)
    scheduler.cancel(1, 1_000)
    assert (scheduler.reserved, slots(scheduler.running)) == (1, [0, 2])
    step(scheduler)
    assert step(scheduler) == [(0, 10, 1), (2, 9, 1)]


@pytest.mark.parametrize("is_running", [False, True])
def test_forks_of_a_parent_that_ends_early_are_independent(*, is_running: bool) -> None:
    scheduler = engine(batch_tokens=6)
    submit_group(scheduler, 0, 10)
    if is_running:
        step(scheduler)
    scheduler.cancel(0, 1_000)
    assert (slots(scheduler.waiting), scheduler.reserved, scheduler.free) == ([1, 2], 0, 16)
    assert step(scheduler) == [(1, 0, 6)]


def test_preempted_fork_that_still_waited_computes_its_own_prompt() -> None:
    scheduler = engine(batch_tokens=6, running_limit=3)
    submit_group(scheduler, 0, 10)
    step(scheduler)
    scheduler.submit(request(3, 1, 1, priority=-1))
    assert step(scheduler) == [(3, 0, 1), (0, 6, 4)]
    assert scheduler.preempted == [2]
    assert step(scheduler) == [(0, 10, 1), (1, 9, 1), (2, 0, 4)]


def test_backend_without_kv_in_blocks_gets_independent_sequences() -> None:
    scheduler = engine(has_forks=False)
    submit_group(scheduler, 0, PROMPT)
    assert step(scheduler) == [(0, 0, 10), (1, 0, 10), (2, 0, 10)]


def test_lost_backend_empties_everything_but_the_queue() -> None:
    scheduler = engine(batch_tokens=6)
    scheduler.submit(request(9, PROMPT))
    submit_group(scheduler, 0, 10)
    step(scheduler)
    scheduler.plan(2_000)
    scheduler.lose_backend()
    scheduler.check()
    assert (scheduler.free, scheduler.reserved, scheduler.pool.cached) == (16, 0, {})
    assert (slots(scheduler.running), scheduler.wait_reason) == ([], "device")


# ------------------------------------------------------------------------------------------------------- device limits


def kinds(scheduler: Scheduler, steps: int) -> str:
    """One letter a step: decodes, chunks, or both."""
    letters = []
    for _ in range(steps):
        rows = len(step(scheduler))
        decodes = scheduler.decode_count
        letters.append("-" if rows == 0 else "D" if decodes == rows else "B" if decodes else "C")
    return "".join(letters)


def test_device_that_does_not_mix_begins_with_chunks_and_takes_turns_while_both_have_work() -> None:
    scheduler = engine(mixes=False, batch_tokens=4)
    scheduler.submit(request(0, 2))
    scheduler.submit(request(1, 10, 3))
    assert kinds(scheduler, 9) == "CDCDCDDDD"  # 2 + 2, 4 and 4 tokens of prompts between the decodes
    scheduler.submit(request(2, 3))
    assert kinds(scheduler, 3) == "CDD"


def test_device_that_does_not_mix_goes_on_with_decodes_when_nobody_can_be_admitted() -> None:
    scheduler = engine(mixes=False, running_limit=1)
    scheduler.submit(request(0, 2))
    scheduler.submit(request(1, 2))
    assert kinds(scheduler, 3) == "CDD"
    assert scheduler.wait_reason == "slots"


def test_one_prompt_at_a_time() -> None:
    scheduler = engine(max_prefill_sequences=1, batch_tokens=6)
    for slot in range(3):
        scheduler.submit(request(slot, 4))
    assert step(scheduler) == [(0, 0, 4)]
    assert scheduler.wait_reason == "device"
    assert step(scheduler) == [(0, 4, 1), (1, 0, 4)]
    assert step(scheduler) == [(0, 5, 1), (1, 4, 1), (2, 0, 4)]


def test_padded_rows_times_longest_length_stays_within_the_devices_context() -> None:
    scheduler = engine(sequence_buckets=(1, 2, 4), max_batch_context=40)
    scheduler.submit(request(0, 6, 6))
    for slot in (1, 2):
        scheduler.submit(request(slot, 2, 3))
    step(scheduler)
    assert (slots(scheduler.running), scheduler.wait_reason) == ([0, 1], "device")  # 4 x 12 would be 48
    assert not scheduler.fits_alone(request(3, 30, 11))
    assert scheduler.fits_alone(request(3, 30, 10))
    assert not scheduler.fits_alone(request(3, 10, 1), choices=3)  # padded to 4


# -------------------------------------------------------------------------------------------------------- wait reasons


@pytest.mark.parametrize(
    ("options", "sizes", "reason"),
    [
        ({"running_limit": 1}, (3, 3), "slots"),
        ({"batch_tokens": 4}, (4, 3), "tokens"),
        ({"num_blocks": 2}, (7, 3), "blocks"),
        ({"max_prefill_sequences": 1}, (3, 3), "device"),
        ({"max_batch_context": 21}, (3, 3), "device"),
    ],
)
def test_reason_is_what_the_head_lacks(options: dict[str, int], sizes: tuple[int, int], reason: str) -> None:
    scheduler = engine(**options)
    for slot, prompt in enumerate(sizes):
        scheduler.submit(request(slot, prompt))
    step(scheduler)
    assert scheduler.wait_reason == reason


def test_each_waits_by_the_reason_of_the_moment_and_the_sums_are_exact() -> None:
    scheduler = engine(running_limit=1, batch_tokens=4)
    first, second = request(0, 4, 2, arrival_ns=100), request(1, 4, arrival_ns=200)
    scheduler.submit(first)
    step(scheduler, 250)
    scheduler.submit(second)
    step(scheduler, 300)  # came while a step was under way
    step(scheduler, 470)  # waited for the place
    assert first.waited_ns == {"step": 150}
    assert second.waited_ns == {"step": 100, "slots": 170}
    scheduler.submit(request(2, 1, 1, priority=-8, arrival_ns=480))
    step(scheduler, 500)  # 1 gives way
    step(scheduler, 550)
    assert second.waited_ns == {"step": 100, "slots": 220}


# -------------------------------------------------------------------------------------------------------- random load


class LoadedOracle:
    """The oracle under random load, checked from scratch after each step."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.scheduler, self.load = case.oracle(), Load(case, seed)
        self.now_ns = 1_000
        self.free_slots = set(range(case.config.num_slots))

    def run(self, steps: int) -> Counter[str]:
        """Steps with load, and then those that it takes to come to rest."""
        scheduler, load = self.scheduler, self.load
        for _ in range(steps):
            self._arrivals()
            for slot in load.cancels(sorted(scheduler.live)):
                scheduler.cancel(slot, self.now_ns)
            self._step(is_lost=load.chance(self.case.loss_chance), fails=load.chance(self.case.failure_chance))
        for _ in range(2_000):
            if not scheduler.live:
                return scheduler.counts
            self._step(is_lost=False, fails=False)
        raise AssertionError("it does not come to rest")

    def _arrivals(self) -> None:
        for request in self.load.requests(self.scheduler, self.now_ns):
            if len(self.free_slots) >= request.choices:
                members = [request.sequence(slot) for slot in sorted(self.free_slots)[: request.choices]]
                self.free_slots -= {member.slot for member in members}
                self.scheduler.submit(members[0], members[1:])

    def _step(self, *, is_lost: bool, fails: bool) -> None:
        scheduler = self.scheduler
        self.now_ns += self.load.time_step_ns()
        rows = scheduler.plan(self.now_ns)
        self._check_plan()
        if is_lost:
            scheduler.lose_backend()
        elif fails:
            scheduler.fail_plan()
        else:
            scheduler.commit(self.load.outputs(rows, scheduler.tokens_per_step))
        scheduler.check()
        self.free_slots |= scheduler.ended.keys()
        scheduler.counts.update(end.reason for end in scheduler.ended.values())
        scheduler.ended.clear()

    def _check_plan(self) -> None:
        scheduler = self.scheduler
        assert scheduler.rows or not scheduler.live, "nothing is computed although there is work"
        if scheduler.gave_way == scheduler.preempted:
            assert set(scheduler.made_way_for) <= set(scheduler.admitted), "somebody gave way in vain"
        if scheduler.max_batch_context and scheduler.rows:
            longest = max(row.context for row in scheduler.rows)
            assert scheduler.padded_rows * longest <= scheduler.max_batch_context
        if not scheduler.mixes:
            assert scheduler.decode_count in (0, len(scheduler.rows))


@pytest.mark.parametrize("name", CASES)
def test_oracle_stays_sound_under_random_load(name: str) -> None:
    case = CASES[name]
    counts = LoadedOracle(case, seed=1).run(600)
    print(dict(counts))
    assert counts["length"] + counts["stop"] > 30
    if case.group_chance:
        assert min(counts["forks"], counts["copies"] or case.config.kv_block_size == 1) > 0
    if len(case.priorities) > 1:
        assert (counts["made way"] > 0) == (not case.reserves)
