"""A client of a `ReferenceDevice` without a handle, and a clock that moves when a test says so."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np

from ironbatch.driver import abi
from ironbatch.driver.faults import Faults
from ironbatch.driver.reference import Pending, ReferenceDevice
from ironbatch.driver.spec import DeviceSpec
from ironbatch.kernels.device_records import OP_STEP, STATUS, TOKENS, tokens_bytes

STEP_US = 100
SPEC = DeviceSpec(blocks=16, block_bytes=16, ring_bytes=8192, contexts=3, step_latency_us=STEP_US, longest_step_us=5000)
RESULTS = 4096
"""Where results go in the ring; records are at its beginning."""


class Clock:
    """Nanoseconds since the test began."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Bench:
    """A device and its clock."""

    def __init__(self, spec: DeviceSpec = SPEC, *faults: str, rate: float = 0.0, seed: int = 0) -> None:
        self.clock = Clock()
        memory = np.zeros(spec.map_bytes, np.uint8)
        self.device = ReferenceDevice(spec, memory, faults=Faults(faults, rate, seed), now_ns=self.clock)

    def client(self, *, writable: bool = True) -> Client:
        return Client(self, self.device.open(writable=writable))

    def pass_us(self, microseconds: int) -> bool:
        """Time goes by. Returns what `advance` says of it."""
        self.clock.now_ns += microseconds * 1000
        return self.device.advance()

    @property
    def arena(self) -> bytes:
        """All of the KV."""
        spec = self.device.spec
        return self.device.memory[spec.kv_off : spec.kv_off + spec.kv_bytes].tobytes()


class Client:
    """An open file."""

    def __init__(self, bench: Bench, number: int) -> None:
        self.device = bench.device
        self.number = number

    def ask(self, message: abi.Message, **fields: Any) -> Any:
        """The answer to a call: its fields, or `Pending`."""
        answer = self.device.ioctl(self.number, message.request, bytes(message.pack(**fields)))
        return answer if isinstance(answer, Pending) else message.unpack(answer)

    def refused(self, message: abi.Message, **fields: Any) -> str:
        """The name of the errno of a call that is refused."""
        try:
            answer = self.ask(message, **fields)
        except OSError as refusal:
            return errno.errorcode[refusal.errno or 0]
        raise AssertionError(f"answered with {answer}")

    def claim(self, want: int) -> int:
        """The first of so many blocks."""
        return int(self.ask(abi.CLAIM_BLOCKS, want=want, flags=abi.CLAIM_EXACT).first)

    def submission(self, *records: bytes, **fields: Any) -> dict[str, Any]:
        """Write records, and what a SUBMIT_BATCH says of them."""
        batch = b"".join(records)
        rows = sum(int.from_bytes(record[:2], "little") == OP_STEP for record in records)
        place = self.device.spec.ring_off(self.number)
        self.device.memory[place : place + len(batch)] = np.frombuffer(batch, np.uint8)
        given = {
            "num_seqs": rows,
            "ring_bytes": len(batch),
            "results_offset": RESULTS,
            "results_bytes": rows * tokens_bytes(1),
            "deadline_ns": abi.NO_DEADLINE,
            "epoch": self.device.reset_count,
        }
        return given | fields

    def submit(self, *records: bytes, **fields: Any) -> int:
        """The fence of a batch."""
        return int(self.ask(abi.SUBMIT_BATCH, **self.submission(*records, **fields)).fence)

    def status(self, fence: int) -> int | None:
        """How a batch has ended, by the call; None: it has not."""
        try:
            return int(self.ask(abi.WAIT_FENCE, fence=fence, deadline_ns=0).status)
        except OSError as refusal:
            if refusal.errno != errno.ETIMEDOUT:
                raise
            return None

    @property
    def page(self) -> Any:
        """The status page."""
        start = self.device.spec.status_off(self.number)
        return self.device.memory[start : start + STATUS.itemsize].view(STATUS)[0]

    @property
    def signaled(self) -> int:
        """The newest fence that is over, by the page."""
        return int(self.page["signaled"])

    @property
    def error(self) -> Any:
        """The answer to GET_ERROR."""
        return self.ask(abi.GET_ERROR)

    @property
    def first_result(self) -> tuple[int, int]:
        """Count and token of the first row of the newest batch."""
        place = self.device.spec.ring_off(self.number) + RESULTS
        head = self.device.memory[place : place + TOKENS.itemsize].view(TOKENS)[0]
        token = self.device.memory[place + TOKENS.itemsize :][:4].view(np.int32)[0]
        return int(head["count"]), int(token)
