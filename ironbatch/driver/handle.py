"""A device as the engine sees it, whatever is behind it: the same calls on a node and on the software device."""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from ironbatch.driver import abi
from ironbatch.driver.abi import Message
from ironbatch.driver.kv_memory import KVMemory
from ironbatch.driver.ring import Ring
from ironbatch.errors import (
    AbiMismatch,
    DeviceFault,
    DeviceGone,
    DeviceRefused,
    DeviceReset,
    DeviceTimeout,
    NotADevice,
)
from ironbatch.kernels.device_records import (
    HEADER,
    OP_COPY_BLOCKS,
    OP_ZERO_BLOCKS,
    blocks_bytes,
)
from ironbatch.kernels.device_status import is_well_signaled

SLICE_NS = 500_000_000
"""The longest that one call waits: whoever waits for longer comes back in between, to say that the device answers."""

GONE = frozenset(
    {errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNRESET, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN, errno.EPIPE}
)
"""What a call on an open node gives when its server or its card is no more."""

RESET_CODES = frozenset({errno.ESTALE, errno.ECANCELED})


def do_nothing() -> None:
    """For whoever does not care that the device answers."""


class DeviceHandle(ABC):
    """An open device. For one thread; a context of its own, so that nobody else's blocks or fences are in it.

    `info` and `limits` are what GET_INFO and GET_LIMITS have answered (`driver/abi.py` lists their fields); `memory` is
    the mapping, uint8[map_bytes]; `ring` knows which part of the ring is free.

    Every method may raise DeviceGone; those that have more to say, say so.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._submit_buffer = bytearray(abi.SUBMIT_BATCH.size)
        self._wait_buffer = bytearray(abi.WAIT_FENCE.size)
        self._batches = 0
        try:
            self.info = self._get_info()
            self.limits = self._ask(abi.GET_LIMITS)
            self.memory = self._map()
        except BaseException:
            self._let_go()
            raise
        self.ring = Ring(self.info.ring_bytes)
        self.epoch: int = self.info.reset_count
        self._address = int(self.memory.ctypes.data)
        self._status_address = self._address + self.info.status_off
        self.ring_address = self._address + self.info.ring_off

    # ------------------------------------------------------------------------------------------ what a device provides

    @abstractmethod
    def _call(self, message: Message, buffer: bytearray) -> None:
        """One ioctl, answered in `buffer`. Raises OSError; never because of a signal."""

    @abstractmethod
    def _map(self) -> NDArray[np.uint8]:
        """The device's memory, map_bytes of it."""

    @abstractmethod
    def _let_go(self) -> None:
        """Close what is open; must be callable at any time, and twice."""

    # --------------------------------------------------------------------------------------------------------- its use

    def close(self) -> None:
        """Give back all blocks and end all batches of this handle. Never raises: a dead device fails even in close."""
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def claim_blocks(self, count: int, *, exact: bool = True) -> KVMemory:
        """Get `count` KV blocks in a row, all zeros; if not `exact`, as many as there are, but at least one.

        Raises:
            DeviceRefused: there are not so many.
        """
        try:
            answer = self._ask(abi.CLAIM_BLOCKS, want=count, flags=abi.CLAIM_EXACT if exact else 0)
        except DeviceRefused as problem:
            if problem.code != errno.ENOSPC:
                raise
            free = self.free_blocks()
            raise DeviceRefused(
                f"{problem}; {free.total - free.free} of {free.total} blocks are claimed: ask for fewer, or end whoever"
                " else has the device open",
                errno.ENOSPC,
            ) from None
        return KVMemory(
            self.memory,
            kv_off=self.info.kv_off,
            first=answer.first,
            num_blocks=answer.granted,
            block_bytes=self.info.block_bytes,
        )

    def free_blocks(self) -> Any:
        """Blocks that are `free`, of `total`, and `used_by_fd`: by this handle."""
        return self._ask(abi.QUERY_FREE_BLOCKS)

    def submit(
        self,
        *,
        num_seqs: int,
        ring_offset: int,
        ring_bytes: int,
        results_offset: int = 0,
        results_bytes: int = 0,
        deadline_ns: int = abi.NO_DEADLINE,
    ) -> int:
        """Hand over the records at `ring_offset`. Returns the batch's fence.

        Raises:
            DeviceRefused: nothing of it will be done.
            DeviceReset: the device was reset since this handle was opened.
        """
        self._batches += 1
        buffer = self._submit_buffer
        abi.SUBMIT_BATCH.pack_into(
            buffer,
            batch_id=self._batches,
            num_seqs=num_seqs,
            ring_offset=ring_offset,
            ring_bytes=ring_bytes,
            results_offset=results_offset,
            results_bytes=results_bytes,
            deadline_ns=deadline_ns,
            epoch=self.epoch,
        )
        self._request(abi.SUBMIT_BATCH, buffer)
        fence: int = abi.SUBMIT_BATCH.unpack(buffer).fence
        return fence

    def wait(self, fence: int, deadline_ns: int, answers: Callable[[], None] = do_nothing) -> None:
        """Return when a batch is over. One look at the status page, then calls that sleep in the kernel.

        Args:
            fence: of the batch.
            deadline_ns: of the monotonic clock.
            answers: is called each time that the device has answered "not yet", at least twice a second.

        Raises:
            DeviceTimeout: it is not over at the deadline.
            DeviceFault: it has failed.
            DeviceReset: likewise, for the device was reset.
        """
        if not is_well_signaled(self._status_address, fence):
            self._wait_by_call(fence, deadline_ns, answers)
        self.ring.release(fence)

    def copy_blocks(self, kv: KVMemory, pairs: Sequence[tuple[int, int]]) -> int:
        """Copy whole blocks on the device, (source, target), one after the other. Returns the fence after it.

        Raises:
            IndexError: a block is not one of `kv`.
            DeviceRefused: as `Ring.reserve`.
        """
        ids = np.array([kv.device_id(block) for pair in pairs for block in pair], np.uint32)
        return self._submit_block_list(OP_COPY_BLOCKS, ids)

    def zero_blocks(self, kv: KVMemory, blocks: Sequence[int]) -> int:
        """Fill whole blocks with zeros on the device. Returns the fence after it. Raises as `copy_blocks`."""
        ids = np.array([kv.device_id(block) for block in blocks], np.uint32)
        return self._submit_block_list(OP_ZERO_BLOCKS, ids)

    def reset(self) -> int:
        """Reset the device, for all its users: KV memory and unfinished batches are lost, claims stay.

        Returns how often it was reset.
        """
        answer = self._ask(abi.RESET)
        self.epoch = answer.reset_count
        self.ring.clear()
        return self.epoch

    def last_error(self) -> Any:
        """The newest error of this handle's batches and calls: the fields of GET_ERROR."""
        return self._ask(abi.GET_ERROR)

    # -------------------------------------------------------------------------------------------------------- internals

    def _get_info(self) -> Any:
        buffer = abi.GET_INFO.pack(signature=abi.SIGNATURE, abi_major=abi.ABI_MAJOR, abi_minor=abi.ABI_MINOR)
        try:
            self._call(abi.GET_INFO, buffer)
        except OSError as problem:
            if problem.errno in GONE:
                self._fail(problem)
            raise NotADevice(
                f"{self.name} is not an Ironbatch device: {os.strerror(problem.errno or 0)}; `ironbatch device --node"
                " PATH` makes one",
                problem.errno or 0,
            ) from None
        info = abi.GET_INFO.unpack(buffer)
        if info.signature != abi.SIGNATURE:
            raise NotADevice(
                f"{self.name} is not an Ironbatch device: its signature is {info.signature:#x}, not {abi.SIGNATURE:#x}"
            )
        if info.abi_major != abi.ABI_MAJOR:
            raise AbiMismatch(
                f"{self.name} speaks version {info.abi_major}.{info.abi_minor} of the device ABI, and this is"
                f" version {abi.ABI_MAJOR}.{abi.ABI_MINOR}; use a device and an Ironbatch of the same major version"
            )
        return info

    def _ask(self, message: Message, **values: Any) -> Any:
        """One call, packed and unpacked."""
        buffer = message.pack(**values)
        self._request(message, buffer)
        return message.unpack(buffer)

    def _request(self, message: Message, buffer: bytearray) -> None:
        try:
            self._call(message, buffer)
        except OSError as problem:
            self._fail(problem, message)

    def _fail(self, problem: OSError, message: Message | None = None) -> NoReturn:
        """Raise what an errno means."""
        code = problem.errno or 0
        reason = os.strerror(code)
        if code in GONE:
            raise DeviceGone(f"{self.name} is gone: {reason}", code) from None
        if code in RESET_CODES:
            raise DeviceReset(f"{self.name} was reset: {reason}", code) from None
        if code == errno.ETIMEDOUT:
            raise DeviceTimeout(f"{self.name}: {reason}", code) from None
        call = message.name.upper() if message is not None else "a call"
        told = self._told()
        if told is None or told.code != -code:
            raise DeviceRefused(f"{self.name} has refused {call}: {reason}", code) from None
        text = told.message.rstrip(b"\0").decode("ascii", "replace")
        raise DeviceRefused(
            f"{self.name} has refused {call}: {text or reason}", code, _index(told.record), _index(told.item)
        ) from None

    def _told(self) -> Any | None:
        """GET_ERROR, from a device that may not even answer that."""
        buffer = abi.GET_ERROR.pack()
        try:
            self._call(abi.GET_ERROR, buffer)
        except OSError:
            return None
        return abi.GET_ERROR.unpack(buffer)

    def _wait_by_call(self, fence: int, deadline_ns: int, answers: Callable[[], None]) -> None:
        buffer = self._wait_buffer
        while True:
            slice_ns = min(deadline_ns, time.monotonic_ns() + SLICE_NS)
            abi.WAIT_FENCE.pack_into(buffer, fence=fence, deadline_ns=slice_ns)
            try:
                self._request(abi.WAIT_FENCE, buffer)
                break
            except DeviceTimeout:
                if time.monotonic_ns() >= deadline_ns:
                    raise DeviceTimeout(f"{self.name}: fence {fence} is not signalled", errno.ETIMEDOUT) from None
            answers()
        self._judge(fence, abi.WAIT_FENCE.unpack(buffer).status)

    def _judge(self, fence: int, status: int) -> None:
        """Raise what a batch's status means."""
        if status == 0:
            return
        self.ring.release(fence)
        code = -status
        if code in RESET_CODES:
            raise DeviceReset(f"{self.name} was reset under the batch of fence {fence}", code)
        told = self._told()
        if told is None or told.fence != fence:
            raise DeviceFault(f"{self.name}: the batch of fence {fence} has failed: {os.strerror(code)}", code)
        text = told.message.rstrip(b"\0").decode("ascii", "replace") or os.strerror(code)
        raise DeviceFault(
            f"{self.name}: the batch of fence {fence} has failed: {text}", code, _index(told.record), _index(told.item)
        )

    def _submit_block_list(self, op: int, ids: NDArray[np.uint32]) -> int:
        size = blocks_bytes(len(ids))
        start = self.ring.reserve(size)
        record = self.memory[self.info.ring_off + start : self.info.ring_off + start + size]
        record[:] = 0
        record[: HEADER.itemsize].view(HEADER)[0] = (op, 0, HEADER.itemsize + 4 * len(ids), 0)
        record[HEADER.itemsize : HEADER.itemsize + 4 * len(ids)] = ids.view(np.uint8)
        fence = self.submit(num_seqs=0, ring_offset=start, ring_bytes=size)
        self.ring.hold(fence, start, size)
        return fence


def _index(value: int) -> int:
    return -1 if value == abi.NO_INDEX else value
