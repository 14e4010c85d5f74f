"""The real step beside tests/scheduler_oracle.py: the same plans and the same state, after every single step.

A run prints its seed; IRONBATCH_POLICY_SEED=... replays it. When it fails, the last steps are printed, oracle's side.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.backends.base import BatchLimits, BatchPlan
from ironbatch.config import Config
from ironbatch.errors import BackendLost
from ironbatch.kernels.forks import NOT_FORKED
from tests.policy_load import ALL, CASES, EOS, Case, Load, Request
from tests.scheduler_oracle import Copy, Row, Sequence
from tests.support import ScriptedBackend, SmallEngine, Stream

SEED_VARIABLE = "IRONBATCH_POLICY_SEED"
REASONS = {
    "length": layout.FINISH_LENGTH,
    "stop": layout.FINISH_STOP,
    "cancelled": layout.FINISH_CANCELLED,
    "error": layout.FINISH_ERROR,
}
ROW_FIELDS = ["sequence", "first_position", "new_tokens", "context_tokens", "emits", "token_offset"]
REFERENCES_MASK = (1 << 30) - 1
CACHED_BIT = 1 << 30


class Kernels:
    """What the scheduler's arena and segment say, in the oracle's terms."""

    def __init__(self, engine: SmallEngine) -> None:
        self.engine = engine

    @property
    def views(self) -> dict[str, Any]:
        return self.engine.scheduler.arena.views

    def table(self, slot: int) -> list[int]:
        count = int(self.views["sequences"][slot]["block_count"])
        table: list[int] = self.views["block_tables"][slot, :count].tolist()
        return table

    def copies(self) -> list[tuple[int, int]]:
        count = self.engine.gauge("copy_count")
        return [(source, target) for source, target in self.views["copies"][:count].tolist()]

    def holders(self, block: int, slots: list[int]) -> set[tuple[int, int]]:
        """Who has `block`, and at which entry of the table."""
        return {(slot, k) for slot in slots for k, held in enumerate(self.table(slot)) if held == block}

    def references(self, block: int) -> int:
        return int(self.views["refcounts"][block]) & REFERENCES_MASK

    def is_cached(self, block: int) -> bool:
        return bool(int(self.views["refcounts"][block]) & CACHED_BIT)

    def waited_ns(self, slot: int) -> dict[str, int]:
        row = self.engine.segment.slots[slot]
        return {reason: int(row[f"waited_{reason}_ns"]) for reason in layout.WAIT_REASONS}


class Comparison:
    """One engine and one oracle under the same load."""

    def __init__(self, case: Case, seed: int) -> None:
        print(f"\nreplay with {SEED_VARIABLE}={seed}; {case}")
        self.case = case
        self.load = Load(case, seed)
        self.oracle = case.oracle()
        self.engine = SmallEngine(self._make_backend, case.config)
        self.kernels = Kernels(self.engine)
        self.worker = self.engine.worker()
        self.streams: dict[int, Stream] = {}
        self.emitted: dict[int, list[int]] = {}
        self.cancelled: set[int] = set()
        self.was_executed = False
        self.difference: Exception | None = None
        self.may_lose = True
        self.trace: deque[str] = deque(maxlen=12)
        self.forgotten_before = 0

    def _make_backend(self, config: Config) -> ScriptedBackend:
        backend = ScriptedBackend(config)
        backend.batch_limits = BatchLimits(**self.case.limits)
        backend.reserves_output = self.case.reserves
        backend.eos_token_id = EOS
        backend.script = self._execute
        return backend

    def run(self, steps: int) -> Counter[str]:
        """Random load for `steps` steps, then whatever is left comes to its end."""
        try:
            for _ in range(steps):
                self._arrivals()
                self.engine.clock.advance_ns(self.load.time_step_ns())
                self._cancels()
                self.step()
            self.may_lose = False
            for _ in range(2_000):
                if not self.oracle.live:
                    break
                self.engine.clock.advance_ns(self.load.time_step_ns())
                self.step()
            assert self.engine.step() == 0
            self.engine.assert_nothing_held()
        except BaseException:
            print("the last steps, as the oracle has them:", *self.trace, sep="\n")
            raise
        finally:
            self.engine.close()
        return self.oracle.counts

    # ---------------------------------------------------------------------------------------------- what comes in

    def _arrivals(self) -> None:
        for request in self.load.requests(self.oracle, self.engine.clock.now_ns()):
            streams = self._submit(request)
            sequences = [request.sequence(stream.slot) for stream in streams]
            self.streams |= {stream.slot: stream for stream in streams}
            self.emitted |= {stream.slot: [] for stream in streams}
            if sequences:
                self.trace.append(f"submitted {[sequence.slot for sequence in sequences]}: {request}")
                self.oracle.submit(sequences[0], sequences[1:])

    def _submit(self, request: Request) -> list[Stream]:
        return self.worker.try_submit_group(
            request.prompt,
            request.max_new,
            request.choices,
            prompt_token_ids=request.prompt_ids,
            salt=request.salt,
            priority=request.priority,
            arrival_ns=request.arrival_ns,
            flags=layout.FLAG_IGNORE_EOS if request.ignore_eos else 0,
        )

    def _cancels(self) -> None:
        for slot in self.load.cancels(sorted(self.oracle.live.keys() - self.cancelled)):
            self.trace.append(f"cancelled {slot}")
            self.worker.cancel(self.worker.streams[slot])
            self.cancelled.add(slot)
            self.oracle.cancel(slot, self.engine.clock.now_ns())

    # -------------------------------------------------------------------------------------------------- one step

    def step(self) -> None:
        self.was_executed = False
        count = self.engine.step()
        if self.difference:
            raise self.difference
        if not self.was_executed:
            assert count == 0
            assert self.oracle.plan(self.engine.clock.now_ns()) == []
            assert not self.oracle.live, "the scheduler would sleep although there is work"
        self.oracle.check()
        self._compare_queues()
        self._compare_blocks()
        for sequence in self.oracle.running + self.oracle.waiting:
            self._compare_record(sequence)
        for sequence in self.oracle.running:
            self._compare_how_it_fared(sequence)
        self._compare_metrics()
        self.worker.collect()
        self._compare_streams()

    def _execute(self, plan: BatchPlan) -> list[list[int]]:
        """Called by the step between its plan and its commit. The step survives whatever it raises."""
        self.was_executed = True
        try:
            self._compare_plan(plan)
        except Exception as difference:
            self.difference = difference
            raise
        if self.may_lose and self.load.chance(self.case.loss_chance):
            self.trace.append("the backend is lost")
            self.oracle.lose_backend()
            raise BackendLost("drawn by the test")
        if self.may_lose and self.load.chance(self.case.failure_chance):
            self.trace.append("the plan has failed")
            self.oracle.fail_plan()
            raise ValueError("drawn by the test")
        return self._emit(self.oracle.rows)

    def _emit(self, rows: list[Row]) -> list[list[int]]:
        outputs = self.load.outputs(rows, self.oracle.tokens_per_step)
        sequences = [self.oracle.live[row.slot] for row in rows]
        before = [sequence.produced for sequence in sequences]
        self.oracle.commit(outputs)
        for sequence, produced, tokens in zip(sequences, before, outputs, strict=True):
            self.emitted[sequence.slot] += tokens[: sequence.produced - produced]
        return outputs

    # ------------------------------------------------------------------------------------------------- comparisons

    def _compare_plan(self, plan: BatchPlan) -> None:
        oracle, engine = self.oracle, self.engine
        rows = oracle.plan(engine.clock.now_ns())
        self.trace.append(
            f"at {engine.clock.now_ns()}: rows {[tuple(row) for row in rows]}, {oracle.decode_count} decodes,"
            f" preempted {oracle.preempted}, admitted {oracle.admitted},"
            f" waiting {[sequence.slot for sequence in oracle.waiting]} for {oracle.wait_reason}"
        )
        assert [Row(*row) for row in plan.rows[ROW_FIELDS].tolist()] == rows
        assert engine.gauge("plan_decodes") == oracle.decode_count
        assert engine.gauge("displaced_count") == len(oracle.gave_way)
        assert engine.gauge("preempted_count") == len(oracle.preempted) - len(oracle.gave_way)
        assert self._copies() == sorted((self._copy(copy) for copy in oracle.copies), key=lambda copy: copy[0])
        told = [slot for slots in engine.backend.forgotten[self.forgotten_before :] for slot in slots]
        self.forgotten_before = len(engine.backend.forgotten)
        # Forks that still waited have nothing that the backend could forget; who has ended is told of as well.
        assert Counter(slot for slot in oracle.preempted if slot in told) <= Counter(told)

    def _copies(self) -> list[tuple[tuple[int, int], set[tuple[int, int]]]]:
        """Each copy's target, a place in the fork's table, and the places that have its source."""
        running = self.engine.running()
        copies = []
        for source, target in self.kernels.copies():
            (place,) = self.kernels.holders(target, running)
            copies.append((place, self.kernels.holders(source, running)))
        return sorted(copies, key=lambda copy: copy[0])

    def _copy(self, copy: Copy) -> tuple[tuple[int, int], set[tuple[int, int]]]:
        holders = {
            (sequence.slot, k)
            for sequence in self.oracle.running
            for k, block in enumerate(sequence.blocks)
            if block is copy.source
        }
        return (copy.slot, copy.entry), holders

    def _compare_queues(self) -> None:
        oracle, engine = self.oracle, self.engine
        assert engine.running() == [sequence.slot for sequence in oracle.running]
        # Whether the forks of a waiting group stand in the queue beside their parent is the kernels' affair.
        tied = {sequence.slot for sequence in oracle.all_waiting if sequence.is_tied}
        assert [slot for slot in engine.waiting() if slot not in tied] == [head.slot for head in oracle.waiting]
        if oracle.waiting:
            assert layout.WAIT_REASONS[engine.gauge("wait_reason")] == oracle.wait_reason

    def _compare_blocks(self) -> None:
        oracle, engine = self.oracle, self.engine
        counts = {name: engine.gauge(f"{name}_count") for name in ("free", "evictable", "reserved")}
        assert counts == {"free": oracle.free, "evictable": oracle.evictable, "reserved": oracle.reserved}
        twins: dict[int, Any] = {}  # the oracle's block of each of the kernels'
        for sequence in oracle.running:
            table = self.kernels.table(sequence.slot)
            assert len(table) == len(sequence.blocks), f"blocks of {sequence.slot}"
            for k, (block, twin) in enumerate(zip(table, sequence.blocks, strict=True)):
                assert twins.setdefault(block, twin) is twin, f"block {k} of {sequence.slot} is shared with another"
        assert len(set(twins.values())) == len(twins), "blocks that should be shared are not"
        for block, twin in twins.items():
            assert (self.kernels.references(block), self.kernels.is_cached(block)) == (twin.refs, twin.is_cached)

    def _compare_record(self, sequence: Sequence) -> None:
        record = self.kernels.views["sequences"][sequence.slot]
        names = ("produced_tokens", "computed_tokens", "block_count", "preemptions", "priority_class")
        assert {name: int(record[name]) for name in names} == {
            "produced_tokens": sequence.produced,
            "computed_tokens": NOT_FORKED if sequence.is_tied and sequence.is_running else sequence.computed,
            "block_count": len(sequence.blocks),
            "preemptions": sequence.preemptions,
            "priority_class": sequence.priority_class,
        }, f"sequence {sequence.slot}"

    def _compare_how_it_fared(self, sequence: Sequence) -> None:
        row = self.engine.segment.slots[sequence.slot]
        assert row["admitted_generation"] == row["generation"]
        assert row["cached_tokens"] == sequence.hit_tokens
        waited_ns = {reason: sequence.waited_ns[reason] for reason in layout.WAIT_REASONS}
        assert self.kernels.waited_ns(sequence.slot) == waited_ns, f"sequence {sequence.slot}"

    def _compare_metrics(self) -> None:
        metrics = self.engine.segment.metrics[0]
        assert {
            "prefix_query_tokens": int(metrics["prefix_query_tokens"]),
            "prefix_hit_tokens": int(metrics["prefix_hit_tokens"]),
            "prefix_evicted_blocks": int(metrics["prefix_evicted_blocks"]),
        } == {
            "prefix_query_tokens": self.oracle.counts["query tokens"],
            "prefix_hit_tokens": self.oracle.counts["hit tokens"],
            "prefix_evicted_blocks": self.oracle.pool.evictions,
        }

    def _compare_streams(self) -> None:
        for slot, stream in list(self.streams.items()):
            assert stream.token_ids == self.emitted[slot]
            end = self.oracle.ended.pop(slot, None)
            assert stream.reason == (REASONS[end.reason] if end else layout.FINISH_NONE), f"sequence {slot}"
            assert end is None or end.produced == len(stream.token_ids)
            if end:
                del self.streams[slot], self.emitted[slot]
                self.cancelled.discard(slot)


@pytest.fixture
def seed() -> int:
    """A new one in each run, unless it is given."""
    return int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(2**32))


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_oracles(name: str, seed: int) -> None:
    case = CASES[name]
    counts = Comparison(case, seed).run(400)
    print(dict(counts))
    if case.group_chance:
        assert counts["forks"] > 0
    if case.config.kv_block_size == 1:
        assert min(counts["hits"], counts["merges"]) > 0


LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_sequences": st.integers(1, 6),
        "max_tokens": st.integers(1, 16),
        "mixes_prefill_and_decode": st.just(value=False),
        "max_prefill_sequences": st.integers(1, 3),
        "sequence_buckets": st.sampled_from([(1,), (2, 4), (1, 2, 4, 8)]),
        "token_buckets": st.sampled_from([(8,), (2, 4, 8, 16)]),
        "max_batch_context": st.integers(16, 200),
        "max_tokens_per_step": st.integers(1, 3),
    },
)
OPTIONS = st.fixed_dictionaries(
    {
        "total_kv_blocks": st.integers(2, 20),
        "kv_block_size": st.sampled_from([1, 2, 4, 8]),
        "max_batch_tokens": st.integers(1, 16),
        "max_running_seqs": st.integers(1, 8),
        "priority_aging_s": st.sampled_from([0, 1, 3]),
        "no_prefix_cache": st.sampled_from([False, False, True]),
    }
)


@given(options=OPTIONS, limits=LIMITS, seed=st.integers(0, 2**32))
@settings(max_examples=100)
def test_any_engine_is_the_oracles(options: dict[str, Any], limits: dict[str, Any], seed: int) -> None:
    Comparison(Case(options, limits, **ALL), seed).run(40)
