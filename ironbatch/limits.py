"""Every bound of Ironbatch, named once, and the relations between bounds.

A bound that isn't here does not exist: `config` checks these at start, the web workers check requests against
them, and kernels rely on them (an index that fits int32 here is never checked again below).
"""

import re
from dataclasses import dataclass
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


@dataclass(frozen=True, slots=True)
class Bound:
    """The integers from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        assert self.low <= self.high

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"between {self.low} and {self.high}"

    def read(self, text: str) -> int:
        """The number that `text` says: digits and a minus sign, no fraction, underscore, space or other digits.

        Raises ValueError naming the value, the bound and the remedy.
        """
        if re.fullmatch(r"-?[0-9]+", text) is None:
            raise ValueError(f"{quoted(text)} is not a whole number; give one {self}")
        is_negative, digits = text.startswith("-"), text.lstrip("-0") or "0"
        if len(digits) > MAX_DIGITS:  # beyond any bound, and int() itself refuses over 4,300 digits
            value, shown = (self.low - 1 if is_negative else self.high + 1), text[:MAX_DIGITS] + "..."
        else:
            value = -int(digits) if is_negative else int(digits)
            shown = str(value)
        if value not in self:
            remedy = f"{self.low} or more" if value < self.low else f"{self.high} or less"
            raise ValueError(f"{shown} is not {self}; use {remedy}")
        return value


MAX_DIGITS: Final = 20  # of a whole number in a flag or a variable; leading zeros aside
MAX_QUOTED_CHARS: Final = 60  # of an operator's value in a message


def quoted(text: str) -> str:
    """An operator's value as messages show it: on one line, and not too long."""
    return repr(text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 3] + "...")


# One sequence
MIN_REQUEST_TOKENS: Final = 2  # a prompt token and an output token
MAX_MODEL_LEN: Final = Bound(MIN_REQUEST_TOKENS, 1_048_576)
TOKEN_ID: Final = Bound(0, 2**31 - 1)  # int32 in the segment; never negative, so -1 is free to mean "none"
SEED: Final = Bound(0, 2**63 - 1)  # int64 in the segment
PRIORITY_MIN: Final = -8
PRIORITY_MAX: Final = 7
PRIORITY: Final = Bound(PRIORITY_MIN, PRIORITY_MAX)
PRIORITY_DEFAULT: Final = 0
PRIORITY_CLASSES: Final = PRIORITY_MAX - PRIORITY_MIN + 1
PRIORITY_AGING_S: Final = Bound(0, 86_400)
QUEUE_TIMEOUT_S: Final = Bound(0, 86_400)
REQUEST_TIMEOUT_S_MAX: Final = 86_400
CHOICES_MAX: Final = 128  # of one request
CACHE_SALT_CHARS_MAX: Final = 256

# The KV pool
TOTAL_KV_BLOCKS: Final = Bound(1, 16_777_216)
KV_BLOCK_SIZE: Final = Bound(1, 256)  # tokens; a power of two, because positions are found by shift

# A step, and who may take part in it
MAX_BATCH_TOKENS: Final = Bound(1, 1_048_576)
MAX_RUNNING_SEQS: Final = Bound(1, 65_536)
MAX_SLOTS: Final = 1_048_576
AUDIT_EVERY: Final = Bound(0, 1_000_000_000)  # steps
SCHEDULER_TIMEOUT_S: Final = Bound(0, 86_400)
MAX_TOKENS_PER_STEP: Final = Bound(1, 1024)  # that a backend may emit for one sequence
MAX_QUEUED_REQUESTS: Final = Bound(0, MAX_SLOTS - MAX_RUNNING_SEQS.low)

# What a backend may declare of its device. Rows x context then stays far below int64.
DEVICE_COUNT: Final = Bound(1, 2**31 - 1)  # sequences or tokens of a plan
DEVICE_CONTEXT: Final = Bound(MIN_REQUEST_TOKENS, 2**53)  # rows of a plan x its longest context
EOS_TOKEN_ID: Final = Bound(-1, 2**31 - 1)  # -1: none
LONGEST_STEP_NS: Final = Bound(0, 2**62)  # it is added to times
DEVICE_BUCKETS_MAX: Final = 1024

# Processes and shared memory
DRAIN_TIMEOUT_S: Final = Bound(0, 86_400)
WORKERS: Final = Bound(1, 64)
MAX_SEGMENT_BYTES: Final = 64 * GIB
SLOT_OVERHEAD_BYTES: Final = 320  # a slot's record
TOKEN_BYTES: Final = 4
TEXT_BYTES: Final = 6  # a token's share of a text row; layout.TEXT_BYTES_PER_TOKEN
TEXT_SLACK_BYTES: Final = KIB  # of a text row beyond that: short ones need more

# The HTTP side
PORT: Final = Bound(0, 65_535)
MAX_HOST_CHARS: Final = 253  # RFC 1035's 255 octets, as text
MAX_BODY_BYTES: Final = Bound(KIB, GIB)
MAX_BODY_BYTES_DEFAULT: Final = MIB
"""Ten times what the default --max-model-len needs as token ids. While a body is read, its worker's streams wait: 12 ms
for one of this size."""
MAX_URL_CHARS: Final = 2048
MAX_PATH_BYTES: Final = 4095  # Linux's PATH_MAX without the NUL at its end
HTTP_TIMEOUT_S: Final = Bound(1, 86_400)
MAX_CONNECTIONS: Final = Bound(1, 1_000_000)  # of a web worker
MAX_HEAD_BYTES: Final = 64 * KIB  # request line and headers together
MIN_BODY_RATE: Final = 100  # bytes a second, on average, of a body that takes longer than the body time-out

# The real backend
MAX_MODEL_NAME_CHARS: Final = 200
BACKEND_SLOTS: Final = Bound(0, MAX_RUNNING_SEQS.high)
BACKEND_WAIT_S: Final = Bound(0, 86_400)
BACKEND_TIMEOUT_S: Final = Bound(1, 86_400)
BACKEND_RETRIES: Final = Bound(0, 100)

# The mock: its KV in host memory, its latency model
MAX_MOCK_KV_BYTES: Final = 8 * GIB
MOCK_TOKEN_LATENCY_US: Final = Bound(0, 60_000_000)
MOCK_TERM_LATENCY_NS: Final = Bound(0, 1_000_000_000)
MAX_MOCK_STEP_NS: Final = 3_600_000_000_000  # an hour: far above any use, far below int64


def is_power_of_two(value: int) -> bool:
    """Whether `value` is 1, 2, 4, 8, ..."""
    return value > 0 and value & (value - 1) == 0


def nearest_powers_of_two(value: int, bound: Bound) -> tuple[int, ...]:
    """The powers of two next below and above `value`, as far as they lie in `bound`: a message's remedy."""
    below = 1 << (value.bit_length() - 1)
    return tuple(power for power in (below, 2 * below) if power in bound)


def num_slots(max_running_seqs: int, max_queued_requests: int) -> int:
    """Slots in the segment: a request holds one from its claim to its last token sent."""
    return max_running_seqs + max_queued_requests


def num_lanes(workers: int) -> int:
    """Lanes in the segment.

    Twice the workers, because HUP runs the old set and the new for a while, and two more: for workers that are
    dead but not yet reaped, since a lane is only given out again after the scheduler has reaped it, or for TTIN.
    """
    return 2 * workers + 2


def running_limit(max_running_seqs: int, max_batch_tokens: int) -> int:
    """The most sequences that can run: each takes at least one token of every step."""
    return min(max_running_seqs, max_batch_tokens)


def max_request_tokens(max_model_len: int, kv_capacity_tokens: int) -> int:
    """The most tokens, prompt and output together, that one request can ever have."""
    return min(max_model_len, kv_capacity_tokens)


def choice_blocks(prompt_tokens: int, max_new_tokens: int, kv_block_size: int) -> tuple[int, int]:
    """KV blocks that a request must find to be admitted: for its first choice, and for each further one.

    The first has all of the prompt and of the first token that follows; the others share of these the full blocks
    before the prompt's last token (docs/scheduling.md, Forks).
    """
    first = -(-(prompt_tokens + min(1, max_new_tokens)) // kv_block_size)
    return first, first - (prompt_tokens - 1) // kv_block_size


def approximate_segment_bytes(slots: int, max_model_len: int, *, has_text: bool = False) -> int:
    """The segment's size but for header, lanes and metrics; `layout.segment_bytes` knows the exact one."""
    token_bytes = TOKEN_BYTES + (TEXT_BYTES if has_text else 0)
    return slots * (max_model_len * token_bytes + SLOT_OVERHEAD_BYTES)


def mock_longest_step_ns(  # noqa: PLR0913 - the terms of one sum
    mock_token_latency_us: int,
    mock_prefill_token_latency_ns: int,
    mock_sequence_latency_ns: int,
    mock_kv_token_latency_ns: int,
    max_batch_tokens: int,
    max_running_seqs: int,
    max_model_len: int,
    total_kv_blocks: int,
    kv_block_size: int,
) -> int:
    """The mock's longest step, in nanoseconds: a full batch, all prefill, every context at its longest."""
    sequences = running_limit(max_running_seqs, max_batch_tokens)
    # Sequences that share blocks each read them, so the reads may exceed the pool.
    kv_tokens = sequences * max_request_tokens(max_model_len, total_kv_blocks * kv_block_size)
    return (
        mock_token_latency_us * 1000
        + mock_prefill_token_latency_ns * max_batch_tokens
        + mock_sequence_latency_ns * sequences
        + mock_kv_token_latency_ns * kv_tokens
    )


def mock_kv_bytes(total_kv_blocks: int, kv_block_size: int) -> int:
    """Host memory of the mock's KV: a token id for each position, and a flag for each block."""
    return total_kv_blocks * (kv_block_size + 1) * TOKEN_BYTES


# A relation that does not hold is a sentence for the operator; one that does is None.


def slots_problem(max_running_seqs: int, max_queued_requests: int) -> str | None:
    """Whether running + queued stays within MAX_SLOTS."""
    slots = num_slots(max_running_seqs, max_queued_requests)
    if slots <= MAX_SLOTS:
        return None
    return (
        f"{max_running_seqs} + {max_queued_requests} = {slots} slots are over the limit of {MAX_SLOTS};"
        f" lower them by {slots - MAX_SLOTS} together"
    )


def segment_problem(
    max_running_seqs: int, max_queued_requests: int, max_model_len: int, *, has_text: bool = False
) -> str | None:
    """Whether the segment stays within MAX_SEGMENT_BYTES."""
    slots = num_slots(max_running_seqs, max_queued_requests)
    segment_bytes = approximate_segment_bytes(slots, max_model_len, has_text=has_text)
    if segment_bytes <= MAX_SEGMENT_BYTES:
        return None
    return (
        f"{slots} slots ({max_running_seqs} + {max_queued_requests}) of {max_model_len} tokens need"
        f" {segment_bytes / GIB:.1f} GiB of shared memory, over the limit of {MAX_SEGMENT_BYTES // GIB} GiB;"
        " lower one of them"
    )


def request_problem(max_model_len: int, total_kv_blocks: int, kv_block_size: int) -> str | None:
    """Whether any request can be served: a prompt token and an output token."""
    longest = max_request_tokens(max_model_len, total_kv_blocks * kv_block_size)
    if longest >= MIN_REQUEST_TOKENS:
        return None
    return (
        f"a request could have {longest} token, prompt and output together, and needs {MIN_REQUEST_TOKENS};"
        " use a longer model length or a larger pool"
    )


def mock_step_problem(*mock_step_fields: int) -> str | None:
    """Whether `mock_longest_step_ns` of the same fields stays within MAX_MOCK_STEP_NS."""
    step_ns = mock_longest_step_ns(*mock_step_fields)
    if step_ns <= MAX_MOCK_STEP_NS:
        return None
    return (
        f"a full step of the mock could take {-(-step_ns // 10**9)} s, over the limit of"
        f" {MAX_MOCK_STEP_NS // 10**9} s; lower the latencies or the batch"
    )


def mock_kv_problem(mock_kv: bool, total_kv_blocks: int, kv_block_size: int) -> str | None:  # noqa: FBT001
    """Whether the mock's KV, if it keeps one, stays within MAX_MOCK_KV_BYTES."""
    needed_bytes = mock_kv_bytes(total_kv_blocks, kv_block_size)
    if not mock_kv or needed_bytes <= MAX_MOCK_KV_BYTES:
        return None
    return (
        f"{total_kv_blocks} blocks of {kv_block_size} tokens need {needed_bytes / GIB:.1f} GiB of host memory for the"
        f" mock's KV, over the limit of {MAX_MOCK_KV_BYTES // GIB} GiB; use fewer or smaller blocks, or leave"
        " --mock-kv out"
    )
