"""The mock's tokens and its latency model."""

from __future__ import annotations

import numpy as np

from ironbatch.kernels.jit import inline, kernel
from ironbatch.kernels.records import ROW_CONTEXT, ROW_EMITS, ROW_NEW, ROW_SEQUENCE, ROW_WORDS
from ironbatch.kernels.state import EOS_TOKEN_ID, ROW_COUNT, open_state

VOCABULARY = 32_000
EOS_SCALE = 1 << 30

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@inline
def mix(seed, position):
    """64 well-mixed bits of (seed, position): splitmix64 (Steele, Lea, Flood, OOPSLA 2014) at that point."""
    x = np.uint64(seed) + np.uint64(position + 1) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@inline
def token_of(bits, eos_token_id, eos_threshold):
    """The token that 64 well-mixed bits stand for."""
    if np.int64(bits >> np.uint64(34)) < eos_threshold:
        return eos_token_id
    return np.int64(bits % np.uint64(VOCABULARY - 1)) + 1


@inline
def token_at(seed, position, eos_token_id, eos_threshold):
    """The token that a sequence with `seed` has at `position`; the end of sequence for eos_threshold in 2**30."""
    return token_of(mix(seed, position), eos_token_id, eos_threshold)


@kernel("int64(int64, int64, int64, int64)")
def mock_token(seed, position, eos_token_id, eos_threshold):
    """`token_at`, for Python: what the mock emits can be computed from the request alone."""
    return token_at(seed, position, eos_token_id, eos_threshold)


@inline
def prefill_tokens_of(new_tokens):
    """What a row's new tokens count for in the latency model: a chunk of one costs what a decode does."""
    return new_tokens if new_tokens > 1 else 0


@inline
def step_ns(rows, prefill_tokens, kv_tokens, base_ns, prefill_token_ns, sequence_ns, kv_token_ns):
    """The latency model: base, and a term for each prefill token, each row and each context token read."""
    return base_ns + prefill_token_ns * prefill_tokens + sequence_ns * rows + kv_token_ns * kv_tokens


@kernel("int64(intp, int64, int64, int64, int64, int64)")
def mock_execute(state_address, eos_threshold, base_ns, prefill_token_ns, sequence_ns, kv_token_ns):
    """Emit one token for each row that reaches its end. Returns how long the step takes by the latency model, in ns."""
    state = open_state(state_address)
    eos = state.header[EOS_TOKEN_ID]
    rows = state.header[ROW_COUNT]
    emitted = 0
    prefill_tokens = 0
    kv_tokens = 0
    for k in range(rows):
        row = k * ROW_WORDS
        context = state.rows[row + ROW_CONTEXT]
        prefill_tokens += prefill_tokens_of(state.rows[row + ROW_NEW])
        kv_tokens += context
        if state.rows[row + ROW_EMITS] != 0:
            seed = state.seeds[state.rows[row + ROW_SEQUENCE]]
            state.output_tokens[emitted] = token_at(seed, context, eos, eos_threshold)
            emitted += 1
    return step_ns(rows, prefill_tokens, kv_tokens, base_ns, prefill_token_ns, sequence_ns, kv_token_ns)
