"""docs/scheduling.md in slow Python: the policy as the page says it, on lists of objects, recomputed at every turn.

Where the page leaves something open, the choice is marked by "Chosen:".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ironbatch.layout import WAIT_REASONS
from ironbatch.limits import PRIORITY_CLASSES, PRIORITY_MIN
from tests.pool_oracle import Block, Pool, Salt

DECODES, CHUNKS = "decodes", "chunks"


@dataclass(eq=False)
class Sequence:
    """One live choice of a request, as the scheduler sees it."""

    slot: int
    prompt: int
    max_new: int
    priority: int = 0
    arrival_ns: int = 0
    ignore_eos: bool = False
    prompt_ids: list[int] | None = None  # None: only their number is known
    salt: Salt = (0, 0)
    produced: int = 0
    computed: int = 0
    preemptions: int = 0
    is_running: bool = False
    blocks: list[Block] = field(default_factory=list)
    # Of a group before its fork: the parent knows its forks, and each of them its parent.
    forks: list[Sequence] = field(default_factory=list)
    parent: Sequence | None = None
    is_choice_0: bool = True
    reserved: int = 0
    copy_source: Block | None = None  # what a fork still has to copy
    # How it fared.
    was_admitted: bool = False
    query_tokens: int = 0
    hit_tokens: int = 0
    was_seen: bool = False  # by a plan
    charged_ns: int = 0
    waited_ns: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids) if self.prompt_ids is not None else None
        self.first_class = min(max(self.priority - PRIORITY_MIN, 0), PRIORITY_CLASSES - 1)
        self.priority_class = self.first_class

    @property
    def seniority(self) -> tuple[int, int, int]:
        return (self.priority_class, self.arrival_ns, self.slot)

    @property
    def context(self) -> int:
        return self.prompt + self.produced

    @property
    def longest(self) -> int:
        return self.prompt + self.max_new

    @property
    def remaining(self) -> int:
        return self.context - self.computed

    @property
    def is_tied(self) -> bool:
        """Waits for its parent's prefill, to fork from it."""
        return self.parent is not None

    @property
    def decodes(self) -> bool:
        return not self.is_tied and self.remaining == 1

    @property
    def prefills(self) -> bool:
        return not self.is_tied and self.remaining > 1

    @property
    def members(self) -> list[Sequence]:
        return [self, *self.forks]


class Row(NamedTuple):
    """What one sequence computes in a step."""

    slot: int
    first: int
    new: int
    context: int
    emits: bool
    offset: int


class Copy(NamedTuple):
    """A fork's block, and the one that it is copied from before anything is computed."""

    slot: int
    entry: int  # of the fork's block table
    source: Block


class End(NamedTuple):
    """How a sequence ended, and with how many tokens."""

    reason: str
    produced: int


def aged_class(sequence: Sequence, aging_ns: int, now_ns: int) -> int:
    """Up by one for each `aging_ns` since the arrival."""
    risen = max(now_ns - sequence.arrival_ns, 0) // aging_ns if aging_ns else 0
    return max(0, sequence.first_class - risen)


def smallest_bucket(count: int, buckets: Iterable[int]) -> int:
    """The shape that `count` is padded to; itself without buckets."""
    return min((bucket for bucket in buckets if bucket >= count), default=count)


@dataclass
class Scheduler:
    """`submit` and `cancel` are the drain; then `plan`, and `commit` or what goes wrong instead."""

    num_blocks: int
    block_size: int
    batch_tokens: int
    running_limit: int
    tokens_per_step: int = 1
    reserves: bool = False  # blocks for all of a sequence at its admission; nobody makes way
    eos_token_id: int = -1
    aging_ns: int = 0
    has_prefix_cache: bool = True
    has_forks: bool = True  # a backend that keeps KV in blocks
    mixes: bool = True
    max_prefill_sequences: int | None = None
    sequence_buckets: tuple[int, ...] = ()
    max_batch_context: int | None = None
    limits_running: bool = False  # `running_limit` is the device's
    limits_tokens: bool = False  # `batch_tokens` is

    def __post_init__(self) -> None:
        caches = self.has_prefix_cache and self.has_forks
        self.pool = Pool(self.num_blocks, self.block_size, caches)
        self.waiting: list[Sequence] = []  # heads only: the forks of a group wait with their parent
        self.running: list[Sequence] = []
        self.ended: dict[int, End] = {}
        self.now_ns = 0
        self.last_turn = DECODES  # so that a device which does not mix begins with chunks
        self.wait_reason: str | None = None
        self.counts: Counter[str] = Counter()
        # Of the last plan:
        self.rows: list[Row] = []
        self.decode_count = 0
        self.copies: list[Copy] = []
        self.preempted: list[int] = []
        self.admitted: list[int] = []
        self.has_grown_by_preemption = False
        self.gave_way: list[int] = []  # of the preempted, those who were not preempted by growth
        self.made_way_for: list[int] = []

    # ---------------------------------------------------------------------------------------------- what is exposed

    @property
    def free(self) -> int:
        return self.pool.free

    @property
    def evictable(self) -> int:
        return len(self.pool.evictable)

    @property
    def reserved(self) -> int:
        return sum(sequence.reserved for sequence in self.running)

    @property
    def available(self) -> int:
        return self.free + self.evictable - self.reserved

    @property
    def all_waiting(self) -> list[Sequence]:
        return [member for head in self.waiting for member in head.members]

    @property
    def live(self) -> dict[int, Sequence]:
        return {sequence.slot: sequence for sequence in self.all_waiting + self.running}

    @property
    def padded_rows(self) -> int:
        return smallest_bucket(len(self.rows), self.sequence_buckets)

    # ------------------------------------------------------------------------------------------------------ the drain

    def submit(self, sequence: Sequence, forks: Iterable[Sequence] = ()) -> None:
        forks = list(forks)
        for fork in forks:
            fork.is_choice_0 = False
        if not self.has_forks:
            self._enqueue(*forks)
        else:
            sequence.forks = forks
            for fork in sequence.forks:
                fork.parent = sequence
        self._enqueue(sequence)

    def fits_alone(self, sequence: Sequence, choices: int = 1) -> bool:
        """Whether an empty engine could admit it, and run it to its end."""
        longest = math.ceil(sequence.longest / self.block_size)
        own = self._own_part(sequence)
        return (
            longest <= self.num_blocks
            and self._blocks_for_next(sequence) + (choices - 1) * own <= self.num_blocks
            and choices <= self.running_limit
            and self._device_can_decode([sequence] * choices)
        )

    def cancel(self, slot: int, now_ns: int) -> None:
        self.now_ns = now_ns
        if slot in self.live:
            self._end(self.live[slot], "cancelled")

    # ------------------------------------------------------------------------------------------------------- the plan

    def plan(self, now_ns: int) -> list[Row]:
        self.rows, self.copies, self.preempted, self.admitted = [], [], [], []
        self.gave_way, self.made_way_for = [], []
        self.decode_count = 0
        self.has_grown_by_preemption = False
        self._charge(now_ns)
        self._age()
        self._make_way()
        if self.mixes:
            self._plan_mixed()
        else:
            self._plan_turn()
        self._plan_copies()
        return self.rows

    def _plan_mixed(self) -> None:
        self._plan_decodes()
        self._plan_chunks()
        self._admit()

    def _plan_turn(self) -> None:
        """Decodes after chunks if anybody decodes; else chunks if there are any to compute or to admit."""
        if self.last_turn == DECODES or not any(sequence.decodes for sequence in self.running):
            self._plan_chunks()
            self._admit()
            if self.rows:
                self.last_turn = CHUNKS
                return
        self._plan_decodes()
        if self.rows:
            self.last_turn = DECODES
            self._say_why_nobody_is_admitted()
            return
        self._plan_chunks()  # all decodes have given way, so it is the others' turn
        self._admit()
        self.last_turn = CHUNKS if self.rows else DECODES

    def _say_why_nobody_is_admitted(self) -> None:
        """In a plan of decodes: what the head lacks, else that it is not its turn."""
        self.wait_reason = None
        if self.waiting:
            self.wait_reason = self._lack(self.waiting[0]) or "device"

    def backend_is_closed(self, now_ns: int) -> None:
        """A step without a plan."""
        self._charge(now_ns)
        self.wait_reason = "device" if self.waiting else None

    def _charge(self, now_ns: int) -> None:
        """The time since the last look goes to the reason given then, or to `step` for who came meanwhile."""
        self.now_ns = now_ns
        for sequence in self.all_waiting:
            if sequence.was_seen:
                sequence.waited_ns[self.wait_reason or "step"] += now_ns - sequence.charged_ns
            else:
                sequence.waited_ns["step"] += now_ns - sequence.arrival_ns
            sequence.was_seen = True
            sequence.charged_ns = now_ns

    # 1. Ageing.

    def _age(self) -> None:
        for sequence in self.all_waiting:
            sequence.priority_class = aged_class(sequence, self.aging_ns, self.now_ns)
        self._sort()

    # 2. Make way.

    def _make_way(self) -> None:
        if self.reserves or not self.waiting or not self._is_lower_than_head(self.running):
            return
        for sequence in self.running:  # only here do the running age, too
            sequence.priority_class = min(sequence.priority_class, aged_class(sequence, self.aging_ns, self.now_ns))
        self._sort()
        tokens, chunks = self._room_for_chunks(self.waiting[0])
        while self.waiting and tokens > 0 and chunks > 0 and self._is_lower_than_head(self.running):
            head = self.waiting[0]
            victims = self._victims(head)
            if victims is None:
                return
            for victim in victims:  # each returns to the queue behind the head, whose class is higher
                self._preempt(victim)
                self.counts["made way"] += 1
                self.gave_way.append(victim.slot)
            if victims:
                self.made_way_for.append(head.slot)
            self._admit_one(head)
            tokens -= head.remaining
            chunks -= 1

    def _is_lower_than_head(self, running: list[Sequence]) -> bool:
        """Whether the least senior of them is of a strictly lower class than the head of the queue."""
        return bool(running) and running[-1].priority_class > self.waiting[0].priority_class

    def _room_for_chunks(self, head: Sequence) -> tuple[int, float]:
        """Tokens and chunks of this plan for requests of the head's class: others come first."""
        before = [s.remaining for s in self.running if s.prefills and s.priority_class <= head.priority_class]
        chunks = math.inf if self.max_prefill_sequences is None else self.max_prefill_sequences - len(before)
        return self.batch_tokens - len(self.running) - sum(remaining - 1 for remaining in before), chunks

    def _victims(self, request: Sequence) -> list[Sequence] | None:
        """Who has to give way, least senior first; nobody if it fits. None if that would not be enough."""
        places = len(self.running) + len(request.members) - self.running_limit
        growth = {sequence.slot: self._growth(sequence) for sequence in self.running}
        blocks = self._need(request) + sum(growth.values()) - self.available
        matched = self._match(request)
        staying = list(self.running)
        while places > 0 or blocks > 0 or not self._device_can_decode(staying + request.members):
            if not self._is_lower_than_head(staying):
                return None
            gain = self._would_free(staying[-1], matched)
            if gain == 0 and blocks > 0:  # one without blocks to free still frees a place, if that is all that lacks
                return None
            places -= 1
            blocks -= gain + growth[staying.pop().slot]
        return self.running[len(staying) :][::-1]

    def _growth(self, sequence: Sequence) -> int:
        """Blocks that its decode will take in this plan: the newcomer must not have them."""
        return max(self._blocks_for_next(sequence) - len(sequence.blocks), 0) if sequence.decodes else 0

    @staticmethod
    def _would_free(victim: Sequence, spared: Iterable[Block] = ()) -> int:
        """Blocks that nobody else holds, and its reservation; but none that the newcomer would find cached."""
        held = [*victim.blocks, victim.copy_source] if victim.copy_source else victim.blocks
        return victim.reserved + sum(block.refs == 1 and block not in spared for block in held)

    # 3. Decodes.

    def _plan_decodes(self) -> None:
        for sequence in [sequence for sequence in self.running if sequence.decodes]:
            if sequence.is_running and self._grow(sequence):
                self._add_row(sequence, 1)
        self.decode_count = len(self.rows)

    def _grow(self, sequence: Sequence) -> bool:
        """Blocks for the next emission, from the least senior if need be. False if the requester itself had to go."""
        missing = max(self._blocks_for_next(sequence) - len(sequence.blocks), 0)
        while self.available < missing:
            victim = self.running[-1]
            if self.running == [sequence]:
                self._end(sequence, "error")
                return False
            self.has_grown_by_preemption = True
            if victim is sequence or self._would_free(victim) == 0:
                self._preempt(sequence)
                return False
            self._preempt(victim)
        sequence.blocks += [self.pool.take() for _ in range(missing)]
        return True

    # 4. Running prefills.

    def _plan_chunks(self) -> None:
        for sequence in [sequence for sequence in self.running if sequence.prefills]:
            if self._budget() > 0 and not self._has_all_chunks(self._chunk_count()):
                self._add_row(sequence, sequence.remaining)

    # 5. Admission.

    def _admit(self) -> None:
        self.wait_reason = None
        while self.waiting and self.wait_reason is None:
            head = self.waiting[0]
            self.wait_reason = self._lack(head)
            if self.wait_reason is None:
                self._admit_one(head)
                self._add_row(head, head.remaining)

    def _lack(self, head: Sequence) -> str | None:
        """The first of these that it lacks, in this order."""
        if self.has_grown_by_preemption and self.rows:  # else a step would compute nothing although there is work
            return "blocks"
        if len(self.running) + len(head.members) > self.running_limit:
            return "device" if self.limits_running else "slots"
        if not self._device_can_decode(self.running + head.members):
            return "device"
        if self._budget() == 0:
            return "device" if self.limits_tokens else "tokens"
        if self._has_all_chunks(self._chunk_count()):
            return "device"
        return "blocks" if self._need(head) > self.available else None

    def _admit_one(self, head: Sequence) -> None:
        wanted = self._blocks_for_next(head)
        head.blocks = [self.pool.share(block) for block in self._match(head)]
        head.computed = len(head.blocks) * self.block_size
        if self._takes_part_in_cache(head) and not head.was_admitted:
            head.query_tokens = head.prompt
            head.hit_tokens = min(head.computed, head.prompt)
            self.counts["query tokens"] += head.query_tokens * head.is_choice_0  # once a request
            self.counts["hit tokens"] += head.hit_tokens * head.is_choice_0
        self.counts["hits"] += len(head.blocks)
        head.blocks += [self.pool.take() for _ in range(wanted - len(head.blocks))]
        self.waiting.remove(head)
        for member in head.members:
            member.was_admitted = True
            member.hit_tokens = head.hit_tokens  # a fork has as much of its prompt from the cache as its parent
            member.is_running = True
            self.running.append(member)
            self.admitted.append(member.slot)
        for fork in head.forks:
            fork.reserved = self._own_part(fork)
        self._sort()

    def _need(self, head: Sequence) -> int:
        """What it takes out of the available blocks; an evictable hit is taken out as well."""
        matched = self._match(head)
        revived = [block for block in matched if block.refs == 0]
        fresh = self._blocks_for_next(head) - len(matched)
        return fresh + len(revived) + sum(self._own_part(fork) for fork in head.forks)

    def _match(self, head: Sequence) -> list[Block]:
        return self.pool.match(head.salt, head.token_ids or []) if self._takes_part_in_cache(head) else []

    def _takes_part_in_cache(self, sequence: Sequence) -> bool:
        return self.pool.has_cache and sequence.token_ids is not None

    def _plan_copies(self) -> None:
        for row in self.rows:
            fork = self.live[row.slot]
            if fork.copy_source:
                self.copies.append(Copy(row.slot, row.first // self.block_size, fork.copy_source))

    # ------------------------------------------------------------------------------------------------ sizes and limits

    def _blocks_for_next(self, sequence: Sequence) -> int:
        """Blocks for the context and whatever the next emission can add to it, or for all that will ever come."""
        if self.reserves:
            return math.ceil(sequence.longest / self.block_size)
        return math.ceil(min(sequence.context + self.tokens_per_step, sequence.longest) / self.block_size)

    def _own_part(self, fork: Sequence) -> int:
        """Of a fork's blocks those that it does not share with its parent."""
        return self._blocks_for_next(fork) - self._shared_part(fork)

    def _shared_part(self, fork: Sequence) -> int:
        return (fork.prompt - 1) // self.block_size

    def _budget(self) -> int:
        return self.batch_tokens - sum(row.new for row in self.rows)

    def _chunk_count(self) -> int:
        return len(self.rows) - self.decode_count

    def _has_all_chunks(self, count: int) -> bool:
        return self.max_prefill_sequences is not None and count >= self.max_prefill_sequences

    def _device_can_decode(self, sequences: list[Sequence]) -> bool:
        """All of them in one step, each at its longest."""
        if self.max_batch_context is None:
            return True
        rows = smallest_bucket(len(sequences), self.sequence_buckets)
        return rows * max(sequence.longest for sequence in sequences) <= self.max_batch_context

    def _add_row(self, sequence: Sequence, wanted: int) -> None:
        new = min(wanted, self._budget())
        offset = self.batch_tokens - self._budget()
        context = sequence.computed + new
        self.rows.append(Row(sequence.slot, sequence.computed, new, context, context == sequence.context, offset))

    # ---------------------------------------------------------------------------------------------------- the commit

    def commit(self, outputs: list[list[int]]) -> None:
        """Chosen: copies are let go of first, then row after row is appended, registered, forked from and finished."""
        for copy in self.copies:
            self._let_go_of_copy(self.live[copy.slot])
            self.counts["copies"] += 1
        for k, (row, tokens) in enumerate(zip(self.rows, outputs, strict=True)):
            sequence = self.live[row.slot]
            reason = self._append(sequence, row, tokens)
            if k >= self.decode_count:  # Chosen: a prompt's last position, computed as a decode, is not a chunk
                self._register(sequence)
            if row.emits:
                for fork in list(sequence.forks):
                    self._fork(sequence, fork)
            if reason:
                self._end(sequence, reason)

    def _append(self, sequence: Sequence, row: Row, tokens: list[int]) -> str | None:
        if not row.emits:
            sequence.computed = row.context
            return None
        reason = None
        for token in tokens:
            sequence.produced += 1
            if sequence.token_ids is not None:
                sequence.token_ids.append(token)
            if token == self.eos_token_id and not sequence.ignore_eos:
                reason = "stop"
            elif sequence.produced == sequence.max_new:
                reason = "length"
            if reason:
                break
        # The last token of a context is always computed with the step that emits the next.
        sequence.computed = sequence.context - 1
        return reason

    def _register(self, sequence: Sequence) -> None:
        if sequence.token_ids is not None:
            before = self.pool.merges
            self.pool.register(sequence.blocks, sequence.salt, sequence.token_ids, sequence.computed)
            self.counts["merges"] += self.pool.merges - before

    def _fork(self, parent: Sequence, fork: Sequence) -> None:
        shared = self._shared_part(fork)
        self._untie(fork)
        own = self._blocks_for_next(fork) - shared
        fork.blocks = [self.pool.share(block) for block in parent.blocks[:shared]]
        fork.blocks += [self.pool.take() for _ in range(own)]
        fork.computed = fork.prompt - 1
        if fork.computed % self.block_size:
            fork.copy_source = self.pool.share(parent.blocks[shared])
        self.counts["forks"] += 1

    # ----------------------------------------------------------------------------------------- leaving, in whatever way

    def fail_plan(self) -> None:
        """The backend raised: all of the plan's sequences end."""
        for row in self.rows:
            self._end(self.live[row.slot], "error")

    def lose_backend(self) -> None:
        """All KV is lost. Chosen: whoever waits, waits for the device from the time of the plan that was lost."""
        self.pool.has_cache, had = False, self.pool.has_cache  # nothing is registered any more
        for sequence in reversed(list(self.running)):
            self._preempt(sequence)
        self.pool.clear()
        self.pool.has_cache = had
        self.wait_reason = "device"

    def _preempt(self, victim: Sequence) -> None:
        self._leave(victim)
        victim.preemptions += 1
        victim.was_seen = True
        victim.charged_ns = self.now_ns
        self.preempted.append(victim.slot)
        self.counts["preemptions"] += 1
        self._enqueue(victim)

    def _end(self, sequence: Sequence, reason: str) -> None:
        self._leave(sequence, is_kv_good=reason != "error")
        self.ended[sequence.slot] = End(reason, sequence.produced)

    def _leave(self, sequence: Sequence, *, is_kv_good: bool = True) -> None:
        """Out of the queue or the running set, with all that it held; its group goes on without it."""
        was_running = sequence.is_running
        if sequence.is_tied:
            self._untie(sequence)
        elif not was_running:
            self.waiting.remove(sequence)
        if was_running:
            self.running.remove(sequence)
            sequence.is_running = False
            self._release(sequence, is_kv_good=is_kv_good)
        for fork in list(sequence.forks):  # Chosen: they are independent from now on, and have no blocks to run with
            self._untie(fork)
            if was_running:
                self._preempt(fork)
            else:
                self._enqueue(fork)

    def _untie(self, fork: Sequence) -> None:
        assert fork.parent is not None
        fork.parent.forks.remove(fork)
        fork.parent = None
        fork.reserved = 0

    def _release(self, sequence: Sequence, *, is_kv_good: bool) -> None:
        """The source of a copy first, then from the last block to the first: children are evicted before parents."""
        self._let_go_of_copy(sequence)
        if is_kv_good:
            self._register(sequence)
        for block in reversed(sequence.blocks):
            self.pool.drop(block)
        sequence.blocks = []
        sequence.computed = 0

    def _let_go_of_copy(self, sequence: Sequence) -> None:
        if sequence.copy_source:
            self.pool.drop(sequence.copy_source)
            sequence.copy_source = None

    def _enqueue(self, *sequences: Sequence) -> None:
        self.waiting += sequences
        self._sort()

    def _sort(self) -> None:
        self.waiting.sort(key=lambda sequence: sequence.seniority)
        self.running.sort(key=lambda sequence: sequence.seniority)

    # -------------------------------------------------------------------------------------------------------- soundness

    def check(self) -> None:
        """What holds between steps, from scratch."""
        sources = [sequence.copy_source for sequence in self.running if sequence.copy_source]
        self.pool.check([block for sequence in self.running for block in sequence.blocks] + sources)
        assert self.available >= 0
        assert len(self.running) <= self.running_limit
        assert self.wait_reason is None or self.wait_reason in WAIT_REASONS
        for sequence in self.running:
            assert sequence.is_running
            assert sequence.produced < sequence.max_new
            if sequence.is_tied:
                assert sequence.parent in self.running
                assert (sequence.blocks, sequence.computed) == ([], 0)
                continue
            assert 0 <= sequence.computed < sequence.context <= len(sequence.blocks) * self.block_size
            for block in sequence.blocks[sequence.computed // self.block_size :]:
                assert block.refs - sources.count(block) == 1, "a block that will be written belongs to several"
        for sequence in self.all_waiting:
            assert not sequence.is_running
            assert (sequence.blocks, sequence.computed, sequence.reserved) == ([], 0, 0)
        self._check_waits()

    def _check_waits(self) -> None:
        for sequence in self.running:
            if sequence.preemptions == 0:
                assert sequence.waited_ns.total() == sequence.charged_ns - sequence.arrival_ns
