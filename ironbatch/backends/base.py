"""The backend seam: what computes the tokens of a batch plan.

One `Backend` lives in the scheduler process and is called from its only thread. The same four methods fit

* a synchronous device or model: `execute` computes and returns;
* a device with fences: `execute` submits, waits for the fence in slices, returns (`device.py` is such a backend);
* streams whose tokens come by themselves: `execute` returns at once with the 0..n tokens a sequence that are there, and
  where there are none the scheduler sleeps until the backend rings its `news` (`real.py` is such a backend).

docs/backends.md shows a complete plug-in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.backends.limits import NO_LIMITS, BatchLimits, padded
from ironbatch.kernels.arena import StateArena
from ironbatch.kernels.plan import fill_plan_tokens
from ironbatch.shm.segment import Segment
from ironbatch.shm.wakeup import Doorbell
from ironbatch.text_rows import TextRow

__all__ = [
    "FINISH_ERROR",
    "FINISH_LENGTH",
    "FINISH_STOP",
    "Backend",
    "BackendFactory",
    "BatchLimits",
    "BatchPlan",
    "EngineLimits",
    "KVGeometry",
    "SequenceRequest",
    "StepOutput",
    "finish_error",
]

FINISH_LENGTH = layout.FINISH_LENGTH
FINISH_STOP = layout.FINISH_STOP
FINISH_ERROR = layout.FINISH_ERROR


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The paged KV cache that block ids speak of."""

    num_blocks: int
    block_size: int  # positions a block; a power of two


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a plan will never exceed: the configuration's limits, or the backend's own where they are tighter."""

    num_sequences: int  # sequences are named 0 <= id < num_sequences; an id is used again after `forget`
    max_running: int  # rows of a plan
    max_batch_tokens: int  # new tokens of a plan
    max_request_tokens: int  # prompt and output of one sequence


class SequenceRequest(NamedTuple):
    """What a sequence was asked to be, and what it has become: for a backend that hands it on as a whole."""

    prompt_tokens: int
    prompt_ids: NDArray[np.int32] | None  # int32[prompt_tokens]; None when only their number is known, or only text
    prompt_text: bytes | None  # UTF-8; None when the prompt was no text
    output_ids: NDArray[np.int32]  # int32[produced so far]; NO_TOKEN_ID where it is not known
    max_new_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int  # 0: off
    ignore_eos: bool


class StepOutput:
    """What a step emitted. The scheduler owns the memory; a plan hands it out ready for the usual case.

    counts: int32[>= rows], tokens emitted by each row. Preset to 1 for a row that reaches the end of its sequence and
        to 0 for one whose prefill goes on; a stream without news sets 0, speculative decoding may set more, up to
        `BatchLimits.max_tokens_per_step`.
    token_ids: int32[>= sum(counts)], the tokens, row after row without gaps.
    finish_reasons: int32[>= rows], preset to 0: the engine ends sequences at `max_new_tokens` and at `eos_token_id`. A
        backend that knows more sets FINISH_STOP, FINISH_LENGTH or FINISH_ERROR, or `finish_error(code)`.
    """

    __slots__ = ("counts", "finish_reasons", "token_ids")

    def __init__(self, counts: NDArray[np.int32], token_ids: NDArray[np.int32], finish: NDArray[np.int32]) -> None:
        self.counts = counts
        self.token_ids = token_ids
        self.finish_reasons = finish


def finish_error(error_code: int) -> int:
    """The finish reason of a sequence that fails with one of `layout.ERROR_...`; bare FINISH_ERROR is ERROR_REQUEST."""
    return FINISH_ERROR | error_code << layout.OUTPUT_CODE_SHIFT


class BatchPlan:
    """One step's work. All arrays are views that are valid until `execute` returns.

    rows: structured, one a sequence: `sequence` (id), `first_position`, `new_tokens`, `context_tokens` (positions
        first_position <= p < context_tokens are computed now), `emits` (1: the next token comes after it),
        `token_offset`, `prompt_tokens`, `produced_tokens`. `decode_count` decodes come first, then prefill chunks.
    copies: int32[count, 2], rows (source, target): whole KV blocks to copy, in order, before anything is computed.
    token_ids, positions: int32[new tokens of all rows]; row r owns token_offset <= i < token_offset + new_tokens.
    kv_slot_mapping: int64[new tokens], where each new token's KV goes: block id x block size + offset.
    output: the preset `StepOutput` to fill and return.
    block_tables: int32[num_sequences, blocks a sequence]; row of a sequence id, its first ceil(context / block size)
        entries are valid.
    padded_sequences, padded_tokens: the buckets of `limits` that hold the plan's rows and new tokens.
    """

    def __init__(self, arena: StateArena, segment: Segment, limits: BatchLimits = NO_LIMITS) -> None:
        self._arena = arena
        self._sequence_buckets = tuple(map(int, limits.sequence_buckets))
        self._token_buckets = tuple(map(int, limits.token_buckets))
        self._segment = segment
        self._rows = arena.views["rows"]
        self.output = StepOutput(*(arena.views[f"output_{name}"] for name in ("counts", "tokens", "finish")))
        self.block_tables: NDArray[np.int32] = arena.views["block_tables"]
        self.state_address = arena.address  # for a backend whose own kernels read the plan
        self.segment_address = segment.address
        self.count = 0
        self.has_tokens = False  # the scheduler sets both in each step; a call for it would be 1 % of one at 256

    def __len__(self) -> int:
        return self.count

    @property
    def rows(self) -> NDArray[Any]:
        """The plan's rows, PLAN_ROW[count]."""
        return self._rows[: self.count]

    @property
    def decode_count(self) -> int:
        """Rows [0, decode_count) are decodes; the rest are prefill chunks."""
        return int(self._arena.header["plan_decodes"])

    @property
    def copies(self) -> NDArray[np.int32]:
        """Whole KV blocks to copy before anything is computed: int32[count, 2], (source, target), in order."""
        copies: NDArray[np.int32] = self._arena.views["copies"][: int(self._arena.header["copy_count"])]
        return copies

    @property
    def padded_sequences(self) -> int:
        """Rows of the compiled shape that holds this plan; without `sequence_buckets`, its rows."""
        return padded(self.count, self._sequence_buckets)

    @property
    def padded_tokens(self) -> int:
        """New tokens of the compiled shape that holds this plan; without `token_buckets`, its new tokens."""
        return padded(int(self._arena.header["plan_tokens"]), self._token_buckets)

    def fill_tokens(self) -> None:
        """Make the three tables below; for a backend whose own kernels read them."""
        if not self.has_tokens:
            fill_plan_tokens(self._arena.address, self._segment.address)
            self.has_tokens = True

    def _tokens(self, name: str) -> NDArray[Any]:
        self.fill_tokens()
        return self._arena.views[name][: int(self._arena.header["plan_tokens"])]

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Ids of the tokens to compute; zeros for a prompt of which only the length is known."""
        return self._tokens("token_ids")

    @property
    def positions(self) -> NDArray[np.int32]:
        """Their positions in their sequences."""
        return self._tokens("positions")

    @property
    def kv_slot_mapping(self) -> NDArray[np.int64]:
        """Their places in the KV cache."""
        return self._tokens("kv_slot_mapping")

    @property
    def seeds(self) -> NDArray[np.int64]:
        """Sampling seed of each row's sequence, int64[count]."""
        seeds: NDArray[np.int64] = self._arena.views["seeds"][self.rows["sequence"]]
        return seeds

    @property
    def sampling(self) -> NDArray[Any]:
        """Sampling parameters of each row's sequence: structured, `temperature`, `top_p` (float64), `top_k` (int64)."""
        slots: NDArray[Any] = self._segment.slots[["temperature", "top_p", "top_k"]][self.rows["sequence"]]
        return slots

    def request(self, sequence: int) -> SequenceRequest:
        """All that was asked of a sequence, and its output so far. Its arrays are views of shared memory."""
        slot = self._segment.slots[sequence]
        fields = self._arena.views["sequences"][sequence]
        prompt, produced = int(fields["prompt_tokens"]), int(fields["produced_tokens"])
        flags, tokens = int(slot["flags"]), self._segment.tokens[sequence]
        return SequenceRequest(
            prompt_tokens=prompt,
            prompt_ids=tokens[:prompt] if flags & layout.FLAG_TOKEN_IDS else None,
            prompt_text=self.text_row(sequence).prompt if flags & layout.FLAG_TEXT else None,
            output_ids=tokens[prompt : prompt + produced],
            max_new_tokens=int(fields["max_new_tokens"]),
            seed=int(self._arena.views["seeds"][sequence]),
            temperature=float(slot["temperature"]),
            top_p=float(slot["top_p"]),
            top_k=int(slot["top_k"]),
            ignore_eos=bool(flags & layout.FLAG_IGNORE_EOS),
        )

    def text_row(self, sequence: int) -> TextRow:
        """Where a sequence's text stands; only for a backend of `config.TEXT_BACKENDS`."""
        return TextRow(self._segment.texts[sequence])

    @cached_property
    def num_sequences(self) -> int:
        """Sequence ids are below this."""
        return len(self.block_tables)


def do_nothing() -> None:
    """For whoever does not care that a backend is alive."""


def never() -> bool:
    """For whoever is never told to stop."""
    return False


def keep_to_oneself(problem: int) -> None:
    """For whoever does not care what a backend waits for."""


class Backend(ABC):
    """Computes plans. Made by `Backend(config)`, `connect`ed, `start`ed; then `execute` and `forget`; at last `close`d.

    Exceptions from `execute`: `BackendLost` preempts all sequences, closes the backend and starts it again;
    `RequestError` ends the sequences that it names; any other ends the sequences of the plan. The server lives on.
    """

    resumable: bool = True
    """Whether the same sequence gets the same tokens, whoever computes it again (after a preemption or a restart)."""

    longest_step_ns: int = 1_000_000_000
    """The longest that `execute` may take, or be silent if it calls `beat`; past it and 2 s more, /health reports a
    hung device."""

    beat: Callable[[], None] = staticmethod(do_nothing)
    """Says that the scheduler is alive; it sets this before `start`. A backend that waits for longer calls it at least
    every half second, but only while whatever it waits for answers: who hangs must be silent."""

    is_stopping: Callable[[], bool] = staticmethod(never)
    """Whether the scheduler is told to stop. It sets this before `connect`; a backend that waits there looks often, and
    gives up by raising `processes.StopRequested`."""

    predecessor_running: int = 0
    """How many sequences the scheduler before this one ran at once, 0 for the first. It sets this before `connect`:
    sequences that live wait for an answer, so a successor had better come without what a first start would wait for."""

    tell_problem: Callable[[int], None] = staticmethod(keep_to_oneself)
    """Says why there is nobody to compute (one of `layout.BACKEND_...`): /health repeats it, and new requests are
    refused until it is called with BACKEND_WELL. The scheduler sets this before `connect`; any thread may call it."""

    news: Doorbell | None = None
    """Of a backend whose tokens come by themselves: it rings this when some have. A step in which no sequence was given
    a token, and all wait for their next, is followed by sleep until it rings, or a request comes."""

    paged_kv: bool = True
    """Whether KV lives in the blocks that plans name, and stays there until the block is handed on. Prefix caching and
    forks rest on it: a backend that keeps its KV elsewhere sets False, and gets neither hits nor copies."""

    reserves_output: bool = False
    """Whether a sequence gets blocks for all of its output when it is admitted, so that it is never preempted: for a
    backend with which to begin a sequence again costs more than blocks. Nor does a higher class displace it then."""

    batch_limits: BatchLimits = NO_LIMITS

    eos_token_id: int = -1
    """The token that ends a sequence, or -1."""

    def connect(self) -> None:  # noqa: B027  most are what they are when they are made
        """Reach what computes, and declare its limits. It may take long if it calls `beat`, and raise `StartError`."""

    @abstractmethod
    def start(self, kv: KVGeometry, limits: EngineLimits) -> None:
        """Get ready. After it returns, plans come; called again after a `close`."""

    @abstractmethod
    def execute(self, plan: BatchPlan) -> StepOutput:
        """Compute one plan and return what it emitted."""

    def forget(self, sequences: NDArray[np.int32]) -> None:  # noqa: B027  most backends keep nothing a sequence
        """These have finished or were preempted: drop what is kept for them. Their ids come back as new sequences."""

    def close(self) -> None:  # noqa: B027  nothing to close is usual
        """Let go of everything."""


BackendFactory = Callable[[Any], Backend]
