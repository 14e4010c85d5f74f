"""Plan and commit against the oracle: the same rows, step by step, and the same tokens and ends for the clients."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ironbatch import layout
from ironbatch.backends.base import BatchLimits, BatchPlan
from ironbatch.config import Config
from ironbatch.errors import BackendLost
from tests import scheduler_oracle as oracle
from tests.support import ScriptedBackend, SmallEngine, Stream, machine_settings, small_config, small_engine

EOS = 9
REASONS = {
    "length": layout.FINISH_LENGTH,
    "stop": layout.FINISH_STOP,
    "cancelled": layout.FINISH_CANCELLED,
}


class SchedulerMachine(RuleBasedStateMachine):
    """The real step, with outputs drawn at random, beside the oracle."""

    @initialize(
        total_kv_blocks=st.integers(2, 12),
        kv_block_size=st.sampled_from([1, 2, 4, 8]),
        max_batch_tokens=st.integers(1, 12),
        max_running_seqs=st.integers(1, 5),
        tokens_per_step=st.integers(1, 3),
    )
    def start(self, *, tokens_per_step: int, **options: int) -> None:
        def make_backend(config: Config) -> ScriptedBackend:
            backend = ScriptedBackend(config)
            backend.batch_limits = BatchLimits(max_tokens_per_step=tokens_per_step)
            backend.eos_token_id = EOS
            backend.script = self._execute
            return backend

        self.engine = SmallEngine(make_backend, small_config(max_queued_requests=6, max_model_len=24, **options))
        self.worker = self.engine.worker()
        self.oracle = oracle.Scheduler(
            num_blocks=options["total_kv_blocks"],
            block_size=options["kv_block_size"],
            batch_tokens=options["max_batch_tokens"],
            running_limit=min(options["max_running_seqs"], options["max_batch_tokens"]),
            tokens_per_step=tokens_per_step,
            eos_token_id=EOS,
        )
        self.emitted: dict[int, list[int]] = {}
        self.cancelled: list[int] = []
        self.random = random.Random(0)
        self.loses = False
        self.was_executed = False

    def _execute(self, plan: BatchPlan) -> list[list[int]]:
        self.was_executed = True
        rows = self.oracle.plan(self.engine.clock.now_ns())
        names = ("sequence", "first_position", "new_tokens", "context_tokens", "emits", "token_offset")
        assert [oracle.Row(*row) for row in plan.rows[list(names)].tolist()] == rows
        if self.loses:
            self.oracle.lose_backend()
            raise BackendLost("drawn by the test")
        outputs: list[list[int]] = []
        for row in rows:
            count = self.random.randint(0, self.oracle.tokens_per_step) if row.emits else 0
            outputs.append([self.random.choice((1, 2, 3, 4, 5, EOS)) for _ in range(count)])
        before = {sequence.slot: sequence.produced for sequence in self.oracle.running}
        after = {sequence.slot: sequence for sequence in self.oracle.running}
        self.oracle.commit(outputs)
        for row, tokens in zip(rows, outputs, strict=True):
            self.emitted[row.slot] += tokens[: after[row.slot].produced - before[row.slot]]
        return outputs

    @rule(draw=st.data())
    def submit(self, draw: Any) -> None:
        prompt, max_new, fields = self._request(draw)
        stream = self.worker.try_submit(prompt, max_new, **fields)
        if stream is None:
            return
        self.emitted[stream.slot] = []
        ignore_eos = fields["flags"] == layout.FLAG_IGNORE_EOS
        sequence = oracle.Sequence(
            stream.slot, prompt, max_new, fields["priority"], fields["arrival_ns"], ignore_eos=ignore_eos
        )
        self.oracle.submit(sequence)

    def _request(self, draw: Any) -> tuple[int, int, dict[str, int]]:
        total = draw.draw(st.integers(2, self.engine.config.max_request_tokens), label="prompt and output")
        prompt = draw.draw(st.integers(1, total - 1), label="prompt")
        fields = {
            "priority": draw.draw(st.sampled_from([-8, 0, 7]), label="priority"),
            "arrival_ns": draw.draw(st.integers(0, 5), label="arrival"),
            "flags": draw.draw(st.sampled_from([0, layout.FLAG_IGNORE_EOS]), label="flags"),
        }
        return prompt, total - prompt, fields

    @precondition(lambda self: self.worker.streams.keys() - self.cancelled)
    @rule(draw=st.data())
    def cancel(self, draw: Any) -> None:
        slot = draw.draw(st.sampled_from(sorted(self.worker.streams.keys() - self.cancelled)), label="slot")
        self.worker.cancel(self.worker.streams[slot])
        self.cancelled.append(slot)

    @rule(seed=st.integers(0, 2**32), loses=st.sampled_from([False] * 9 + [True]))
    def step(self, seed: int, *, loses: bool) -> None:
        self.random.seed(seed)
        self.loses = loses
        self.was_executed = False
        for slot in self.cancelled:
            self.oracle.cancel(slot, self.engine.clock.now_ns())
        self.cancelled.clear()
        streams = dict(self.worker.streams)
        count = self.engine.step()
        if not self.was_executed:
            assert count == 0
            assert self.oracle.plan(self.engine.clock.now_ns()) == []
        self.worker.collect()
        self._compare(streams)

    def _compare(self, streams: dict[int, Stream]) -> None:
        for slot, stream in streams.items():
            assert stream.token_ids == self.emitted[slot]
            end = self.oracle.ended.pop(slot, None)
            assert stream.reason == (REASONS[end.reason] if end else layout.FINISH_NONE)
            assert end is None or end.produced == len(stream.token_ids)
        assert self.engine.running() == [sequence.slot for sequence in self.oracle.running]
        assert self.engine.waiting() == [sequence.slot for sequence in self.oracle.waiting]
        assert self.engine.gauge("free_count") == self.oracle.free
        table = self.engine.scheduler.arena.views["sequences"]
        for sequence in self.oracle.running + self.oracle.waiting:
            record = table[sequence.slot]
            assert record["block_count"] == len(sequence.blocks)
            assert record["computed_tokens"] == sequence.computed
            assert record["preemptions"] == sequence.preemptions

    @rule(steps=st.integers(2, 12), seed=st.integers(0, 2**32))
    def steps(self, steps: int, seed: int) -> None:
        for k in range(steps):
            self.step(seed + k, loses=False)

    @invariant()
    def is_sound(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            try:
                self._drain()
            finally:
                self.engine.close()

    def _drain(self) -> None:
        """Whatever has happened, all that is left comes to its end, and nothing stays held."""
        for k in range(2_000):
            if not self.worker.streams:
                break
            self.step(k, loses=False)
        self.engine.assert_nothing_held()


SchedulerMachine.TestCase.settings = machine_settings(max_examples=100, stateful_step_count=50)
TestScheduler = SchedulerMachine.TestCase


def test_nobody_is_admitted_into_a_pool_that_has_just_run_out() -> None:
    """The newcomer would fit into what the preempted has left over, which the next step's decodes may need."""
    with small_engine(ScriptedBackend, total_kv_blocks=6, kv_block_size=2) as engine:
        worker = engine.worker()
        senior = worker.submit(3, 9, arrival_ns=1)
        junior = worker.submit(7, 5, arrival_ns=2)
        engine.step()
        assert engine.gauge("free_count") == 0
        newcomer = worker.submit(1, 2, arrival_ns=0)  # a higher class would make the junior give way
        engine.step()  # the senior takes one of the junior's four blocks
        assert engine.running() == [senior.slot]
        assert engine.waiting() == [newcomer.slot, junior.slot]
        assert engine.gauge("free_count") == 3
        engine.step()
        assert engine.running() == [newcomer.slot, senior.slot]
