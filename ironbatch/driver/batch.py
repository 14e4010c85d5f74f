"""A batch as the reference device holds it: checked records that nobody else can write."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ironbatch.driver import abi
from ironbatch.driver.context import Context, Refusal
from ironbatch.driver.spec import DeviceSpec
from ironbatch.kernels import device as kernels
from ironbatch.kernels.device_records import RECORD_ALIGN, tokens_bytes

RESULT_BYTES: Final = tokens_bytes(1)
"""What a STEP's TOKENS may need."""

PROBLEMS: Final = {
    kernels.BAD_SIZE: "{value} bytes where a record should have {limit}",
    kernels.BAD_OP: "op {value} is unknown",
    kernels.BAD_FLAGS: "flags {value:#x} are unknown",
    kernels.BAD_RESERVED: "a reserved field is not zero",
    kernels.BAD_CONTEXT: "context_tokens is 0; it is at least 1",
    kernels.BAD_NEW: "new_tokens {value} is not between 1 and context_tokens {limit}",
    kernels.BAD_BLOCK_COUNT: "block_count {value} should be {limit} for this context",
    kernels.BAD_BLOCK: "block {value} is not claimed by this file",
    kernels.BAD_TOKEN: "token id {value} is negative",
}
"""What `check_batch` finds, in words that fit GET_ERROR."""


@dataclass(slots=True)
class Batch:
    """A batch that was taken.

    Args:
        context: whose it is.
        fence: its number there.
        records: int64, a private copy.
        results_address: where its TOKENS go.
        deadline_ns: by when it must have begun.
        fault: that it meets; of faults.KINDS, or None.
        start_ns: when its turn comes.
        due_ns: when it is over.
    """

    context: Context
    fence: int
    records: NDArray[np.int64]
    results_address: int
    deadline_ns: int
    fault: str | None
    start_ns: int = 0
    due_ns: int = 0

    @property
    def is_too_late(self) -> bool:
        """Whether its deadline passes before its turn comes."""
        return self.deadline_ns < self.start_ns

    def begin_at(self, start_ns: int, latency_ns: int) -> int:
        """Its turn comes then, and it takes so long. Returns when it is over."""
        self.start_ns = start_ns
        self.due_ns = start_ns if self.is_too_late else start_ns + latency_ns
        return self.due_ns


def check_places(submission: Any, ring_bytes: int) -> None:
    """Whether a SUBMIT_BATCH names places in the ring.

    Raises:
        Refusal: EINVAL.
    """
    for name in ("ring_offset", "ring_bytes", "results_offset", "results_bytes"):
        value = getattr(submission, name)
        if value % RECORD_ALIGN != 0:
            raise Refusal(errno.EINVAL, f"{name} {value} is not a multiple of {RECORD_ALIGN}", value=value)
    for what in ("ring", "results"):
        end = getattr(submission, f"{what}_offset") + getattr(submission, f"{what}_bytes")
        if end > ring_bytes:
            message = f"{what}_offset + {what}_bytes is {end}; the ring has {ring_bytes} bytes"
            raise Refusal(errno.EINVAL, message, value=end)


class Checker:
    """Looks at records before they are taken.

    Args:
        spec: of the device.
        owners_address: int32[spec.blocks], whose each block is.
    """

    def __init__(self, spec: DeviceSpec, owners_address: int) -> None:
        self._spec = spec
        self._owners_address = owners_address
        self._verdict = np.zeros(kernels.VERDICT_WORDS, np.int64)
        self._verdict_address = int(self._verdict.ctypes.data)

    def check(self, records: NDArray[np.int64], owner: int, submission: Any) -> None:
        """Whether all of a batch can be run, and its results have room.

        Raises:
            Refusal: EINVAL, EOPNOTSUPP, ENOSPC.
        """
        problem = kernels.check_batch(
            records.ctypes.data,
            records.nbytes,
            self._owners_address,
            self._spec.blocks,
            owner,
            self._spec.block_tokens,
            self._verdict_address,
        )
        verdict: list[int] = self._verdict.tolist()
        if problem:
            raise _record_refusal(problem, verdict)
        self._check_limits(verdict)
        steps = verdict[kernels.STEPS]
        if steps != submission.num_seqs:
            message = f"num_seqs is {submission.num_seqs}, and the batch has {steps} STEP records"
            raise Refusal(errno.EINVAL, message, value=submission.num_seqs)
        if steps * RESULT_BYTES > submission.results_bytes:
            message = (
                f"{submission.results_bytes} results_bytes for {steps} STEP records; {RESULT_BYTES} each are needed"
            )
            raise Refusal(errno.ENOSPC, message, value=submission.results_bytes)

    def _check_limits(self, verdict: Sequence[int]) -> None:
        spec = self._spec
        for cap, name, index in ((abi.CAP_COPY, "COPY", kernels.COPIES), (abi.CAP_ZERO, "ZERO", kernels.ZEROS)):
            if verdict[index] and not spec.caps & cap:
                raise Refusal(errno.EOPNOTSUPP, f"{name}_BLOCKS is not among the device's caps")
        rows = verdict[kernels.STEPS]
        for name, value, limit in (
            ("max_seqs", rows, spec.row_limit),
            ("max_tokens", verdict[kernels.NEW_TOKENS], spec.token_limit),
            ("max_prefill_seqs", verdict[kernels.PREFILLS], spec.max_prefill_seqs),
            ("max_batch_context", spec.padded_rows(rows) * verdict[kernels.LONGEST_CONTEXT], spec.max_batch_context),
        ):
            if limit and value > limit:
                raise Refusal(errno.EINVAL, f"{value} is more than {name} {limit}", value=value)


def _record_refusal(problem: int, verdict: Sequence[int]) -> Refusal:
    value = verdict[kernels.VALUE]
    return Refusal(
        errno.EINVAL,
        PROBLEMS[problem].format(value=value, limit=verdict[kernels.LIMIT]),
        record=verdict[kernels.RECORD],
        item=verdict[kernels.ITEM],
        value=value,
    )


def failure(code: int, message: str = "") -> Refusal:
    """How a batch has failed."""
    return Refusal(code, message or os.strerror(code))
