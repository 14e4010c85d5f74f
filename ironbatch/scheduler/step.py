"""One scheduler: its private state, its backend, and the step that joins them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from ironbatch import layout
from ironbatch.backends.base import Backend, BatchPlan, EngineLimits, KVGeometry, StepOutput
from ironbatch.backends.limits import EffectiveLimits, effective_limits, narrowing
from ironbatch.clock import Clock
from ironbatch.config import Config
from ironbatch.errors import BackendLost, IronbatchError, RequestError
from ironbatch.kernels.arena import Geometry, StateArena
from ironbatch.kernels.audit import audit
from ironbatch.kernels.commit import INVALID_OUTPUT, announce, commit
from ironbatch.kernels.intake import drain
from ironbatch.kernels.plan import plan
from ironbatch.kernels.recovery import end_begun, end_one, end_plan, preempt_all, rebuild
from ironbatch.kernels.state import FORGET_COUNT, FREE_COUNT, OUTGROWN_COUNT
from ironbatch.kernels.violations import NOT_INTACT, SOUND, VIOLATIONS
from ironbatch.metrics import SCHEDULER_ROW
from ironbatch.scheduler.quarantine import Quarantine
from ironbatch.shm.segment import Segment
from ironbatch.shm.wakeup import Doorbell

_log = logging.getLogger("ironbatch.scheduler")

NS_PER_S = 1_000_000_000
REOPEN_LOG_S = 10
"""A backend that stays lost for one reason is logged this often."""

MOST_LOSSES = 5
"""So many losses of the backend in a row, without a token in between, end what was planned: one of them may be why."""

LOSS_PAUSE_S = 0.05
"""After the second loss in a row; twice as long after each further one."""


SHORT_WAIT_MS = 20


class AuditFailed(IronbatchError):
    """The scheduler's state contradicts itself: nothing that it would do next can be trusted."""


class Scheduler:
    """Single-threaded. Made, which may take as long as its backend needs to connect, then `open`ed, then `step`ped.

    `is_waiting` says whether the last step has found every sequence waiting for tokens that come by themselves.

    Args:
        config: the engine's configuration.
        segment: the shared segment; it may hold live slots of a scheduler that died.
        lane_bells: one doorbell a lane.
        backend: not started yet; `open` starts it.
        clock: where "now" comes from.
    """

    def __init__(
        self,
        config: Config,
        segment: Segment,
        lane_bells: tuple[Doorbell, ...],
        backend: Backend,
        clock: Clock,
    ) -> None:
        self._now_ns = clock.now_ns
        self._backend = backend
        backend.beat = self.beat
        backend.tell_problem = self.tell_problem
        backend.predecessor_running = int(segment.header["most_choices"])
        self._lane_bells = lane_bells
        self._segment = segment
        self.is_waiting = False
        backend.connect()
        limits = effective_limits(config, backend)
        self.narrowing = narrowing(config, limits)
        self.arena = StateArena(_geometry(config, limits, backend.eos_token_id))
        self._kv = KVGeometry(config.total_kv_blocks, config.kv_block_size)
        self._limits = EngineLimits(
            num_sequences=config.num_slots,
            max_running=limits.running_limit,
            max_batch_tokens=limits.batch_tokens,
            max_request_tokens=limits.longest_request_tokens,
        )
        self._plan = BatchPlan(self.arena, segment, backend.batch_limits)
        # A backend that takes fewer at once has no longer queue for it.
        self._usable_slots = min(config.num_slots, limits.running_limit + config.max_queued_requests)
        self._audit_every = config.audit_every
        self._steps_to_audit = config.audit_every
        self._audit_scratch = np.zeros(config.total_kv_blocks, np.int32)
        self._next_reopen_log_ns = 0
        self._reopen_problem = ""  # the newest that was logged
        self._losses = 0  # in a row, without a token
        self._tokens_at_loss = -1
        self._addresses = (self.arena.address, segment.address)
        # Memoryviews, whose items are Python's integers, in half of numpy's time.
        self._words = self.arena.words.data
        self._wakes = self.arena.views["wakes"].data
        self._backend_is_open = False

    def open(self) -> int:
        """Start the backend and take over every live slot. Returns how many sequences wait.

        Sequences that may have killed a predecessor are computed alone first. Every worker is woken once: a predecessor
        may have died between its last publish and the wake.

        Raises:
            AuditFailed: as `step`, while it computes those.
        """
        state, shared = self._addresses
        header = self._segment.header
        header["longest_step_ns"] = self._backend.longest_step_ns
        header["heartbeat_ns"] = self._now_ns()
        self._backend.start(self._kv, self._limits)
        self._backend_is_open = True
        header["longest_request_tokens"] = self._limits.max_request_tokens
        header["most_choices"] = self._limits.max_running
        header["usable_slots"] = self._usable_slots
        header["step_started_ns"] = self._now_ns()  # its start is over, also for those who watch it
        if not self._backend.resumable:
            end_begun(state, shared)
        self._segment.metrics[SCHEDULER_ROW]["scheduler_starts"] += 1
        Quarantine(self._segment, self.arena, self._step_and_wait, self._now_ns).run()
        self._forget_quietly()
        waiting = int(rebuild(state, shared, self._now_ns()))
        self.beat()
        header["scheduler_ready"] = 1
        for bell in self._lane_bells:
            bell.ring()
        return waiting

    def beat(self) -> None:
        """Say that the scheduler lives."""
        self._segment.header["heartbeat_ns"] = self._now_ns()

    def tell_problem(self, problem: int) -> None:
        """Say why the backend has nobody to compute, or that it has."""
        self._segment.header["backend_problem"] = problem

    @property
    def news(self) -> Doorbell | None:
        """What the backend rings when tokens have come by themselves."""
        return self._backend.news

    def step(self, intake: Callable[[int, int, int], int] = drain) -> int:
        """Run one step. Returns the number of sequences that it computed; 0 means that there is nothing to do.

        Args:
            intake: the kernel that it begins with.

        Raises:
            AuditFailed: it is time to hand over to a fresh scheduler.
        """
        state, shared = self._addresses
        now_ns = self._now_ns()
        intake(state, shared, now_ns)
        if not self._backend_is_open and not self._reopen():
            self._wake(announce(state, shared))
            return 0
        count: int = plan(state, shared, now_ns)
        self.is_waiting = False
        batch = self._plan
        batch.count = count
        batch.has_tokens = False
        try:
            if self._words[FORGET_COUNT]:
                self._forget()
            if count == 0:
                self._wake(announce(state, shared))
                return 0
            output = self._backend.execute(batch)
            if output is not batch.output:
                self._copy_output(output, count)
            if self._backend.news is not None and self._has_no_news(count):
                self.is_waiting = True
                self._segment.header["in_device_call"] = layout.CALL_NONE
                self._wake(announce(state, shared))
                return count
            wakes = commit(state, shared)
            if wakes == INVALID_OUTPUT:
                self._refuse_output(count)
        except Exception as problem:  # a backend's fault must not end the server
            self._execute_failed(problem)
            wakes = announce(state, shared)
        if wakes:
            self._wake(wakes)
        self._steps_to_audit -= 1
        if self._steps_to_audit == 0:
            self.audit()
        return count

    def audit(self) -> None:
        """Check all private state. Raises AuditFailed naming what is wrong."""
        self._steps_to_audit = self._audit_every
        metrics = self._segment.metrics[SCHEDULER_ROW]
        metrics["audits"] += 1
        violation = NOT_INTACT
        if self.arena.is_intact:
            violation = int(audit(*self._addresses, self._audit_scratch))
        if violation != SOUND:
            metrics["audit_failures"] += 1
            raise AuditFailed(f"{VIOLATIONS[violation]} (violation {violation}, after {metrics['steps']} steps)")

    def close(self) -> None:
        """Close the backend; the segment stays as it is, for a successor."""
        if self._backend_is_open:
            self._backend_is_open = False
            self._backend.close()

    def _has_no_news(self, count: int) -> bool:
        """Whether every row waits for its next token and got none: such a step has nothing to commit."""
        output = self._plan.output
        is_silent = not output.counts[:count].any() and not output.finish_reasons[:count].any()
        return is_silent and self._plan.decode_count == count

    def _step_and_wait(self, intake: Callable[[int, int, int], int]) -> int:
        """A step, and the wait that may be owed after it, for whoever steps in a loop of its own."""
        count = self.step(intake)
        if self.is_waiting and self._backend.news is not None:
            self._backend.news.wait(SHORT_WAIT_MS)
        return count

    def _wake(self, count: int) -> None:
        for k in range(count):
            self._lane_bells[self._wakes[k]].ring()

    def _forget(self) -> None:
        count = self._words[FORGET_COUNT]
        self._words[FORGET_COUNT] = 0
        self._backend.forget(self.arena.views["forget"][:count])
        if self._words[OUTGROWN_COUNT]:  # it is among those forgotten
            self._words[OUTGROWN_COUNT] = 0
            _log.error(
                "a sequence ran alone and outgrew the KV pool, of which %d blocks are free: the others are lost",
                self._words[FREE_COUNT],
            )

    def _forget_quietly(self) -> None:
        """`_forget` outside of a step: `rebuild` wants the list's memory."""
        try:
            if self._words[FORGET_COUNT]:
                self._forget()
        except Exception as problem:  # as in `step`
            self._execute_failed(problem)

    def _copy_output(self, output: StepOutput, count: int) -> None:
        """Take over an output that the backend has allocated itself."""
        if not isinstance(output, StepOutput):
            raise TypeError(f"the backend's execute returned {type(output).__name__}, not a StepOutput")
        mine = self._plan.output
        total = int(np.sum(output.counts[:count]))
        mine.counts[:count] = output.counts[:count]
        mine.token_ids[:total] = output.token_ids[:total]
        mine.finish_reasons[:count] = output.finish_reasons[:count]

    def _refuse_output(self, count: int) -> NoReturn:
        counts, most = self._plan.output.counts[:count], self.arena.geometry.tokens_per_step
        row = int(np.argmax((counts < 0) | (counts > most)))
        raise ValueError(f"the backend emitted {counts[row]} tokens for row {row}; its max_tokens_per_step is {most}")

    def _execute_failed(self, problem: Exception) -> None:
        state, shared = self._addresses
        self._plan.output.finish_reasons[:] = layout.FINISH_NONE
        if isinstance(problem, BackendLost):
            self._backend_lost(problem)
            return
        if isinstance(problem, RequestError):
            named = set(self._plan.rows["sequence"].tolist()) & set(problem.sequences)
            for sequence in sorted(named):
                end_one(state, shared, sequence, layout.ERROR_REQUEST)
            _log.warning("backend refused %d sequences: %s", len(named), problem)
            if named:
                return
        count = end_plan(state, shared, layout.ERROR_BACKEND)
        _log.error("backend failed; the plan's %d sequences end with an error", count, exc_info=problem)

    def _backend_lost(self, problem: BackendLost) -> None:
        """Preempt all. What was planned when no token has come since the last few losses may be why, and ends."""
        state, shared = self._addresses
        tokens = int(self._segment.metrics[SCHEDULER_ROW]["tokens_generated"])
        self._losses = self._losses + 1 if tokens == self._tokens_at_loss else 1
        self._tokens_at_loss = tokens
        ended = 0
        if self._losses == MOST_LOSSES:
            self._losses = 0
            ended = end_plan(state, shared, layout.ERROR_BACKEND)
        count = preempt_all(state, shared, int(self._backend.resumable))
        _log.error("backend lost: %s; %d sequences preempted, reopening it", problem, count)
        if ended:
            _log.error("backend lost %d times without a token; the plan's %d sequences end", MOST_LOSSES, ended)
        self._words[FORGET_COUNT] = 0  # whoever has lost everything has nothing to forget
        try:
            self.close()
        except Exception as trouble:  # who has lost its device may fail to let go of it
            _log.error("the lost backend cannot be closed: %s: %s", type(trouble).__name__, trouble)
        if self._losses > 1:
            time.sleep(LOSS_PAUSE_S * 2 ** (self._losses - 2))

    def _reopen(self) -> bool:
        header = self._segment.header
        header["in_device_call"] = layout.CALL_OPENING
        try:
            self._backend.start(self._kv, self._limits)
        except Exception as problem:  # it stays lost; the next step tries again
            header["scheduler_ready"] = 0
            now_ns = self._now_ns()
            told = f"{type(problem).__name__}: {problem}"
            if now_ns >= self._next_reopen_log_ns or told != self._reopen_problem:
                self._next_reopen_log_ns = now_ns + REOPEN_LOG_S * NS_PER_S
                self._reopen_problem = told
                _log.error("backend cannot be reopened: %s", told)
            return False
        finally:
            header["in_device_call"] = layout.CALL_NONE
        self.beat()
        self._backend_is_open = True
        self._next_reopen_log_ns = 0
        header["scheduler_ready"] = 1
        _log.info("backend reopened")
        return True


def _geometry(config: Config, limits: EffectiveLimits, eos_token_id: int) -> Geometry:
    """Sizes and limits of the private state."""
    return Geometry(
        num_slots=config.num_slots,
        num_lanes=config.num_lanes,
        num_blocks=config.total_kv_blocks,
        block_size=config.kv_block_size,
        max_request_tokens=limits.longest_request_tokens,
        running_limit=limits.running_limit,
        batch_tokens=limits.batch_tokens,
        tokens_per_step=limits.tokens_per_step,
        reserves=limits.reserves,
        eos_token_id=eos_token_id,
        prefix_cache=limits.prefix_cache,
        shares_kv=limits.shares_kv,
        aging_ns=config.priority_aging_s * NS_PER_S,
        mixes=limits.mixes,
        prefill_row_limit=limits.prefill_row_limit,
        context_cap=limits.context_cap,
        sequence_buckets=limits.sequence_buckets,
        running_is_device=limits.running_is_device,
        batch_is_device=limits.batch_tokens_is_device,
        hash_seed=secrets.randbits(63),
    )
