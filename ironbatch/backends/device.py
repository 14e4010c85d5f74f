"""The device backend: each plan is one batch for a device node, or for the software device in this process.

The plan becomes records in the device's ring, one ioctl submits them, one look at the status page or a sleep in the
kernel waits for their fence, and the tokens are read from the ring. What the records and calls are: docs/driver.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from ironbatch.backends.base import Backend, BatchLimits, BatchPlan, EngineLimits, KVGeometry, StepOutput
from ironbatch.backends.device_limits import RESULT_BYTES, check_device, declared_limits, software_spec
from ironbatch.config import SOFTWARE_DEVICE, Config
from ironbatch.driver.abi import CAP_COPY
from ironbatch.driver.handle import SLICE_NS, DeviceHandle
from ironbatch.driver.mount import aborted_if_hung
from ironbatch.driver.ring import ALIGN_BYTES
from ironbatch.errors import (
    BackendLost,
    ConfigError,
    DeviceError,
    DeviceFault,
    DeviceGone,
    DeviceRefused,
    DeviceReset,
    DeviceTimeout,
    RequestError,
    StartError,
)
from ironbatch.kernels.device_plan import decode_tokens, encode_plan

_log = logging.getLogger("ironbatch.scheduler")

NS_PER_US = 1_000
NS_PER_S = 1_000_000_000

DeviceOpener = Callable[[Config], DeviceHandle]


def open_device(config: Config) -> DeviceHandle:
    """Open the device that --device names.

    Raises:
        DeviceError: it can't be had.
        ConfigError: the configuration asks for a software device that can't be.
    """
    if config.device == SOFTWARE_DEVICE:
        from ironbatch.driver.software import SoftwareDevice  # noqa: PLC0415  kernels that nobody else needs

        return SoftwareDevice(software_spec(config))
    from ironbatch.driver.ioctl import IoctlDevice  # noqa: PLC0415  nor this

    return IoctlDevice(config.device)


class DeviceBackend(Backend):
    """Submits, waits, reads; one batch at a time.

    Args:
        config: `device` names the device.
        opener: opens it, at first in here and again after each loss.

    Raises:
        StartError: it can't be had, or does not fit the configuration.
    """

    resumable = True
    longest_step_ns = SLICE_NS  # the longest silence: `wait` beats each time that the device answers

    def __init__(self, config: Config, opener: DeviceOpener = open_device) -> None:
        self._config = config
        self._opener = opener
        with self._aborted_if_hung():
            self._device: DeviceHandle | None = self._open()
        self.batch_limits, self.eos_token_id, self.paged_kv = self._declared(self._device)

    def start(self, kv: KVGeometry, limits: EngineLimits) -> None:
        with self._aborted_if_hung():
            self._start(kv)

    def _start(self, kv: KVGeometry) -> None:
        if self._device is None:
            self._reopen()
        assert self._device is not None
        try:
            self._first_block = self._claim(self._device, kv.num_blocks)
        except BaseException:
            self.close()
            raise
        self._longest_ns = int(self._device.info.longest_step_us) * NS_PER_US

    def execute(self, plan: BatchPlan) -> StepOutput:
        plan.fill_tokens()
        try:
            try:
                self._compute(plan)
            except DeviceRefused as problem:
                _log.warning("%s; the batch is submitted again", problem)
                # It may be computed twice, for it writes the same values to the same places. So do its copies: no
                # target is another one's source; and a place of a source that a row has written to meanwhile is one
                # that the target's row writes to as well.
                self._compute(plan)
        except (DeviceGone, DeviceReset) as problem:
            raise BackendLost(str(problem)) from None
        except DeviceTimeout as problem:
            raise BackendLost(self._give_up(problem)) from None
        except DeviceRefused as problem:
            self._blame(plan, problem)
            raise
        return plan.output

    def close(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.close()

    # ------------------------------------------------------------------------------------------------------- a batch

    def _compute(self, plan: BatchPlan) -> None:
        """Have the device compute the plan, and fill its output."""
        device, rows = self._device, plan.count
        assert device is not None
        state, segment = plan.state_address, plan.segment_address
        records_bytes = -encode_plan(state, segment, 0, 0, 0)
        results_start = -(-records_bytes // ALIGN_BYTES) * ALIGN_BYTES
        results_bytes = rows * RESULT_BYTES
        start = device.ring.reserve(results_start + results_bytes)
        encode_plan(state, segment, device.ring_address + start, records_bytes, self._first_block)
        fence = device.submit(
            num_seqs=rows,
            ring_offset=start,
            ring_bytes=records_bytes,
            results_offset=start + results_start,
            results_bytes=results_bytes,
        )
        device.ring.hold(fence, start, results_start + results_bytes)
        device.wait(fence, time.monotonic_ns() + self._longest_ns, self.beat)
        total = decode_tokens(state, device.ring_address + start + results_start, rows)
        if total < 0:
            row = -1 - int(total)
            raise DeviceFault(
                f"{device.name} has answered to row {row} of fence {fence} with something else than its tokens",
                record=row + _records_before_rows(plan),
            )

    def _give_up(self, problem: DeviceTimeout) -> str:
        """Reset a device that has lost a fence, so that it begins nothing more of it. Returns what to say."""
        late = f"{problem} within {self._longest_ns / NS_PER_S:g} s"
        assert self._device is not None
        try:
            self._device.reset()
        except DeviceError as trouble:
            return f"{late}; the device could not be reset: {trouble}"
        return f"{late}; the device was reset"

    def _blame(self, plan: BatchPlan, problem: DeviceRefused) -> None:
        """Raise RequestError if the device has named a row."""
        row = problem.record - _records_before_rows(plan)
        if problem.record >= 0 and 0 <= row < plan.count:
            raise RequestError([int(plan.rows[row]["sequence"])], str(problem)) from None

    # ----------------------------------------------------------------------------------------------------- its device

    def _aborted_if_hung(self) -> AbstractContextManager[None]:
        return aborted_if_hung(self._config.device_path, self._config.scheduler_timeout_s)

    def _open(self) -> DeviceHandle:
        try:
            device = self._opener(self._config)
        except DeviceError as problem:
            raise StartError(str(problem)) from None
        except ConfigError as problem:
            raise StartError("; ".join(problem.problems)) from None
        try:
            check_device(self._config, device)
        except BaseException:
            device.close()
            raise
        return device

    def _declared(self, device: DeviceHandle) -> tuple[BatchLimits, int, bool]:
        """What the engine is built with. Forks and shared blocks need copies."""
        try:
            has_copies = bool(device.info.caps & CAP_COPY)
            return declared_limits(self._config, device), int(device.info.eos_token_id), has_copies
        except BaseException:
            device.close()
            raise

    def _reopen(self) -> None:
        """Open the device anew: it may be another one by now."""
        device = self._open()
        before, now = (self.batch_limits, self.eos_token_id, self.paged_kv), self._declared(device)
        if now != before:
            device.close()
            raise StartError(
                f"{device.name} is another device than the engine was started with: its limits, end-of-sequence token"
                f" and whether it copies were {before}, and are {now}; start the former one again, or restart the"
                " engine"
            )
        self._device = device

    def _claim(self, device: DeviceHandle, count: int) -> int:
        """Claim all blocks of the pool in a row. Returns the first one's id."""
        try:
            return device.claim_blocks(count).first
        except DeviceRefused as problem:
            raise StartError(f"--total-kv-blocks {count} must be free in a row: {problem}") from None
        except DeviceError as problem:
            raise StartError(str(problem)) from None


def _records_before_rows(plan: BatchPlan) -> int:
    return 1 if len(plan.copies) else 0
