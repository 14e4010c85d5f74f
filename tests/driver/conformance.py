"""What every device does, whatever is behind the handle: one suite, run on the software device and through a node.

A subclass of `Conformance` provides the fixture `device_factory`: called with the spec's fields it gives a fresh
device, whose `open(read_only=False)` gives a handle on it each time.
"""

from __future__ import annotations

import errno
import itertools
import random
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pytest

from ironbatch.driver import abi
from ironbatch.driver.handle import DeviceHandle
from ironbatch.driver.kv_memory import KVMemory
from ironbatch.errors import DeviceFault, DeviceRefused, DeviceReset, DeviceTimeout, DeviceUnavailable
from ironbatch.kernels.device_records import STATUS, STEP, STEP_EMITS, tokens_bytes
from ironbatch.kernels.mock_kv import POISON, mock_kv_tokens
from tests.driver.records import (
    PATIENCE_S,
    Submitted,
    block_list,
    copy,
    soon_ns,
    step,
    submit,
    zero,
)

SIZE = 4  # positions of a block
SMALL = {"blocks": 16, "block_bytes": 4 * SIZE, "ring_bytes": 8192, "contexts": 3, "step_latency_us": 100}
NEVER = {"step_latency_us": 60_000_000, "longest_step_us": 60_000_000}
"""So slow that nothing is over while a test runs."""


class Device(Protocol):
    """A device, which may be opened several times."""

    def open(self, *, read_only: bool = False) -> DeviceHandle:
        """Another handle. The fixture closes it in the end."""
        ...


DeviceFactory = Callable[..., Device]


def expected_tokens(seed: int, prompt: list[int], count: int) -> list[int]:
    """What follows a prompt, by the request alone."""
    context = np.array(prompt + [0] * count, np.int32)
    mock_kv_tokens(seed, context, len(prompt), count, -1, 0)
    return context[len(prompt) :].tolist()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens on its own, with a deadline."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def raw_errno(device: DeviceHandle, message: abi.Message, buffer: bytearray) -> int:
    """What a call gives, past all that a handle would not send."""
    try:
        device._call(message, buffer)
    except OSError as problem:
        return problem.errno or 0
    return 0


def status_page(device: DeviceHandle) -> Any:
    start = device.info.status_off
    return device.memory[start : start + STATUS.itemsize].view(STATUS)[0]


def wait_state(device: DeviceHandle, fence: int) -> Any:
    """The answer to a WAIT_FENCE that is over."""
    buffer = abi.WAIT_FENCE.pack(fence=fence, deadline_ns=soon_ns())
    device._call(abi.WAIT_FENCE, buffer)
    return abi.WAIT_FENCE.unpack(buffer)


def arena(device: DeviceHandle) -> bytes:
    start = device.info.kv_off
    return bytes(device.memory[start : start + device.info.kv_bytes])


BAD_BATCHES: dict[str, tuple[Callable[[int], list[bytes]], int, int, str]] = {
    # What makes the records, given the first claimed block; then the record and the item at fault, and the message.
    "block beyond the claim": (lambda b: [step([b, b + 8], [1] * 5)], 0, 1, "is not claimed"),
    "block before the claim": (lambda b: [copy((b, b + 1), (b - 1, b))], 0, 2, "is not claimed"),
    "target beyond the claim": (lambda b: [zero(b), copy((b, b + 8))], 1, 1, "is not claimed"),
    "block beyond the device": (lambda b: [step([b], [1]), zero(b, b, 2**32 - 1)], 1, 2, "block 4294967295"),
    "unknown op": (lambda b: [zero(b), block_list(9, [b])], 1, -1, "op 9"),
    "op of a result": (lambda b: [block_list(4, [b])], 0, -1, "op 4"),
    "unknown flags": (lambda b: [step([b], [1], flags=STEP_EMITS | 8)], 0, -1, "flags 0x9"),
    "flags where there are none": (lambda b: [block_list(3, [b], flags=1)], 0, -1, "flags 0x1"),
    "reserved0": (lambda b: [step([b], [1], reserved0=1)], 0, -1, "reserved"),
    "reserved1": (lambda b: [step([b], [1]), step([b], [1], reserved1=2**63)], 1, -1, "reserved"),
    "no context": (lambda b: [step([], [], context=0)], 0, -1, "context_tokens"),
    "no new tokens": (lambda b: [step([b], [], context=3)], 0, -1, "new_tokens 0"),
    "more new tokens than context": (lambda b: [step([b], [1, 2, 3], context=2)], 0, -1, "new_tokens 3"),
    "a block too few": (lambda b: [step([b], [1] * 5)], 0, -1, "block_count 1 should be 2"),
    "a block too many": (lambda b: [step([b, b + 1], [1] * 4)], 0, -1, "block_count 2 should be 1"),
    "negative token": (lambda b: [step([b], [1, -1, 2])], 0, 2, "token id -1"),
    "a byte too few": (lambda b: [step([b], [1, 2], bytes=STEP.itemsize + 11)], 0, -1, "91 bytes"),
    "a word too many": (lambda b: [step([b], [1, 2], bytes=STEP.itemsize + 16)], 0, -1, "96 bytes"),
    "no bytes": (lambda b: [block_list(3, [b], bytes=0)], 0, -1, "0 bytes"),
    "beyond the batch": (lambda b: [zero(b), block_list(3, [b], bytes=28)], 1, -1, "28 bytes"),
    "all bytes that there are": (lambda b: [block_list(3, [b], bytes=2**32 - 1)], 0, -1, "4294967295 bytes"),
    "half a header": (lambda b: [zero(b), bytes(8)], 1, -1, "8 bytes"),
    "half a pair": (lambda b: [block_list(2, [b, b + 1, b + 2])], 0, -1, "28 bytes"),
}


class Conformance:
    """Run these with a `device_factory` of the subclass."""

    # ------------------------------------------------------------------------------------------------- what is there

    def test_layout(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL)
        first, second = device.open(), device.open()
        info, other = first.info, second.info
        assert (info.abi_major, info.abi_minor) == (abi.ABI_MAJOR, abi.ABI_MINOR)
        assert (info.num_blocks, info.block_bytes, info.block_tokens) == (16, 16, 4)
        assert (info.ring_bytes, info.kv_bytes) == (8192, 16 * 16)
        assert info.boot_id == other.boot_id != bytes(16)
        assert info.longest_step_us > 0
        assert first.memory.nbytes == info.map_bytes
        pieces = [(info.kv_off, info.kv_bytes)]
        for one in (info, other):
            pieces += [(one.status_off, STATUS.itemsize), (one.ring_off, one.ring_bytes)]
        assert all(start % 4096 == 0 for start, _ in pieces)
        pieces.sort()
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(pieces))
        assert sum(pieces[-1]) <= info.map_bytes

    def test_each_device_has_a_boot_id_of_its_own(self, device_factory: DeviceFactory) -> None:
        assert device_factory(**SMALL).open().info.boot_id != device_factory(**SMALL).open().info.boot_id

    def test_limits(self, device_factory: DeviceFactory) -> None:
        limits = device_factory(
            **SMALL,
            max_seqs=7,
            max_tokens=99,
            max_prefill_seqs=1,
            max_in_flight=2,
            max_batch_context=640,
            mixes=False,
            seq_buckets=(1, 4, 16),
            token_buckets=(16, 128),
        )
        told = limits.open().limits
        assert (told.max_seqs, told.max_tokens, told.max_prefill_seqs, told.max_in_flight) == (7, 99, 1, 2)
        assert (told.max_batch_context, told.flags) == (640, abi.LIMITS_NO_MIX)
        assert (told.seq_buckets, told.token_buckets) == ((1, 4, 16) + (0,) * 9, (16, 128) + (0,) * 10)
        assert device_factory(**SMALL).open().limits.flags == 0

    def test_contexts_run_out(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL)
        handles = [device.open() for _ in range(3)]
        with pytest.raises(DeviceUnavailable):
            device.open()
        assert len({handle.info.status_off for handle in handles}) == 3
        handles[1].close()
        device_is_open = []

        def opens() -> bool:
            try:
                device_is_open.append(device.open())
            except DeviceUnavailable:
                return False
            return True

        until(opens)
        assert device_is_open[0].info.ring_off == handles[1].info.ring_off
        assert status_page(device_is_open[0])["signaled"] == 0

    # -------------------------------------------------------------------------------------------------------- claims

    def test_claims_are_runs_of_zeros(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL).open()
        first, second = device.claim_blocks(3), device.claim_blocks(13)
        assert (first.num_blocks, second.num_blocks) == (3, 13)
        assert {first.first, second.first} == {0, 3}
        assert not any(arena(device))
        counts = device.free_blocks()
        assert (counts.free, counts.total, counts.used_by_fd) == (0, 16, 16)
        for exact in (True, False):
            with pytest.raises(DeviceRefused) as caught:
                device.claim_blocks(1, exact=exact)
            assert caught.value.code == errno.ENOSPC

    def test_the_longest_run_if_need_be(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL)
        first, second, third = device.open(), device.open(), device.open()
        assert [handle.claim_blocks(n).first for handle, n in ((first, 5), (second, 8), (third, 1))] == [0, 5, 13]
        second.close()
        until(lambda: first.free_blocks().free == 10)
        with pytest.raises(DeviceRefused, match="longest free run has 8") as caught:
            first.claim_blocks(9)
        assert caught.value.code == errno.ENOSPC
        kv = first.claim_blocks(9, exact=False)
        assert (kv.first, kv.num_blocks) == (5, 8)
        assert first.claim_blocks(2).first == 14
        assert (first.free_blocks().used_by_fd, third.free_blocks().used_by_fd) == (15, 1)

    def test_nobody_reads_what_another_has_left(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL)
        first, second = device.open(), device.open()
        kv = first.claim_blocks(16)
        for block in range(16):
            kv.block(block)[:] = 0xAB
        first.close()
        until(lambda: second.free_blocks().free == 16)
        kv = second.claim_blocks(16)
        assert not any(kv.block(block).any() for block in range(16))

    def test_a_claim_of_nothing(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL).open()
        with pytest.raises(DeviceRefused, match="want is 0") as caught:
            device.claim_blocks(0)
        assert caught.value.code == errno.EINVAL

    def test_blocks_of_another_are_refused(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL)
        first, second = device.open(), device.open()
        first.claim_blocks(4)
        mine = second.claim_blocks(4).first
        for records in ([step([mine, 0], [1] * 5)], [copy((mine, 0))], [zero(mine, 0)]):
            with pytest.raises(DeviceRefused, match="block 0 is not claimed by this file") as caught:
                submit(second, *records)
            assert (caught.value.code, caught.value.record, caught.value.item) == (errno.EINVAL, 0, 1)
        assert (second.last_error().value, second.last_error().fence) == (0, 0)

    # ---------------------------------------------------------------------------------------------- copies and zeros

    def test_copies_and_zeros_are_byte_exact(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL | {"block_bytes": 52, "max_in_flight": 8}).open()
        device.claim_blocks(3)
        kv = device.claim_blocks(10)
        host = KVMemory.host(10, 52)
        chance = random.Random(6)
        for block in range(10):
            host.block(block)[:] = kv.block(block)[:] = list(chance.randbytes(52))
        before = arena(device)[: 3 * 52]
        for _ in range(20):
            pairs = [(chance.randrange(10), chance.randrange(10)) for _ in range(chance.randrange(6))]
            blocks = chance.choices(range(10), k=chance.randrange(3))
            device.copy_blocks(kv, pairs)
            host.copy_blocks(pairs)
            device.wait(device.zero_blocks(kv, blocks), soon_ns())  # the copies are before it
            host.zero_blocks(blocks)
            assert [kv.block(b).tobytes() for b in range(10)] == [host.block(b).tobytes() for b in range(10)]
        assert arena(device)[: 3 * 52] == before

    def test_batches_run_in_the_order_of_their_fences(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL).open()
        kv = device.claim_blocks(6)
        kv.block(0)[:] = 9
        fences = [device.copy_blocks(kv, [(block, block + 1)]) for block in range(4)]
        assert fences == [1, 2, 3, 4]
        device.wait(4, soon_ns())
        assert (kv.block(4) == 9).all()
        assert not kv.block(5).any()
        assert status_page(device)["signaled"] == 4

    def test_an_empty_batch(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL).open()
        submit(device).wait()

    # ------------------------------------------------------------------------------------------------ fences, waits

    def test_a_wait_ends_at_its_deadline(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL | NEVER).open()
        batch = submit(device)
        for seconds in (0, -5, 0.03):
            deadline_ns = soon_ns(seconds)
            with pytest.raises(DeviceTimeout):
                batch.wait(deadline_ns)
            assert deadline_ns <= time.monotonic_ns() < deadline_ns + (abs(seconds) + PATIENCE_S) * 1e9
        assert raw_errno(device, abi.WAIT_FENCE, abi.WAIT_FENCE.pack(fence=1, deadline_ns=0)) == errno.ETIMEDOUT
        assert device.last_error().code == 0  # "not yet" is no error

    def test_a_wait_says_that_the_device_answers(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL | NEVER).open()
        batch, answers = submit(device), []
        with pytest.raises(DeviceTimeout):
            device.wait(batch.fence, soon_ns(0.6), lambda: answers.append(1))
        assert answers

    @pytest.mark.parametrize(("fence", "deadline_ns"), [(0, 1), (2, 1), (2**64 - 1, 1), (1, -1)])
    def test_a_wait_for_what_cannot_be(self, device_factory: DeviceFactory, fence: int, deadline_ns: int) -> None:
        device = device_factory(**SMALL).open()
        submit(device).wait()
        buffer = abi.WAIT_FENCE.pack(fence=fence, deadline_ns=deadline_ns)
        assert raw_errno(device, abi.WAIT_FENCE, buffer) == errno.EINVAL
        assert device.last_error().code == -errno.EINVAL

    def test_several_in_flight_and_no_more(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL | NEVER, max_in_flight=3).open()
        assert [submit(device).fence for _ in range(3)] == [1, 2, 3]
        with pytest.raises(DeviceRefused) as caught:
            submit(device)
        assert caught.value.code == errno.EAGAIN
        device.reset()
        assert submit(device).fence == 4

    def test_room_comes_with_each_fence(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL, max_in_flight=1).open()
        for fence in range(1, 6):
            batch = submit(device)
            assert batch.fence == fence
            batch.wait()

    def test_contexts_count_their_own_fences(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL)
        first, second = device.open(), device.open()
        for _ in range(3):
            submit(first).wait()
        submit(second).wait()
        assert (status_page(first)["signaled"], status_page(second)["signaled"]) == (3, 1)

    def test_a_batch_that_begins_too_late_fails(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL).open()
        kv = device.claim_blocks(2)
        kv.block(0)[:] = 5
        late = submit(device, copy((kv.first, kv.first + 1)), deadline_ns=1)
        after = submit(device, deadline_ns=soon_ns())
        with pytest.raises(DeviceFault, match="deadline") as caught:
            late.wait()
        assert caught.value.code == errno.ETIMEDOUT
        after_state = wait_state(device, after.fence)
        assert (after_state.status, after_state.signaled) == (0, 2)
        assert wait_state(device, late.fence).status == -errno.ETIMEDOUT  # it is not forgotten so soon
        assert (status_page(device)["failed"], status_page(device)["signaled"]) == (1, 2)
        assert not kv.block(1).any()
        submit(device).wait()

    # ---------------------------------------------------------------------------------------------- what is refused

    @pytest.mark.parametrize("name", BAD_BATCHES)
    def test_bad_records(self, device_factory: DeviceFactory, name: str) -> None:
        make, record, item, text = BAD_BATCHES[name]
        shared = device_factory(**SMALL)
        other, device = shared.open(), shared.open()
        other.claim_blocks(4)
        kv = device.claim_blocks(8)
        for block in range(8):
            kv.block(block)[:] = block + 1
        before = arena(device)
        with pytest.raises(DeviceRefused, match=text) as caught:
            submit(device, *make(kv.first))
        assert (caught.value.code, caught.value.record, caught.value.item) == (errno.EINVAL, record, item)
        assert arena(device) == before
        assert device.last_error().fence == 0
        assert submit(device).fence == 1  # it was none

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"flags": 1}, errno.EINVAL),
            ({"reserved0": 1}, errno.EINVAL),
            ({"reserved1": 1}, errno.EINVAL),
            ({"ring_offset": 4}, errno.EINVAL),
            ({"results_offset": 12}, errno.EINVAL),
            ({"ring_bytes": 12}, errno.EINVAL),
            ({"ring_offset": 8192, "ring_bytes": 8}, errno.EINVAL),
            ({"ring_offset": 2**32 - 8, "ring_bytes": 16}, errno.EINVAL),
            ({"results_offset": 8184, "results_bytes": 16}, errno.EINVAL),
            ({"results_offset": 2**32 - 8, "results_bytes": 2**32 - 8}, errno.EINVAL),
            ({"num_seqs": 1}, errno.EINVAL),
            ({"num_seqs": 2**32 - 1}, errno.EINVAL),
            ({"deadline_ns": -1}, errno.EINVAL),
            ({"epoch": 1}, errno.ESTALE),
            ({"epoch": 2**32 - 1}, errno.ESTALE),
        ],
        ids=str,
    )
    def test_bad_submissions(self, device_factory: DeviceFactory, fields: dict[str, int], code: int) -> None:
        device = device_factory(**SMALL).open()
        given = {"deadline_ns": abi.NO_DEADLINE} | fields
        assert raw_errno(device, abi.SUBMIT_BATCH, abi.SUBMIT_BATCH.pack(**given)) == code
        told = device.last_error()
        assert (told.code, told.fence, told.record, told.item) == (-code, 0, 2**32 - 1, 2**32 - 1)
        assert told.message[0]
        assert not told.message[-1]

    @pytest.mark.parametrize(
        ("message", "fields"),
        [
            (abi.GET_INFO, {}),
            (abi.GET_INFO, {"signature": abi.SIGNATURE, "caps": 1}),
            (abi.GET_INFO, {"signature": abi.SIGNATURE, "reserved0": (0, 0, 1)}),
            (abi.WAIT_FENCE, {"fence": 1, "flags": 1}),
            (abi.WAIT_FENCE, {"fence": 1, "reserved0": 1}),
            (abi.CLAIM_BLOCKS, {"want": 1, "flags": 2}),
            (abi.RESET, {"flags": 1}),
            (abi.RESET, {"reserved0": 1}),
        ],
        ids=str,
    )
    def test_bad_calls(self, device_factory: DeviceFactory, message: abi.Message, fields: dict[str, Any]) -> None:
        device = device_factory(**SMALL).open()
        submit(device).wait()
        assert raw_errno(device, message, message.pack(**fields)) == errno.EINVAL
        assert device.last_error().code == -errno.EINVAL

    def test_unknown_requests(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL).open()
        for number, size in ((0x55, 16), (0x03, 24), (0x01, 56)):
            unknown = abi.Message("unknown", number, 3, size, f"u64[{size // 8}] words")
            assert raw_errno(device, unknown, bytearray(size)) == errno.ENOTTY

    def test_short_results(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL).open()
        kv = device.claim_blocks(2)
        before = arena(device)
        rows = [step([kv.first], [1]), step([kv.first + 1], [1], emits=False)]
        with pytest.raises(DeviceRefused, match="72 results_bytes for 2 STEP records; 40 each are needed") as caught:
            submit(device, *rows, results_bytes=2 * tokens_bytes(1) - 8)
        assert caught.value.code == errno.ENOSPC
        assert arena(device) == before
        submit(device, *rows).wait()

    @pytest.mark.parametrize(
        ("limits", "lengths", "text"),
        [
            ({"max_seqs": 2}, [1, 1, 1], "3 is more than max_seqs 2"),
            ({"seq_buckets": (1, 2)}, [1, 1, 1], "3 is more than max_seqs 2"),
            ({"max_tokens": 5}, [3, 3], "6 is more than max_tokens 5"),
            ({"token_buckets": (2, 4)}, [3, 3], "6 is more than max_tokens 4"),
            ({"max_prefill_seqs": 1}, [1, 2, 1, 4], "2 is more than max_prefill_seqs 1"),
            ({"max_batch_context": 9}, [5, 1], "10 is more than max_batch_context 9"),
            ({"max_batch_context": 19, "seq_buckets": (1, 4)}, [5, 1], "20 is more than max_batch_context 19"),
        ],
        ids=str,
    )
    def test_more_than_the_limits(
        self, device_factory: DeviceFactory, limits: dict[str, Any], lengths: list[int], text: str
    ) -> None:
        device = device_factory(**SMALL | limits).open()
        first = device.claim_blocks(16).first
        rows = [
            step([first + 4 * k, first + 4 * k + 1][: -(-length // SIZE)], [1] * length)
            for k, length in enumerate(lengths)
        ]
        with pytest.raises(DeviceRefused, match=text) as caught:
            submit(device, *rows)
        assert caught.value.code == errno.EINVAL
        assert not any(arena(device))
        submit(device, *rows[:1]).wait()

    def test_what_the_device_has_no_cap_for(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL, caps=abi.CAP_MMAP).open()
        first = device.claim_blocks(2).first
        for record in (copy((first, first + 1)), zero(first)):
            with pytest.raises(DeviceRefused, match="caps") as caught:
                submit(device, record)
            assert caught.value.code == errno.EOPNOTSUPP
        with pytest.raises(DeviceRefused, match="caps"):
            device.reset()
        assert submit(device, step([first], [1])).tokens() == expected_tokens(0, [1], 1)

    # --------------------------------------------------------------------------------------------------------- reset

    def test_a_reset_ends_everything_but_claims(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL | NEVER)
        first, second = device.open(), device.open()
        kv = first.claim_blocks(4)
        pending = [submit(first, zero(kv.first)) for _ in range(2)]
        assert second.reset() == 1
        for batch in pending:
            with pytest.raises(DeviceReset):
                batch.wait()
            assert wait_state(first, batch.fence).status == -errno.ECANCELED
        assert (status_page(first)["reset_count"], status_page(second)["reset_count"]) == (1, 1)
        assert (first.free_blocks().used_by_fd, first.free_blocks().free) == (4, 12)
        assert all((kv.block(block).view(np.int32) == POISON).all() for block in range(4))
        with pytest.raises(DeviceReset):
            submit(first)
        assert first.last_error().code == -errno.ESTALE
        assert submit(second).fence == 1  # who has reset it knows the epoch

    def test_a_device_works_after_a_reset(self, device_factory: DeviceFactory) -> None:
        shared = device_factory(**SMALL)
        device = shared.open()
        kv = device.claim_blocks(2)
        for count in range(1, 4):
            assert device.reset() == count
            assert submit(device, step([kv.first], [1, 2], seed=4)).tokens() == expected_tokens(4, [1, 2], 1)
        assert shared.open().info.reset_count == 3

    # -------------------------------------------------------------------------------------------------------- tokens

    def test_tokens_are_those_of_the_request_alone(self, device_factory: DeviceFactory) -> None:
        """Prefill in chunks beside a decode, then both decode, and one goes on in a copied block."""
        device = device_factory(**SMALL).open()
        device.claim_blocks(1)
        first = device.claim_blocks(12).first
        table = {1: [first + 5, first + 2, first + 9], 2: [first + 11, first], 3: [first + 5, first + 7, first + 3]}
        prompt = {1: [3, 1, 4, 1, 5, 9], 2: [2**31 - 1]}
        tokens = {1: expected_tokens(10, prompt[1], 6), 2: expected_tokens(2**63 - 1, prompt[2], 6)}
        whole = {k: prompt[k] + tokens[k] for k in (1, 2)}

        def row(k: int, start: int, end: int, *, emits: bool = True, seed: int | None = None) -> bytes:
            blocks = table[k][: -(-end // SIZE)]
            given = {1: 10, 2: 2**63 - 1}[k] if seed is None else seed
            new = whole[k][start:end]
            return step(blocks, new, context=end, emits=emits, seed=given, user=100 + k, sequence=2**64 - k)

        batch = submit(device, row(1, 0, 5, emits=False), row(2, 0, 1))
        batch.wait()
        assert batch.results() == [(101, 2**64 - 1, []), (102, 2**64 - 2, tokens[2][:1])]
        assert submit(device, row(2, 1, 2), row(1, 5, 6)).tokens() == [tokens[2][1], tokens[1][0]]
        for k in range(1, 4):
            assert submit(device, row(1, 5 + k, 6 + k), row(2, 1 + k, 2 + k)).tokens() == [
                tokens[1][k],
                tokens[2][k + 1],
            ]
        # A fork of sequence 1: it shares the first block, has the second copied, and a seed of its own from there on.
        whole[3] = whole[1][:7]
        other = expected_tokens(77, whole[3], 1)
        pair = (first + 2, first + 7)
        assert submit(device, copy(pair), row(3, 6, 7, seed=77)).tokens() == other
        assert submit(device, row(1, 9, 10)).tokens() == [tokens[1][4]]

    def test_a_row_reads_what_the_batch_has_written(self, device_factory: DeviceFactory) -> None:
        """All copies and writes come before all tokens, in the order of the records."""
        device = device_factory(**SMALL).open()
        first = device.claim_blocks(3).first
        reader = step([first, first + 1], [6], context=5, seed=8)
        writer = step([first], [1, 2, 3, 4], emits=False)
        batch = submit(device, reader, writer)
        assert batch.tokens() == expected_tokens(8, [1, 2, 3, 4, 6], 1)
        copied = submit(device, step([first + 2], [9, 9, 9, 9], emits=False), copy((first + 2, first)), reader)
        assert copied.tokens() == expected_tokens(8, [9, 9, 9, 9, 6], 1)

    def test_a_wrong_block_or_a_missing_copy_shows(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL).open()
        first = device.claim_blocks(6).first
        prompt = [1, 2, 3, 4, 5, 6]
        submit(device, step([first, first + 1], prompt)).wait()
        (right,) = expected_tokens(0, [*prompt, 7], 1)

        def decode(blocks: list[int], *before: bytes) -> Submitted:
            return submit(device, *before, step(blocks, [7], context=7))

        assert decode([first, first + 2]).tokens() != [right]  # as if a copy was forgotten
        assert decode([first + 1, first + 1]).tokens() != [right]
        assert decode([first, first + 3], copy((first + 1, first + 3))).tokens() == [right]
        assert decode([first, first + 1]).tokens() == [right]
        assert decode([first, first + 1], zero(first)).tokens() != [right]

    def test_the_host_sees_and_writes_the_same_memory(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL).open()
        kv = device.claim_blocks(2)
        submit(device, step([kv.device_id(1)], [11, 12])).wait()
        assert kv.block(1).view(np.int32).tolist() == [11, 12, 0, 0]
        kv.block(1).view(np.int32)[0] = 21
        assert submit(device, step([kv.device_id(1)], [13], context=3)).tokens() == expected_tokens(0, [21, 12, 13], 1)

    # ------------------------------------------------------------------------------------------------------- handles

    def test_a_read_only_handle_looks_on(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL)
        writer, reader = device.open(), device.open(read_only=True)
        writer.claim_blocks(2)
        assert reader.free_blocks().free == 14
        assert not reader.memory.flags.writeable
        for refused in (
            lambda: reader.claim_blocks(1),
            reader.reset,
            lambda: reader.submit(num_seqs=0, ring_offset=0, ring_bytes=0),
        ):
            with pytest.raises(DeviceRefused, match="reading only") as caught:
                refused()
            assert caught.value.code == errno.EBADF
        assert reader.free_blocks().free == 14
        submit(writer).wait()

    def test_use_after_close(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL)
        handle, other = device.open(), device.open()
        handle.claim_blocks(4)
        handle.close()
        handle.close()
        with pytest.raises(ValueError, match="closed"):
            handle.free_blocks()
        until(lambda: other.free_blocks().free == 16)

    def test_close_drops_what_has_not_run(self, device_factory: DeviceFactory) -> None:
        device = device_factory(**SMALL | {"step_latency_us": 20_000})
        first, second = device.open(), device.open()
        kv = first.claim_blocks(2)
        kv.block(0)[:] = 7
        submit(first, copy((kv.first, kv.first + 1)))
        first.close()
        until(lambda: second.free_blocks().free == 16)
        submit(second).wait()  # after it, on a device that does one at a time
        assert not any(arena(second)[kv.block_bytes * (kv.first + 1) :])
