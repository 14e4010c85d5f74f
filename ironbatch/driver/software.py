"""A reference device in this process, behind the same handle as a node's."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from ironbatch.driver import faults
from ironbatch.driver.abi import Message
from ironbatch.driver.handle import SLICE_NS, DeviceHandle
from ironbatch.driver.reference import Pending, ReferenceDevice
from ironbatch.driver.spec import DeviceSpec
from ironbatch.errors import ConfigError, DeviceUnavailable


def make_reference(spec: DeviceSpec, injected: faults.Faults | None = None) -> ReferenceDevice:
    """A reference device with memory of its own, for one or several `SoftwareDevice` of one thread.

    Raises:
        ConfigError: it is to hang or to vanish, which only a process of its own can.
    """
    if injected is not None and injected.kinds & faults.OF_A_PROCESS:
        kinds = " and ".join(sorted(injected.kinds & faults.OF_A_PROCESS))
        raise ConfigError([f"--inject: {kinds} would stop this very process; use a node of its own (ironbatch device)"])
    return ReferenceDevice(spec, np.zeros(spec.map_bytes, np.uint8), faults=injected)


class SoftwareDevice(DeviceHandle):
    """A handle on a reference device in this process. It computes while somebody asks it something, or waits.

    Args:
        device: the spec of a device that only this handle has, or a device that several share, as several open files
            share a node; all of them in one thread.
        injected: the faults of a device that is made here.
        read_only: as a node that is opened so: batches, claims and resets are refused.

    Raises:
        ConfigError: as `make_reference`.
        DeviceUnavailable: a shared device has no context left.
    """

    def __init__(
        self,
        device: DeviceSpec | ReferenceDevice | None = None,
        *,
        injected: faults.Faults | None = None,
        read_only: bool = False,
    ) -> None:
        if not isinstance(device, ReferenceDevice):
            device = make_reference(device or DeviceSpec(), injected)
        self._device = device
        self._is_read_only = read_only
        self._context: int | None = None
        try:
            self._context = device.open(writable=not read_only)
        except OSError as problem:
            raise DeviceUnavailable(
                f"the software device has no context left of its {device.spec.contexts}; close another handle on it, or"
                " make one with more contexts",
                problem.errno or 0,
            ) from None
        super().__init__("the software device")

    def _call(self, message: Message, buffer: bytearray) -> None:
        if self._context is None:
            raise ValueError("I/O operation on a closed device")
        while True:
            self._device.advance()
            answer = self._device.ioctl(self._context, message.request, bytes(buffer))
            if not isinstance(answer, Pending):
                buffer[:] = answer
                return
            self._sleep(answer.deadline_ns)

    def _sleep(self, deadline_ns: int) -> None:
        """Until the device has something to do, or the deadline; or a while, for a deadline that never comes."""
        due_ns = self._device.next_due_ns()
        until_ns = deadline_ns if due_ns is None else min(due_ns, deadline_ns)
        time.sleep(min(max(0, until_ns - time.monotonic_ns()), SLICE_NS) / 1e9)

    def _map(self) -> NDArray[np.uint8]:
        memory = self._device.memory.view()
        memory.flags.writeable = not self._is_read_only
        return memory

    def _let_go(self) -> None:
        if self._context is not None:
            self._device.release(self._context)
            self._context = None
