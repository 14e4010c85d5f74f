"""Plans as records and answers as outputs, against what `struct`-like code makes of the plan's public views."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ironbatch.backends.base import BatchPlan
from ironbatch.config import Config
from ironbatch.kernels.device_plan import decode_tokens, encode_plan
from ironbatch.kernels.device_records import (
    HEADER,
    OP_COPY_BLOCKS,
    OP_STEP,
    OP_TOKENS,
    STEP,
    STEP_EMITS,
    TOKENS,
    blocks_bytes,
    padded_bytes,
    step_bytes,
    tokens_bytes,
)
from tests.support import FakeWorker, ScriptedBackend, SmallEngine, small_config

FIRST_BLOCK = 1_000
RING_BYTES = 1 << 16
MARK = 0xAB


def padded(record: bytes) -> bytes:
    return record + bytes(padded_bytes(len(record)) - len(record))


def expected_records(plan: BatchPlan) -> bytes:
    """The plan, from what any backend sees of it."""
    records = []
    if len(plan.copies):
        ids = (plan.copies.reshape(-1) + FIRST_BLOCK).astype("<u4").tobytes()
        header = np.zeros(1, HEADER)
        header[0] = (OP_COPY_BLOCKS, 0, HEADER.itemsize + len(ids), 0)
        records.append(padded(header.tobytes() + ids))
    block_size = int(plan._arena.header["block_size"])
    for index, row in enumerate(plan.rows):
        context, new, offset = (int(row[name]) for name in ("context_tokens", "new_tokens", "token_offset"))
        blocks = plan.block_tables[row["sequence"], : -(-context // block_size)] + FIRST_BLOCK
        body = blocks.astype("<u4").tobytes() + plan.token_ids[offset : offset + new].astype("<i4").tobytes()
        step = np.zeros(1, STEP)
        step["op"], step["flags"], step["user"] = OP_STEP, STEP_EMITS * int(row["emits"]), index
        step["bytes"] = STEP.itemsize + len(body)
        step["sequence"], step["seed"] = row["sequence"], plan.seeds[index]
        step["context_tokens"], step["new_tokens"], step["block_count"] = context, new, len(blocks)
        for name in ("temperature", "top_p", "top_k"):
            step[name] = plan.sampling[name][index]
        records.append(padded(step.tobytes() + body))
        assert len(records[-1]) == step_bytes(len(blocks), new)
    return b"".join(records)


def encoded(plan: BatchPlan, ring_bytes: int = RING_BYTES) -> tuple[int, NDArray[np.uint8]]:
    """What `encode_plan` returns, and the ring after it."""
    ring = np.full(RING_BYTES, MARK, np.uint8)
    plan.fill_tokens()
    size = encode_plan(plan.state_address, plan.segment_address, ring.ctypes.data, ring_bytes, FIRST_BLOCK)
    return int(size), ring


@contextmanager
def planning(look: Any, **options: Any) -> Iterator[tuple[SmallEngine, FakeWorker]]:
    """An engine whose every plan is shown to `look`; each row that may emits token 1."""

    def make(config: Config) -> ScriptedBackend:
        backend = ScriptedBackend(config)
        backend.script = look
        return backend

    engine = SmallEngine(make, small_config(**options))
    try:
        yield engine, engine.worker()
    finally:
        engine.close()


def emit_ones(plan: BatchPlan) -> list[list[int]]:
    return [[1] * int(emits) for emits in plan.rows["emits"]]


def submit_some(worker: FakeWorker, rng: random.Random, count: int) -> None:
    for k in range(count):
        length = rng.randint(1, 24)
        ids = [rng.randrange(2**31) for _ in range(length)] if rng.random() < 0.8 else None
        sampling = {"temperature": rng.choice([0.0, 0.7, 1e-300]), "top_p": rng.random(), "top_k": rng.randrange(9)}
        worker.try_submit_group(
            length,
            rng.randint(1, 12),
            rng.choice([1, 1, 3]),
            prompt_token_ids=ids,
            seed=rng.randrange(2**63),
            arrival_ns=k,
            **sampling,
        )


@pytest.mark.parametrize("seed", range(6))
def test_every_plan_is_what_its_views_say(seed: int) -> None:
    rng = random.Random(seed)
    seen = {"plans": 0, "copies": 0, "chunks": 0}

    def look(plan: BatchPlan) -> list[list[int]]:
        size, ring = encoded(plan)
        expected = expected_records(plan)
        assert ring[:size].tobytes() == expected
        assert (ring[size:] == MARK).all()
        seen["plans"] += 1
        seen["copies"] += len(plan.copies)
        seen["chunks"] += int((plan.rows["emits"] == 0).sum())
        return emit_ones(plan)

    options = {"kv_block_size": rng.choice([1, 4, 8]), "total_kv_blocks": rng.choice([40, 64])}
    with planning(look, **options) as (engine, worker):
        submit_some(worker, rng, 10)
        engine.run(worker)
    assert min(seen.values()) > 0 or options["kv_block_size"] == 1, seen


def test_too_small_a_ring_is_told_the_size_and_left_alone() -> None:
    def look(plan: BatchPlan) -> list[list[int]]:
        needed = len(expected_records(plan))
        for room in (0, 1, needed - 1):
            size, ring = encoded(plan, room)
            assert size == -needed
            assert (ring == MARK).all()
        assert encoded(plan, needed)[0] == needed
        assert needed <= blocks_bytes(2 * len(plan)) + sum(step_bytes(6, int(new)) for new in plan.rows["new_tokens"])
        return emit_ones(plan)

    with planning(look) as (engine, worker):
        submit_some(worker, random.Random(1), 4)
        engine.run(worker)


# ------------------------------------------------------------------------------------------------------------- answers


def answer(plan: BatchPlan, token_ids: list[int]) -> bytearray:
    """TOKENS for every row."""
    records = bytearray()
    left = list(token_ids)
    for index, row in enumerate(plan.rows):
        count = int(row["emits"])
        record = np.zeros(1, TOKENS)
        record["op"], record["user"], record["sequence"], record["count"] = OP_TOKENS, index, row["sequence"], count
        record["bytes"] = TOKENS.itemsize + 4 * count
        records += padded(record.tobytes() + np.array(left[:count], "<i4").tobytes())
        assert len(records) % 8 == 0
        del left[:count]
    return records


def decoded(plan: BatchPlan, records: bytearray) -> int:
    memory = np.frombuffer(records, np.uint8)
    total: int = decode_tokens(plan.state_address, memory.ctypes.data, len(plan))
    return total


def test_answer_becomes_the_output() -> None:
    rng = random.Random(2)
    kinds = set()

    def look(plan: BatchPlan) -> None:
        emits = plan.rows["emits"].tolist()
        kinds.update(emits)
        tokens = [rng.randrange(2**31) for _ in range(sum(emits))]
        plan.output.counts[: len(plan)] = 77
        plan.output.token_ids[: len(tokens)] = 0
        records = answer(plan, tokens)
        assert len(records) <= len(plan) * tokens_bytes(1)
        assert decoded(plan, records) == len(tokens)
        assert plan.output.counts[: len(plan)].tolist() == emits
        assert plan.output.token_ids[: len(tokens)].tolist() == tokens
        assert decoded(plan, records) == -1, "it is taken once only"
        plan.output.counts[: len(plan)] = emits
        plan.output.token_ids[: len(tokens)] = 1

    def look_and_emit(plan: BatchPlan) -> list[list[int]]:
        look(plan)
        return emit_ones(plan)

    with planning(look_and_emit) as (engine, worker):
        submit_some(worker, rng, 6)
        engine.run(worker)
    assert kinds == {0, 1}


FAULTS = {
    "another op": ("op", OP_STEP),
    "a flag": ("flags", 1),
    "another size": ("bytes", 32),
    "another row": ("user", 7),
    "no row": ("user", 2**64 - 1),
    "another sequence": ("sequence", 999),
    "no token": ("count", 0),
    "two tokens": ("count", 2),
    "a huge count": ("count", 2**32 - 1),
}


@pytest.mark.parametrize(("name", "value"), FAULTS.values(), ids=FAULTS)
def test_what_is_no_answer_names_its_row(name: str, value: int) -> None:
    found = []

    def look(plan: BatchPlan) -> list[list[int]]:
        if len(plan) == 3 and plan.rows["emits"].all():
            for row in range(3):
                records = answer(plan, [1, 2, 3])
                start = row * tokens_bytes(1)
                np.frombuffer(records, np.uint8)[start : start + TOKENS.itemsize].view(TOKENS)[name] = value
                found.append(decoded(plan, records))
        return emit_ones(plan)

    with planning(look) as (engine, worker):
        for _ in range(3):
            worker.submit(2, 2)
        engine.run(worker)
    assert found[:3] == [-1, -2, -3]


def test_negative_token_is_none() -> None:
    found = []

    def look(plan: BatchPlan) -> list[list[int]]:
        found.append(decoded(plan, answer(plan, [-1])))
        return emit_ones(plan)

    with planning(look) as (engine, worker):
        worker.submit(1, 1)
        engine.run(worker)
    assert found == [-1]
