"""What the tests of the policy share: a mock that keeps each plan, prompts, and the scheduler's private tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.backends.base import Backend, BatchLimits, BatchPlan, EngineLimits, KVGeometry, StepOutput
from ironbatch.backends.registry import create_backend
from ironbatch.config import Config
from tests.support import FakeWorker, SmallEngine, Stream

IN_CACHE = 1 << 30
COUNT_MASK = IN_CACHE - 1
NOBODY = -1


class Row(NamedTuple):
    """A row of a plan, and its sequence's block table when the plan was executed."""

    sequence: int
    first: int
    new: int
    context: int
    emits: bool
    prompt: int
    produced: int
    blocks: list[int]

    @property
    def is_decode(self) -> bool:
        return self.first == self.prompt + self.produced - 1


class Plan(NamedTuple):
    """One executed plan."""

    rows: list[Row]
    copies: list[tuple[int, int]]

    def row_of(self, stream: Stream) -> Row | None:
        return next((row for row in self.rows if row.sequence == stream.slot), None)

    @property
    def sequences(self) -> list[int]:
        return [row.sequence for row in self.rows]


class RecordingBackend(Backend):
    """The mock that the configuration asks for, and a record of every plan.

    `before(plan)` is called before a plan is executed and may raise, `after(plan)` when its tokens are there and may
    plant a fault. While `is_quiet`, no row emits.
    """

    def __init__(self, config: Config) -> None:
        self._mock = create_backend(config)
        self.eos_token_id = self._mock.eos_token_id
        self.longest_step_ns = self._mock.longest_step_ns
        self.plans: list[Plan] = []
        self.before: Callable[[BatchPlan], object] | None = None
        self.after: Callable[[BatchPlan], object] | None = None
        self.is_quiet = False

    def start(self, kv: KVGeometry, limits: EngineLimits) -> None:
        self._mock.start(kv, limits)

    def execute(self, plan: BatchPlan) -> StepOutput:
        self.plans.append(recorded(plan))
        if self.before is not None:
            self.before(plan)
        output = self._mock.execute(plan)
        if self.after is not None:
            self.after(plan)
        if self.is_quiet:
            output.counts[: len(plan)] = 0
        return output

    def forget(self, sequences: NDArray[np.int32]) -> None:
        self._mock.forget(sequences)

    def close(self) -> None:
        self._mock.close()


def recorded(plan: BatchPlan) -> Plan:
    """A plan in Python's values, its views copied."""
    sizes = plan._arena.views["sequences"]["block_count"]
    rows = []
    for row in plan.rows.tolist():
        sequence, first, new, context, emits, _, prompt, produced = row
        blocks = plan.block_tables[sequence, : sizes[sequence]].tolist()
        rows.append(Row(sequence, first, new, context, bool(emits), prompt, produced, blocks))
    copies = [(int(source), int(target)) for source, target in plan.copies]
    return Plan(rows, copies)


def recording(**limits: Any) -> Callable[[Config], RecordingBackend]:
    """A `RecordingBackend` that declares `limits`."""

    def make(config: Config) -> RecordingBackend:
        backend = RecordingBackend(config)
        backend.batch_limits = BatchLimits(**limits)
        return backend

    return make


def plans(engine: SmallEngine) -> list[Plan]:
    """All plans that the engine's present backend has executed."""
    return engine.backend.plans  # type: ignore[attr-defined, no-any-return]


# ------------------------------------------------------------------------------------------------------------ requests


def ids(count: int, start: int = 1_000) -> list[int]:
    """`count` token ids; those from another `start` are others."""
    return list(range(start, start + count))


def ask(worker: FakeWorker, token_ids: Sequence[int], max_new_tokens: int, **fields: Any) -> Stream:
    """Submit a prompt that has token ids."""
    return worker.submit(len(token_ids), max_new_tokens, prompt_token_ids=list(token_ids), **fields)


def salted(salt_a: int, salt_b: int) -> dict[str, Any]:
    """The field of a request with this cache salt, two int64; (0, 0) is none."""
    return {"salt": (salt_a, salt_b)}


def first_row(engine: SmallEngine, stream: Stream, since: int = 0) -> Row:
    """The first row that a stream had in the plans from number `since` on."""
    return next(row for plan in plans(engine)[since:] if (row := plan.row_of(stream)) is not None)


def complete(engine: SmallEngine, worker: FakeWorker, token_ids: Sequence[int], max_new: int = 1, **fields: Any) -> int:
    """Run one request to its end, alone. Returns its `cached_tokens`."""
    stream = ask(worker, token_ids, max_new, **fields)
    engine.run(worker)
    assert_complete(stream)
    return fared(engine, stream)["cached_tokens"]


def fared(engine: SmallEngine, stream: Stream) -> dict[str, int]:
    """What the slot tells of a request that has been admitted; to be asked before another one takes the slot."""
    slot = engine.segment.slots[stream.slot]
    assert int(slot["generation"]) == stream.generation, "the slot has another request by now"
    assert int(slot["admitted_generation"]) == stream.generation, "it was never admitted"
    names = ("cached_tokens", "preemptions", *(f"waited_{reason}_ns" for reason in layout.WAIT_REASONS))
    return {name: int(slot[name]) for name in names}


def waited_ns(engine: SmallEngine, stream: Stream) -> dict[str, int]:
    """How long a request has waited, by reason; those of 0 are left out."""
    words = {reason: fared(engine, stream)[f"waited_{reason}_ns"] for reason in layout.WAIT_REASONS}
    return {reason: waited for reason, waited in words.items() if waited}


def metric(engine: SmallEngine, name: str) -> int:
    """A value of the scheduler's own row."""
    return int(engine.segment.metrics[0][name])


# --------------------------------------------------------------------------------------------------------------- state


def reason(engine: SmallEngine) -> str:
    """Why the queue waits, by name."""
    return layout.WAIT_REASONS[engine.gauge("wait_reason")]


def slots(streams: Sequence[Stream]) -> list[int]:
    return [stream.slot for stream in streams]


def table(engine: SmallEngine, stream: Stream) -> list[int]:
    """The block table of a stream."""
    count = int(engine.sequence(stream)["block_count"])
    blocks: list[int] = engine.scheduler.arena.views["block_tables"][stream.slot, :count].tolist()
    return blocks


def refcounts(engine: SmallEngine) -> list[int]:
    """References of each block."""
    counts: list[int] = (engine.scheduler.arena.views["refcounts"] & COUNT_MASK).tolist()
    return counts


def cached(engine: SmallEngine) -> set[int]:
    """The blocks that are in the prefix cache."""
    return set(np.flatnonzero(engine.scheduler.arena.views["refcounts"] & IN_CACHE).tolist())


def evictable(engine: SmallEngine) -> list[int]:
    """The eviction list, the next to be evicted first."""
    records = engine.scheduler.arena.views["cached_blocks"]
    found: list[int] = []
    block = engine.gauge("oldest")
    while block != NOBODY:
        found.append(block)
        assert len(found) <= engine.config.total_kv_blocks, "the eviction list is a circle"
        block = int(records[block]["newer"])
    return found


def available(engine: SmallEngine) -> int:
    """Blocks that nobody holds and that nobody was promised."""
    return engine.gauge("free_count") + engine.gauge("evictable_count") - engine.gauge("reserved_count")


def cover(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // block_size)


def assert_backed(engine: SmallEngine) -> None:
    """Every running sequence's context stands in blocks of its own table."""
    sequences = engine.scheduler.arena.views["sequences"]
    for sequence in engine.running():
        record = sequences[sequence]
        context = int(record["prompt_tokens"]) + int(record["produced_tokens"])
        pending = int(engine.scheduler.arena.views["forks"][sequence]["parent"]) != NOBODY
        assert pending or int(record["block_count"]) * engine.config.kv_block_size >= context


def assert_complete(*streams: Stream) -> None:
    for stream in streams:
        assert (stream.reason, stream.error_code) == (layout.FINISH_LENGTH, layout.ERROR_NONE)
        assert stream.token_ids == stream.expected_token_ids(stream.max_new_tokens)


def assert_all_given_back(engine: SmallEngine) -> None:
    """No block is held or promised, no slot is taken, nobody is left."""
    assert engine.gauge("free_count") + engine.gauge("evictable_count") == engine.config.total_kv_blocks
    assert not any(refcounts(engine))
    assert engine.gauge("reserved_count") == 0
    assert engine.gauge("running_count") == engine.gauge("waiting_count") == 0
    assert not engine.segment.slots["owner"].any()
    engine.check()


def seniority(engine: SmallEngine, sequence: int) -> tuple[int, int, int]:
    """(class, arrival, slot) as the scheduler has them."""
    views = engine.scheduler.arena.views
    return int(views["sequences"][sequence]["priority_class"]), int(views["arrival_ns"][sequence]), sequence


# ------------------------------------------------------------------------------------------------------------- forging


def lend_table(engine: SmallEngine, owner: Stream, sharer: Stream) -> None:
    """Put all blocks of `owner` into the table of `sharer` too, which never looks at them.

    The owner would then free nothing. Reference counts and tables agree; only who writes does not, so no audit is due.
    """
    views = engine.scheduler.arena.views
    held = int(engine.sequence(sharer)["block_count"])
    for k, block in enumerate(table(engine, owner)):
        views["block_tables"][sharer.slot, held + k] = block
        views["refcounts"][block] += 1
        views["sequences"][sharer.slot]["block_count"] += 1


def leak_free_blocks(engine: SmallEngine, left: int = 0) -> int:
    """Let the free list forget all but `left` of its blocks. Returns how many are lost."""
    lost = engine.gauge("free_count") - left
    engine.scheduler.arena.header["free_count"] = left
    return lost


def drop_from_cache(engine: SmallEngine, block: int) -> None:
    """Make an evictable block free, whatever its place in the eviction list."""
    arena = engine.scheduler.arena
    records, index = arena.views["cached_blocks"], arena.views["index"]
    record = records[block]
    assert arena.views["refcounts"][block] == IN_CACHE, "not an evictable block"
    for bucket in range(len(index)):
        if index[bucket] == block:
            index[bucket] = record["bucket_next"]
    records["bucket_next"][records["bucket_next"] == block] = record["bucket_next"]
    older, newer = int(record["older"]), int(record["newer"])
    if older == NOBODY:
        arena.header["oldest"] = newer
    else:
        records[older]["newer"] = newer
    if newer == NOBODY:
        arena.header["newest"] = older
    else:
        records[newer]["older"] = older
    record["uid"] = 0
    arena.views["refcounts"][block] = 0
    arena.header["evictable_count"] -= 1
    arena.views["free_blocks"][engine.gauge("free_count")] = block
    arena.header["free_count"] += 1
    arena.header["helps"] += 1


# ----------------------------------------------------------------------------------------------------------- snapshots

_OF_THE_PLAN = {
    "rows",
    "copies",
    "output_counts",
    "output_tokens",
    "output_finish",
    "forget",
    "lane_news",
    "wakes",
    "token_ids",
    "positions",
    "kv_slot_mapping",
    "row_count",
    "copy_count",
    "forget_count",
    "wake_count",
    "preempted_count",
    "displaced_count",
    "admitted_count",
    "plan_tokens",
    "plan_decodes",
    "chunks_next",
}
_NOTES = {"blocked_sequence", "blocked_helps", "denied_sequence", "denied_helps"}
"""What the plan remembers so as not to try in vain."""


def _is_state(name: str) -> bool:
    return name not in _OF_THE_PLAN | _NOTES | {"waits"} and not name.startswith(("wait_", "promised_"))


def snapshot(engine: SmallEngine, head: Stream | None = None) -> dict[str, bytes]:
    """All private state but the present plan and the times waited; of the block tables, without the row of `head`."""
    arena = engine.scheduler.arena
    state = {name: arena.header[name].tobytes() for name in arena.header.dtype.names if _is_state(name)}
    for name, view in arena.views.items():
        if not _is_state(name):
            continue
        copy = view.copy()
        if name == "block_tables" and head is not None:
            copy[head.slot] = 0
        state[f"table {name}"] = copy.tobytes()
    return state


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    """The names of what two snapshots have different."""
    return {name for name in before if before[name] != after[name]}
