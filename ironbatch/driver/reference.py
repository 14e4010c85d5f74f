"""The reference device: all of the UAPI over a piece of memory, without a word on who carries the calls to it.

A serial device: batches run one at a time in the order of their submission, each `step_latency_us` long. It has no
thread. Whoever serves it calls `advance` when `next_due_ns` says so, and asks again for whoever is `Pending`.
"""

from __future__ import annotations

import errno
import heapq
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ironbatch.driver import abi, faults
from ironbatch.driver.batch import Batch, Checker, check_places, failure
from ironbatch.driver.claims import NOBODY, Claims
from ironbatch.driver.context import Context, Refusal
from ironbatch.driver.faults import Faults
from ironbatch.driver.spec import BUCKETS_MAX, DeviceSpec
from ironbatch.kernels.device import run_batch, spoil_batch
from ironbatch.kernels.mock_kv import POISON

EOS_TOKEN_ID: Final = -1  # none: every token is worth as much as another

_SENT: Final = frozenset(message for message in abi.MESSAGES if message.request >> 30 & 1)  # _IOC_WRITE
_CHANGING: Final = frozenset({abi.SUBMIT_BATCH, abi.CLAIM_BLOCKS, abi.RESET})
_FLAGS: Final = {abi.CLAIM_BLOCKS: abi.CLAIM_EXACT}
_SIGNALS: Final = {faults.HANG: signal.SIGSTOP, faults.VANISH: signal.SIGKILL}
_INFO_INPUT_BYTES: Final = 8  # signature and version; the rest is the device's to say

Fields = dict[str, Any]


class Pending(NamedTuple):
    """No answer yet: ask the same again when `advance` has said True, and at the deadline."""

    deadline_ns: int


class ReferenceDevice:
    """A device in memory. Every method is to be called from one thread.

    Args:
        spec: what it is like.
        memory: uint8[spec.map_bytes], zeros, at a multiple of 8; clients see the same bytes.
        faults: which batches go wrong.
        mem_path: the answer to GET_MEM_PATH, where clients cannot map the node itself.
        now_ns: the monotonic clock.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        memory: NDArray[np.uint8],
        *,
        faults: Faults | None = None,
        mem_path: bytes | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        assert memory.nbytes == spec.map_bytes, "the memory is not the spec's"
        self.spec = spec
        self.memory = memory
        self.faults = faults or Faults()
        self.boot_id = os.urandom(16)
        self.reset_count = 0
        self._mem_path = mem_path
        self._now_ns = now_ns
        self._address = int(memory.ctypes.data)
        assert self._address % 8 == 0, "records are read in words"
        self._kv = memory[spec.kv_off : spec.kv_off + spec.kv_bytes].view(np.int32).reshape(spec.blocks, -1)
        self._claims = Claims(spec.blocks)
        self._was_claimed = np.zeros(spec.blocks, bool)  # ever; the others are zeros still
        self._checker = Checker(spec, self._claims.owners_address)
        self._contexts: dict[int, Context] = {}
        self._queue: deque[Batch] = deque()
        self._late: list[tuple[int, int, int]] = []  # a heap of when, context, fence
        self._idle_ns = 0  # when the last batch will be over
        self._latency_ns = spec.step_latency_us * 1000
        self._has_news = False
        self._calls: dict[abi.Message, Callable[[Context, Any], Fields | Pending]] = {
            abi.GET_INFO: self._get_info,
            abi.SUBMIT_BATCH: self._submit_batch,
            abi.WAIT_FENCE: self._wait_fence,
            abi.QUERY_FREE_BLOCKS: self._query_free_blocks,
            abi.CLAIM_BLOCKS: self._claim_blocks,
            abi.GET_MEM_PATH: self._get_mem_path,
            abi.RESET: self._reset,
            abi.GET_ERROR: self._get_error,
            abi.GET_LIMITS: self._get_limits,
        }

    # --------------------------------------------------------------------------------------------------- open and close

    def open(self, *, writable: bool = True) -> int:
        """Another open file. Returns its context.

        Raises:
            OSError: EBUSY, there is no context left.
        """
        for number in range(self.spec.contexts):
            if number not in self._contexts:
                address = self._address + self.spec.status_off(number)
                self._contexts[number] = Context(number, address, reset_count=self.reset_count, writable=writable)
                return number
        raise OSError(errno.EBUSY, f"all {self.spec.contexts} contexts are in use")

    def release(self, number: int) -> None:
        """Its last close: drop what it has in flight, take back its blocks."""
        context = self._contexts.pop(number)
        self._queue = deque(batch for batch in self._queue if batch.context is not context)
        self._close_ranks()
        self._late = [entry for entry in self._late if entry[1] != number]
        heapq.heapify(self._late)
        self._claims.release(context.owner)

    def _close_ranks(self) -> None:
        """Some of the queue were dropped, and the others need not wait for them."""
        self._idle_ns = min(self._idle_ns, self._now_ns())
        for batch in self._queue:
            self._idle_ns = batch.begin_at(min(batch.start_ns, self._idle_ns), self._latency_ns)

    # ------------------------------------------------------------------------------------------------------------- time

    def advance(self) -> bool:
        """Run what is due. Returns whether a fence was signalled since the last call, or the device reset."""
        now_ns = self._now_ns()
        while self._queue and self._queue[0].due_ns <= now_ns:
            self._run(self._queue.popleft())
        while self._late and self._late[0][0] <= now_ns:
            _, number, fence = heapq.heappop(self._late)
            self._signal(self._contexts[number], fence)
        has_news, self._has_news = self._has_news, False
        return has_news

    def next_due_ns(self) -> int | None:
        """When `advance` has something to do; None: not before the next call."""
        due = [self._queue[0].due_ns] if self._queue else []
        return min(due + [entry[0] for entry in self._late[:1]], default=None)

    def poll_events(self, number: int) -> int:
        """What poll(2) says: POLLIN once all that was submitted is over, POLLERR once the device was reset."""
        context = self._contexts[number]
        is_done = context.submitted > 0 and context.in_flight == 0
        return (select.POLLIN if is_done else 0) | (select.POLLERR if context.was_reset else 0)

    def _run(self, batch: Batch) -> None:
        if batch.fault in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[batch.fault])
        if batch.fault == faults.RESET:
            self._reset_all()
            return
        records_address, records_bytes = batch.records.ctypes.data, batch.records.nbytes
        kv = (self._address + self.spec.kv_off, self.spec.blocks, self.spec.block_tokens)
        if batch.fault == faults.EIO:
            spoil_batch(records_address, records_bytes, *kv)
            batch.context.fail(batch.fence, failure(errno.EIO, "injected"))
        elif batch.is_too_late:
            batch.context.fail(batch.fence, failure(errno.ETIMEDOUT, "its deadline passed before it began"))
        else:
            run_batch(records_address, records_bytes, *kv, batch.results_address)
        if batch.fault == faults.LATE_FENCE:
            late_ns = batch.due_ns + self.faults.late_ns(self.spec.longest_step_us * 1000)
            heapq.heappush(self._late, (late_ns, batch.context.number, batch.fence))
        elif batch.fault != faults.LOST_FENCE:
            self._signal(batch.context, batch.fence, is_repeated=batch.fault == faults.DUPLICATE_FENCE)

    def _signal(self, context: Context, fence: int, *, is_repeated: bool = False) -> None:
        if context.signal(fence, is_repeated=is_repeated):
            self._has_news = True

    def _reset_all(self) -> None:
        self._queue.clear()
        self._late.clear()
        self._idle_ns = 0
        self.reset_count = (self.reset_count + 1) % 2**32
        self._kv[self._claims.owners != NOBODY] = POISON  # the others are going to be claimed, as zeros
        for context in self._contexts.values():
            context.reset(self.reset_count, failure(errno.ECANCELED, "the device was reset"))
        self._has_news = True

    # ------------------------------------------------------------------------------------------------------------ calls

    def ioctl(self, number: int, request: int, argument: bytes) -> bytes | Pending:
        """One call of an open file. Returns the whole struct, as the caller gets it back.

        Args:
            number: the context.
            request: the ioctl's number.
            argument: the struct as the caller sent it; nothing need be sent for one that only reads.

        Raises:
            OSError: the call fails, with this errno.
        """
        message = abi.BY_REQUEST.get(request)
        if message is None:
            raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
        context = self._contexts[number]
        try:
            asked = self._read_argument(context, message, argument)
            answer = self._calls[message](context, asked)
        except Refusal as refusal:
            if refusal.code != errno.ETIMEDOUT:  # "not yet", the answer of every poll
                context.remember(0, refusal)
            raise
        if isinstance(answer, Pending):
            return answer
        return bytes(message.pack(**answer) if asked is None else message.pack(**(asked._asdict() | answer)))

    def _read_argument(self, context: Context, message: abi.Message, argument: bytes) -> Any:
        """The fields of a call that is sent any, else None."""
        if message in _CHANGING and not context.writable:
            raise Refusal(errno.EBADF, "the file is open for reading only")
        if message not in _SENT:
            return None
        if len(argument) != message.size:
            raise Refusal(errno.EINVAL, f"{len(argument)} bytes; {message.name} has {message.size}")
        if message.has_reserved_bits(argument):
            raise Refusal(errno.EINVAL, "a reserved field is not zero")
        if message is abi.GET_INFO and any(argument[_INFO_INPUT_BYTES:]):
            raise Refusal(errno.EINVAL, "only the signature and the version are the caller's to say")
        asked = message.unpack(argument)
        flags = getattr(asked, "flags", 0)
        if flags & ~_FLAGS.get(message, 0):
            raise Refusal(errno.EINVAL, f"flags {flags:#x} are unknown", value=flags)
        return asked

    def _get_info(self, context: Context, asked: Any) -> Fields:
        if asked.signature != abi.SIGNATURE:
            raise Refusal(errno.EINVAL, f"signature {asked.signature:#x} is not {abi.SIGNATURE:#x}")
        spec = self.spec
        return {
            "abi_major": spec.abi[0],
            "abi_minor": spec.abi[1],
            "caps": spec.caps,
            "num_blocks": spec.blocks,
            "block_bytes": spec.block_bytes,
            "block_tokens": spec.block_tokens,
            "reset_count": self.reset_count,
            "status_off": spec.status_off(context.number),
            "ring_off": spec.ring_off(context.number),
            "ring_bytes": spec.ring_bytes,
            "kv_off": spec.kv_off,
            "kv_bytes": spec.kv_bytes,
            "map_bytes": spec.map_bytes,
            "boot_id": self.boot_id,
            "longest_step_us": spec.longest_step_us,
            "eos_token_id": EOS_TOKEN_ID,
        }

    def _submit_batch(self, context: Context, asked: Any) -> Fields:
        if asked.epoch != self.reset_count:
            raise Refusal(errno.ESTALE, f"epoch {asked.epoch} is over; it is {self.reset_count}", value=asked.epoch)
        if asked.deadline_ns < 0:
            raise _negative_deadline(asked.deadline_ns)
        check_places(asked, self.spec.ring_bytes)
        if context.in_flight >= self.spec.max_in_flight:
            raise Refusal(errno.EAGAIN, f"{context.in_flight} batches are in flight")
        ring_off = self.spec.ring_off(context.number)
        start = ring_off + asked.ring_offset
        records = self.memory[start : start + asked.ring_bytes].view(np.int64).copy()
        self._checker.check(records, context.owner, asked)
        fault = self.faults.draw()
        if fault == faults.SHORT_RING:
            raise Refusal(errno.ENOSPC, "injected: no room for the results", value=asked.results_bytes)
        context.submitted += 1
        results_address = self._address + ring_off + asked.results_offset
        batch = Batch(context, context.submitted, records, results_address, asked.deadline_ns, fault)
        self._idle_ns = batch.begin_at(max(self._now_ns(), self._idle_ns), self._latency_ns)
        self._queue.append(batch)
        return {"fence": context.submitted}

    def _wait_fence(self, context: Context, asked: Any) -> Fields | Pending:
        if not 0 < asked.fence <= context.submitted:
            raise Refusal(errno.EINVAL, f"fence {asked.fence} is not one of 1..{context.submitted}", value=asked.fence)
        if asked.deadline_ns < 0:
            raise _negative_deadline(asked.deadline_ns)
        if asked.fence <= context.signaled:
            return {"status": context.status_of(asked.fence), "signaled": context.signaled}
        if asked.deadline_ns <= self._now_ns():
            raise Refusal(errno.ETIMEDOUT, f"fence {asked.fence} is not signalled")
        return Pending(asked.deadline_ns)

    def _query_free_blocks(self, context: Context, _: None) -> Fields:
        return {
            "free": self._claims.free,
            "total": self.spec.blocks,
            "used_by_fd": self._claims.held_by(context.owner),
        }

    def _claim_blocks(self, context: Context, asked: Any) -> Fields:
        if asked.want == 0:
            raise Refusal(errno.EINVAL, "want is 0; it is at least 1")
        is_exact = bool(asked.flags & abi.CLAIM_EXACT)
        first, granted = self._claims.claim(context.owner, asked.want, is_exact=is_exact)
        claimed = slice(first, first + granted)
        self._kv[claimed][self._was_claimed[claimed]] = 0  # nobody reads what another has left there
        self._was_claimed[claimed] = True
        return {"first": first, "granted": granted}

    def _get_mem_path(self, context: Context, _: None) -> Fields:
        if self._mem_path is None:
            raise Refusal(errno.ENODATA, "the node itself can be mapped")
        fields: Fields = abi.GET_MEM_PATH.unpack(self._mem_path)._asdict()
        return fields

    def _reset(self, context: Context, asked: Any) -> Fields:
        if not self.spec.caps & abi.CAP_RESET:
            raise Refusal(errno.EOPNOTSUPP, "RESET is not among the device's caps")
        self._reset_all()
        return {"reset_count": self.reset_count}

    def _get_error(self, context: Context, _: None) -> Fields:
        return context.error

    def _get_limits(self, context: Context, _: None) -> Fields:
        spec = self.spec
        return {
            "max_seqs": spec.max_seqs,
            "max_tokens": spec.max_tokens,
            "max_prefill_seqs": spec.max_prefill_seqs,
            "max_in_flight": spec.max_in_flight,
            "max_batch_context": spec.max_batch_context,
            "flags": 0 if spec.mixes else abi.LIMITS_NO_MIX,
            "seq_buckets": _filled(spec.seq_buckets),
            "token_buckets": _filled(spec.token_buckets),
        }


def _filled(buckets: tuple[int, ...]) -> tuple[int, ...]:
    """As many as GET_LIMITS has, zeros after the last."""
    return buckets + (0,) * (BUCKETS_MAX - len(buckets))


def _negative_deadline(deadline_ns: int) -> Refusal:
    return Refusal(errno.EINVAL, f"deadline_ns {deadline_ns} is negative", value=deadline_ns)
