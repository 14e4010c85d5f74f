"""Batches written by hand, one record at a time, without the kernels that the engine writes them with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ironbatch.driver import abi
from ironbatch.driver.handle import DeviceHandle
from ironbatch.kernels.device_records import (
    HEADER,
    OP_COPY_BLOCKS,
    OP_STEP,
    OP_TOKENS,
    OP_ZERO_BLOCKS,
    STEP,
    STEP_EMITS,
    TOKENS,
    padded_bytes,
    tokens_bytes,
)

NS_PER_S = 10**9
PATIENCE_S = 20.0


def soon_ns(seconds: float = PATIENCE_S) -> int:
    """A deadline."""
    return time.monotonic_ns() + int(seconds * NS_PER_S)


# ------------------------------------------------------------------------------------------------------------- records


def _padded(record: bytes) -> bytes:
    return record.ljust(padded_bytes(len(record)), b"\0")


def step(
    block_ids: Sequence[int],
    tokens: Sequence[int],
    *,
    context: int | None = None,
    emits: bool = True,
    seed: int = 0,
    user: int = 0,
    sequence: int = 0,
    **fields: int,
) -> bytes:
    """A STEP of `tokens`, the last ones of a context; by default all of it. `fields` are the header's and its own."""
    head = np.zeros(1, STEP)
    given = {
        "op": OP_STEP,
        "flags": STEP_EMITS if emits else 0,
        "bytes": STEP.itemsize + 4 * (len(block_ids) + len(tokens)),
        "user": user,
        "sequence": sequence,
        "seed": seed,
        "context_tokens": len(tokens) if context is None else context,
        "new_tokens": len(tokens),
        "block_count": len(block_ids),
        "temperature": 1.0,
        "top_p": 1.0,
    }
    for name, value in (given | fields).items():
        head[name] = value
    body = np.array(block_ids, np.uint32).tobytes() + np.array(tokens, np.int32).tobytes()
    return _padded(head.tobytes() + body)


def block_list(op: int, ids: Sequence[int], **fields: int) -> bytes:
    """A header, and block ids."""
    head = np.zeros(1, HEADER)
    for name, value in ({"op": op, "bytes": HEADER.itemsize + 4 * len(ids)} | fields).items():
        head[name] = value
    return _padded(head.tobytes() + np.array(ids, np.uint32).tobytes())


def copy(*pairs: tuple[int, int]) -> bytes:
    """A COPY_BLOCKS of (source, target) pairs."""
    return block_list(OP_COPY_BLOCKS, [block for pair in pairs for block in pair])


def zero(*ids: int) -> bytes:
    """A ZERO_BLOCKS."""
    return block_list(OP_ZERO_BLOCKS, ids)


# ------------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Submitted:
    """A batch that a device has taken."""

    device: DeviceHandle
    fence: int
    results_offset: int
    num_seqs: int

    def wait(self, deadline_ns: int | None = None) -> None:
        self.device.wait(self.fence, soon_ns() if deadline_ns is None else deadline_ns)

    def results(self) -> list[tuple[int, int, list[int]]]:
        """(user, sequence, tokens) of each TOKENS, once the batch is over."""
        memory = self.device.memory
        place = self.device.info.ring_off + self.results_offset
        found = []
        for _ in range(self.num_seqs):
            head = memory[place : place + TOKENS.itemsize].view(TOKENS)[0]
            assert (head["op"], head["flags"], head["reserved0"]) == (OP_TOKENS, 0, 0)
            assert head["bytes"] == TOKENS.itemsize + 4 * head["count"]
            ids = memory[place + TOKENS.itemsize : place + int(head["bytes"])].view(np.int32)
            found.append((int(head["user"]), int(head["sequence"]), ids.tolist()))
            place += padded_bytes(int(head["bytes"]))
        return found

    def tokens(self) -> list[int]:
        """Wait; then the tokens of all rows, in order."""
        self.wait()
        return [token for _, _, tokens in self.results() for token in tokens]


def submit(
    device: DeviceHandle,
    *records: bytes,
    num_seqs: int | None = None,
    results_bytes: int | None = None,
    deadline_ns: int = abi.NO_DEADLINE,
) -> Submitted:
    """Write records into the ring and submit them. What is left out is as it should be."""
    batch = b"".join(records)
    rows = sum(int.from_bytes(record[:2], "little") == OP_STEP for record in records)
    room = rows * tokens_bytes(1)
    start = device.ring.reserve(len(batch) + room)
    place = device.info.ring_off + start
    device.memory[place : place + len(batch)] = np.frombuffer(batch, np.uint8)
    fence = device.submit(
        num_seqs=rows if num_seqs is None else num_seqs,
        ring_offset=start,
        ring_bytes=len(batch),
        results_offset=start + len(batch),
        results_bytes=room if results_bytes is None else results_bytes,
        deadline_ns=deadline_ns,
    )
    device.ring.hold(fence, start, len(batch) + room)
    return Submitted(device, fence, start + len(batch), rows)


def one_decode(device: DeviceHandle) -> Callable[[], int]:
    """What submits a batch of one sequence, the same each time, and returns its fence: for benchmarks."""
    kv = device.claim_blocks(1)
    record = step([kv.first], [7], seed=1)
    place = device.info.ring_off
    device.memory[place : place + len(record)] = np.frombuffer(record, np.uint8)

    def submit_again() -> int:
        return device.submit(
            num_seqs=1,
            ring_offset=0,
            ring_bytes=len(record),
            results_offset=len(record),
            results_bytes=tokens_bytes(1),
        )

    return submit_again
