"""The device backend on software devices: each stream is what its request gives, whatever the device does."""

from __future__ import annotations

import ctypes
import errno
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.backends import device as device_module
from ironbatch.backends.base import BatchLimits, EngineLimits, KVGeometry
from ironbatch.backends.device import DeviceBackend
from ironbatch.backends.device_limits import most_bytes, software_spec
from ironbatch.backends.registry import create_backend
from ironbatch.config import Config
from ironbatch.driver import abi, handle
from ironbatch.driver.abi import CAP_MMAP, CAP_RESET, Message
from ironbatch.driver.faults import Faults
from ironbatch.driver.handle import SLICE_NS
from ironbatch.driver.reference import ReferenceDevice
from ironbatch.driver.software import SoftwareDevice, make_reference
from ironbatch.driver.spec import DeviceSpec
from ironbatch.errors import DeviceUnavailable, StartError
from ironbatch.kernels.device_records import OP_STEP, STEP, WORD_USER
from tests.scheduler.helpers import assert_all_given_back, assert_complete, fared, metric
from tests.support import FakeWorker, SmallEngine, Stream, small_config

LONGEST_US = 20_000
SPEC: dict[str, Any] = {"blocks": 64, "block_bytes": 16, "step_latency_us": 0, "longest_step_us": LONGEST_US}


def device_config(**options: Any) -> Config:
    return small_config(backend="device", device="software", **options)


def a_device(*kinds: str, rate: float = 0.0, seed: int = 0, **spec: Any) -> ReferenceDevice:
    return make_reference(DeviceSpec(**(SPEC | spec)), Faults(kinds, rate, seed))


def backend_on(device: ReferenceDevice) -> Callable[[Config], DeviceBackend]:
    """Makes a backend that opens this device, again and again."""
    return lambda config: DeviceBackend(config, lambda _: SoftwareDevice(device))


@contextmanager
def running_on(
    device: ReferenceDevice | Callable[[Config], DeviceBackend], **options: Any
) -> Iterator[tuple[SmallEngine, FakeWorker]]:
    make = backend_on(device) if isinstance(device, ReferenceDevice) else device
    engine = SmallEngine(make, device_config(**options))
    try:
        yield engine, FakeWorker(engine.segment, 0, reads_kv=True)
    finally:
        engine.close()
    if isinstance(device, ReferenceDevice):
        with SoftwareDevice(device) as other:
            assert other.free_blocks().free == device.spec.blocks, "it has given back all blocks"


def submit_some(worker: FakeWorker, count: int, seed: int = 0, most_choices: int = 3) -> list[Stream]:
    """Requests whose prompts begin alike, some of them for several choices, some without token ids."""
    rng = random.Random(seed)
    common = [rng.randrange(1_000) for _ in range(8)]
    streams: list[Stream] = []
    for k in range(count):
        ids = common[: rng.choice([0, 4, 8])] + [rng.randrange(1_000) for _ in range(rng.randint(1, 9))]
        streams += worker.submit_group(
            len(ids),
            rng.randint(1, 10),
            rng.choice([1, 1, most_choices]),
            prompt_token_ids=ids if rng.random() < 0.8 else None,
            seed=rng.randrange(2**63),
            arrival_ns=k,
        )
    return streams


# ------------------------------------------------------------------------------------------------------------- streams

POOLS = {
    "room for all": {},
    "too small a pool": {"total_kv_blocks": 8, "max_model_len": 32},
    "small chunks": {"max_batch_tokens": 3},
    "no prefix cache": {"no_prefix_cache": True},
    "one a block": {"kv_block_size": 1, "total_kv_blocks": 40, "max_model_len": 40},
}


@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("seed", range(3))
def test_streams_are_what_their_requests_give(options: dict[str, Any], seed: int) -> None:
    device = a_device(block_bytes=4 * int(options.get("kv_block_size", 4)))
    with running_on(device, **options) as (engine, worker):
        streams = submit_some(worker, 10, seed)
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)
        assert metric(engine, "preemptions") > 0 or options != POOLS["too small a pool"]
        assert engine.segment.header["longest_step_ns"] == SLICE_NS


def test_prefix_hits_and_forks_are_read_from_the_device() -> None:
    with running_on(a_device()) as (engine, worker):
        first = worker.submit(9, 3, prompt_token_ids=list(range(9)))
        engine.run(worker)
        again = worker.submit_group(9, 5, 4, prompt_token_ids=list(range(9)), seed=7)
        engine.run(worker)
        assert fared(engine, again[0])["cached_tokens"] == 8
        assert_complete(first, *again)
        assert len({tuple(stream.token_ids) for stream in again}) == 4


def test_successor_after_a_death_computes_everything_again() -> None:
    device = a_device()
    with running_on(device, max_model_len=32) as (engine, worker):
        streams = submit_some(worker, 8)
        for _ in range(5):
            engine.step()
            worker.collect()
        engine.backend.close()  # the kernel does so for a process that dies
        engine.start_scheduler()
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)


# -------------------------------------------------------------------------------------------------------------- limits

LIMITS: dict[str, dict[str, Any]] = {
    "few sequences": {"max_seqs": 3},
    "few tokens": {"max_tokens": 5},
    "no mix": {"mixes": False},
    "one prefill": {"max_prefill_seqs": 1},
    "buckets": {"seq_buckets": (2, 4), "token_buckets": (2, 6)},
    "a window": {"max_batch_context": 60},
    "all": {
        "max_seqs": 4,
        "max_tokens": 8,
        "mixes": False,
        "max_prefill_seqs": 1,
        "seq_buckets": (1, 4),
        "token_buckets": (4, 8),
        "max_batch_context": 100,
    },
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_device_refuses_no_plan(limits: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """It looks itself whether a batch is within its limits."""
    with running_on(a_device(**limits)) as (engine, worker):
        streams = submit_some(worker, 10, 1)
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)
    assert "refused" not in caplog.text


def test_limits_are_declared_as_the_device_has_told_them() -> None:
    backend = backend_on(a_device(**LIMITS["all"]))(device_config())
    assert backend.batch_limits == BatchLimits(
        max_sequences=4,
        max_tokens=8,
        mixes_prefill_and_decode=False,
        max_prefill_sequences=1,
        sequence_buckets=(1, 4),
        token_buckets=(4, 8),
        max_batch_context=100,
    )
    assert (backend.resumable, backend.paged_kv, backend.eos_token_id) == (True, True, -1)
    backend.close()


def test_device_without_limits_narrows_nothing() -> None:
    with running_on(a_device()) as (engine, _):
        assert engine.scheduler.narrowing == ""
    with running_on(create_backend) as (engine, _):
        assert engine.scheduler.narrowing == ""


def test_small_ring_narrows_so_that_every_plan_fits(caplog: pytest.LogCaptureFixture) -> None:
    """256 sequences of 512 blocks do not fit 64 KiB, nor do 32 Ki tokens."""
    device = a_device(ring_bytes=1 << 16, blocks=512)
    big = {"total_kv_blocks": 512, "max_running_seqs": 256, "max_batch_tokens": 32_768, "max_model_len": 2_048}
    backend = backend_on(device)(device_config(**big))
    rows, tokens = backend.batch_limits.max_sequences, backend.batch_limits.max_tokens
    assert rows is not None
    assert tokens is not None
    assert most_bytes(rows, tokens, 512) <= 1 << 16 < most_bytes(rows + 1, tokens, 512)
    assert (rows, tokens) == (22, 4096)
    backend.close()
    with running_on(device, **big) as (engine, worker):
        streams = [worker.submit(1_000, 2, prompt_token_ids=list(range(1_000)), seed=k) for k in range(2)]
        streams += worker.submit_group(1_999, 40, 20)
        engine.run(worker)
        assert_complete(*streams)
    assert "refused" not in caplog.text


def test_smallest_ring_that_holds_one_sequence() -> None:
    blocks = 1_000
    spec = {"ring_bytes": 4096, "blocks": blocks, "block_bytes": 16}
    most = (4096 - most_bytes(1, 1, 0)) // 4 // 2 * 2  # block ids
    config = device_config(total_kv_blocks=blocks, max_model_len=4 * most)
    backend = backend_on(a_device(**spec))(config)
    assert backend.batch_limits.max_sequences == 1
    assert backend.batch_limits.max_tokens is not None
    assert most_bytes(1, backend.batch_limits.max_tokens, most) <= 4096
    backend.close()
    with pytest.raises(StartError) as caught:
        backend_on(a_device(**spec))(device_config(total_kv_blocks=blocks, max_model_len=4 * blocks))
    assert str(caught.value) == (
        "the software device has a ring of 4096 bytes, and one sequence of 4000 tokens needs"
        f" {most_bytes(1, 1, blocks)}; start the device with --ring-bytes 8192 or more, or lower --max-model-len"
    )


def test_software_device_takes_what_the_configuration_asks_for() -> None:
    spec = software_spec(device_config(mock_token_latency_us=300))
    assert (spec.blocks, spec.block_tokens, spec.step_latency_us, spec.contexts) == (16, 4, 300, 1)
    for options in (
        {"max_running_seqs": 65_536, "max_model_len": 2, "max_batch_tokens": 1 << 20},
        {"total_kv_blocks": 1 << 22, "max_model_len": 1 << 20, "max_queued_requests": 0, "kv_block_size": 256},
        {"mock_token_latency_us": 60_000_000},
    ):
        software_spec(device_config(**options))


# --------------------------------------------------------------------------------------------------- what does not fit


def start_error(**options: Any) -> str:
    """Of a configuration beside a device of 64 blocks of 4 tokens."""
    device = a_device()
    with pytest.raises(StartError) as caught, running_on(device, **options):
        pass
    with SoftwareDevice(device) as other:
        assert other.free_blocks().free == 64
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_blocks_of_another_size() -> None:
    assert start_error(kv_block_size=8) == (
        "--kv-block-size is 8, and a block of the software device holds 4 tokens; use --kv-block-size 4, or start the"
        " device with --block-bytes 32"
    )


@pytest.mark.parametrize("tokens", [3, 512])
def test_blocks_of_a_size_that_the_engine_can_t_have(tokens: int) -> None:
    with pytest.raises(StartError) as caught, running_on(a_device(block_bytes=4 * tokens), kv_block_size=8):
        pass
    assert str(caught.value).endswith(f"holds {tokens} tokens; start the device with --block-bytes 32")


def test_fewer_blocks_than_the_pool() -> None:
    assert start_error(total_kv_blocks=65) == (
        "--total-kv-blocks is 65, and the software device has 64 blocks; use --total-kv-blocks 64, or start the device"
        " with --blocks 65"
    )


def test_blocks_that_another_has() -> None:
    device = a_device()
    with SoftwareDevice(device) as other:
        other.claim_blocks(40)
        backend = backend_on(device)(device_config(total_kv_blocks=25))
        with pytest.raises(StartError) as caught:
            backend.start(*geometry(backend, 25))
        assert str(caught.value).startswith("--total-kv-blocks 25 must be free in a row: ")
        assert str(caught.value).endswith("ask for fewer, or end whoever else has the device open")
        assert other.free_blocks().free == 24
        other.close()
        backend.start(*geometry(backend, 25))  # it opens the device anew
        backend.close()


def geometry(backend: DeviceBackend, blocks: int) -> tuple[Any, Any]:
    return KVGeometry(blocks, 4), EngineLimits(8, 8, 16, 64)


def test_device_that_cannot_be_opened() -> None:
    def refuse(_: Config) -> Any:
        raise DeviceUnavailable("/dev/x can't be opened: there is no such node; load its driver", errno.ENOENT)

    with pytest.raises(StartError, match=r"^/dev/x can't be opened: there is no such node; load its driver$"):
        DeviceBackend(device_config(), refuse)


# -------------------------------------------------------------------------------------------------------------- faults

TOLD = {
    "lost-fence": r"fence \d+ is not signalled within 0.02 s; the device was reset",
    "late-fence": r"fence \d+ is not signalled within 0.02 s; the device was reset",
    "duplicate-fence": None,
    "eio": "the batch is submitted again",
    "short-ring": "the batch is submitted again",
    "reset": r"backend lost: the software device was reset",
}


def test_device_without_copies_gets_none(caplog: pytest.LogCaptureFixture) -> None:
    """Neither forks nor blocks that are shared, so nothing that it would refuse."""
    device = a_device(caps=CAP_MMAP | CAP_RESET)
    ids = list(range(8))
    with running_on(device) as (engine, worker):
        streams = worker.submit_group(9, 6, 3, prompt_token_ids=[*ids, 1], seed=1)
        streams += worker.submit_group(9, 6, 1, prompt_token_ids=[*ids, 2], seed=2)
        engine.run(worker)
        streams += worker.submit_group(9, 6, 1, prompt_token_ids=[*ids, 3], seed=3)
        engine.run(worker)
        assert_complete(*streams)
        assert engine.segment.metrics[0]["copied_blocks"] == engine.segment.metrics[0]["prefix_hit_tokens"] == 0
    assert "ERROR" not in caplog.text


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("batches", [(1,), (2, 3), (5, 12)])
def test_fault_costs_no_stream_a_token(kind: str, batches: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    device = a_device(*(f"{kind}@{batch}" for batch in batches))
    with running_on(device) as (engine, worker):
        streams = submit_some(worker, 8, batches[0])
        engine.run(worker)
        if kind == "eio" and batches == (2, 3):  # the same batch, twice
            assert any(stream.error_code == layout.ERROR_BACKEND for stream in streams)
            streams = [stream for stream in streams if stream.error_code == layout.ERROR_NONE]
        if kind == "short-ring" and batches == (2, 3):
            streams = [stream for stream in streams if stream.error_code == layout.ERROR_NONE]
        assert_complete(*streams)
        assert_all_given_back(engine)
        assert engine.segment.header["scheduler_ready"] == 1
    if TOLD[kind] is not None:
        assert re.search(str(TOLD[kind]), caplog.text)


@pytest.mark.parametrize("seed", range(4))
def test_all_faults_together(seed: int) -> None:
    """Whoever is not served to its end is told so; nothing is held by anybody."""
    with running_on(a_device(*TOLD, rate=0.15, seed=seed)) as (engine, worker):
        streams = submit_some(worker, 8, seed)
        engine.run(worker)
        for stream in streams:
            assert stream.is_over
            expected = stream.expected_token_ids(stream.max_new_tokens)
            assert stream.token_ids == expected[: len(stream.token_ids)]
            assert stream.error_code in {layout.ERROR_NONE, layout.ERROR_BACKEND}
            assert (stream.error_code == layout.ERROR_NONE) == (stream.token_ids == expected)
        assert_all_given_back(engine)


@pytest.mark.parametrize("kind", ["eio", "short-ring", "lost-fence", "late-fence", "reset"])
def test_device_that_always_fails_ends_every_stream_with_an_error(kind: str) -> None:
    with running_on(a_device(kind, rate=1.0)) as (engine, worker):
        streams = submit_some(worker, 8)
        engine.run(worker)
        assert {stream.error_code for stream in streams} == {layout.ERROR_BACKEND}
        assert_all_given_back(engine)
        assert engine.backend._device.ring._pieces == type(engine.backend._device.ring._pieces)()  # type: ignore[attr-defined]


def test_row_that_the_device_names_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block id is one that was never claimed; also behind a record of copies."""
    victim: list[int] = []
    told: list[int] = []

    def encode(state: int, segment: int, address: int, room: int, first: int) -> int:
        size: int = encode_plan(state, segment, address, room, first)
        if size > 0:
            start = 0
            while start < size:
                memory = as_bytes(address + start, size - start)
                op, _, record_bytes = memory[:2].view("<u2")[0], 0, int(memory[4:8].view("<u4")[0])
                if op == OP_STEP and int(memory[: STEP.itemsize].view(STEP)["sequence"][0]) in victim:
                    told.append(int(memory[: STEP.itemsize].view("<u8")[WORD_USER]))
                    memory[STEP.itemsize : STEP.itemsize + 4].view("<u4")[0] = 60
                start += -(-record_bytes // 8) * 8
        return size

    encode_plan = device_module.encode_plan
    monkeypatch.setattr(device_module, "encode_plan", encode)
    with running_on(a_device(), max_queued_requests=4) as (engine, worker):
        others = worker.submit_group(6, 8, 3, prompt_token_ids=list(range(6)))
        bad = worker.submit(5, 8, prompt_token_ids=list(range(50, 55)))
        victim.append(bad.slot)
        engine.run(worker)
        assert bad.error_code == layout.ERROR_REQUEST
        assert bad.token_ids == []
        assert len(told) == 2, "it was tried once more"
        assert_complete(*others)
        assert_all_given_back(engine)


def as_bytes(address: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)  # type: ignore[no-any-return]


def test_answer_that_is_none_is_a_fault_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([-2, -2])
    decode = device_module.decode_tokens
    monkeypatch.setattr(device_module, "decode_tokens", lambda *words: next(answers, None) or decode(*words))
    with running_on(a_device()) as (engine, worker):
        streams = [worker.submit(3, 3, seed=k, arrival_ns=k) for k in range(3)]
        engine.run(worker)
        assert [stream.error_code for stream in streams] == [layout.ERROR_NONE, layout.ERROR_REQUEST, layout.ERROR_NONE]
        assert_complete(streams[0], streams[2])
        assert_all_given_back(engine)


# ------------------------------------------------------------------------------------------------------- lost and found


class Mortal(SoftwareDevice):
    """All its calls fail while it is dead."""

    dead = False

    def _call(self, message: Message, buffer: bytearray) -> None:
        if Mortal.dead:
            raise OSError(errno.ECONNABORTED, "its server has died")
        super()._call(message, buffer)


@pytest.fixture(autouse=True)
def alive() -> Iterator[None]:
    Mortal.dead = False
    yield
    Mortal.dead = False


def test_device_that_has_gone_is_opened_anew_as_soon_as_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    device = a_device()

    def opener(_: Config) -> SoftwareDevice:
        if Mortal.dead:
            raise DeviceUnavailable("/dev/x can't be opened: its server has died; start it again", errno.ENOTCONN)
        return Mortal(device)

    with running_on(lambda config: DeviceBackend(config, opener)) as (engine, worker):
        streams = submit_some(worker, 8)
        for _ in range(4):
            engine.step()
            worker.collect()
        Mortal.dead = True
        engine.step()
        for _ in range(3):
            assert engine.step() == 0
            assert engine.segment.header["scheduler_ready"] == 0
        assert "backend lost: the software device is gone" in caplog.text
        assert caplog.text.count("cannot be reopened: StartError: /dev/x can't be opened") == 1
        Mortal.dead = False
        engine.run(worker)
        assert_complete(*streams)
        assert_all_given_back(engine)
        assert engine.segment.header["scheduler_ready"] == 1


def test_another_device_at_the_same_place_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    former, other = a_device(max_seqs=6), a_device(max_seqs=5)
    devices = [former]
    make = lambda config: DeviceBackend(config, lambda _: Mortal(devices[0]))  # noqa: E731
    with running_on(make) as (engine, worker):
        streams = submit_some(worker, 6)
        engine.step()
        Mortal.dead = True
        engine.step()
        Mortal.dead, devices[0] = False, other
        assert engine.step() == 0
        assert "another device than the engine was started with" in caplog.text
        assert "max_sequences=6" in caplog.text
        assert "max_sequences=5" in caplog.text
        with SoftwareDevice(other) as beside:
            assert beside.free_blocks().used_by_fd == 0
            assert beside.free_blocks().free == 64
        devices[0] = former
        engine.run(worker)
        assert_complete(*streams)


def test_device_that_cannot_be_reset_is_lost_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    device = a_device("lost-fence@2", caps=abi.CAP_MMAP | abi.CAP_COPY | abi.CAP_ZERO)
    with running_on(device) as (engine, worker):
        streams = submit_some(worker, 3)
        engine.run(worker)
        assert_complete(*streams)
    assert "is not signalled within 0.02 s; the device could not be reset: " in caplog.text


def test_heart_beats_while_a_slow_device_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "SLICE_NS", 2_000_000)
    with running_on(a_device(step_latency_us=15_000, longest_step_us=2_000_000)) as (engine, worker):
        beats: list[int] = []
        engine.backend.beat = lambda: beats.append(1)
        stream = worker.submit(2, 1)
        engine.run(worker)
        assert_complete(stream)
        assert len(beats) >= 3


def test_scheduler_hands_its_beat_over_before_the_start() -> None:
    with running_on(a_device()) as (engine, _):
        assert engine.backend.beat == engine.scheduler.beat
        engine.clock.advance_ns(5)
        engine.backend.beat()
        assert engine.segment.header["heartbeat_ns"] == engine.clock.now_ns()
