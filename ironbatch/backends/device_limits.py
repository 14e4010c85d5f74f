"""What a device can take, as the engine's limits; and whether it fits the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ironbatch.backends.limits import BatchLimits, longest_context
from ironbatch.config import Config
from ironbatch.driver.abi import LIMITS_NO_MIX
from ironbatch.driver.handle import DeviceHandle
from ironbatch.driver.ring import ALIGN_BYTES
from ironbatch.driver.spec import LONGEST_STEP_US, PAGE_BYTES, POSITION_BYTES, RING_BYTES, DeviceSpec
from ironbatch.errors import StartError
from ironbatch.kernels.device_records import blocks_bytes, step_bytes, tokens_bytes
from ironbatch.limits import KV_BLOCK_SIZE, is_power_of_two

RESULT_BYTES: Final = tokens_bytes(1)
"""Of a batch's results, for each row."""

HOST_TOKEN_NS = 10
"""The longest that the software device may take to read one position."""

HOST_GRACE_US = 500_000
"""By so much its process may be held up."""

NS_PER_US = 1_000


def software_spec(config: Config) -> DeviceSpec:
    """A software device that takes nothing off the configuration."""
    blocks = -(-config.max_request_tokens // config.kv_block_size)
    ring_bytes = _whole_pages(most_bytes(config.running_limit, config.max_batch_tokens, blocks))
    reads_us = config.running_limit * config.max_request_tokens * HOST_TOKEN_NS // NS_PER_US
    return DeviceSpec(
        blocks=config.total_kv_blocks,
        block_bytes=POSITION_BYTES * config.kv_block_size,
        ring_bytes=min(ring_bytes, RING_BYTES.high),
        contexts=1,
        step_latency_us=config.mock_token_latency_us,
        longest_step_us=min(config.mock_token_latency_us + reads_us + HOST_GRACE_US, LONGEST_STEP_US.high),
    )


def check_device(config: Config, device: DeviceHandle) -> None:
    """Whether the engine's KV pool can lie on the device.

    Raises:
        StartError: one line with both values and a remedy on either side.
    """
    info, name = device.info, device.name
    if info.block_tokens != config.kv_block_size:
        token_bytes = info.block_bytes // max(info.block_tokens, 1)
        is_allowed = info.block_tokens in KV_BLOCK_SIZE and is_power_of_two(info.block_tokens)
        raise StartError(
            f"--kv-block-size is {config.kv_block_size}, and a block of {name} holds {info.block_tokens} tokens;"
            + (f" use --kv-block-size {info.block_tokens}, or" if is_allowed else "")
            + f" start the device with --block-bytes {config.kv_block_size * token_bytes}"
        )
    if info.num_blocks < config.total_kv_blocks:
        raise StartError(
            f"--total-kv-blocks is {config.total_kv_blocks}, and {name} has {info.num_blocks} blocks; use"
            f" --total-kv-blocks {info.num_blocks}, or start the device with --blocks {config.total_kv_blocks}"
        )


def declared_limits(config: Config, device: DeviceHandle) -> BatchLimits:
    """What GET_LIMITS says, and what the ring holds.

    Raises:
        StartError: the ring does not even hold a step of one sequence.
    """
    told = device.limits
    own = BatchLimits(
        max_sequences=told.max_seqs or None,
        max_tokens=told.max_tokens or None,
        mixes_prefill_and_decode=not told.flags & LIMITS_NO_MIX,
        max_prefill_sequences=told.max_prefill_seqs or None,
        sequence_buckets=_buckets(told.seq_buckets),
        token_buckets=_buckets(told.token_buckets),
        max_batch_context=told.max_batch_context or None,
    )
    longest = min(config.max_request_tokens, longest_context(own) or config.max_request_tokens)
    blocks = -(-longest // config.kv_block_size)
    rows, tokens = ring_limits(config, device, blocks)
    return replace(
        own, max_sequences=min(rows, own.max_sequences or rows), max_tokens=min(tokens, own.max_tokens or tokens)
    )


def most_bytes(rows: int, tokens: int, blocks: int) -> int:
    """The most that a plan takes of the ring, records and results: every context has `blocks`, every row a copy."""
    records = blocks_bytes(2 * rows) + rows * (step_bytes(blocks, 0) + 4) + 4 * tokens
    return records + ALIGN_BYTES + rows * RESULT_BYTES


def ring_limits(config: Config, device: DeviceHandle, blocks: int) -> tuple[int, int]:
    """Rows and new tokens of a plan, so that the ring holds every such plan.

    Where it does not hold what is configured, up to a quarter of it is for new tokens and the rest for block tables; if
    that is none, one row has what it needs, and new tokens the rest.
    """
    rows, tokens, ring_bytes = config.running_limit, config.max_batch_tokens, device.info.ring_bytes
    if most_bytes(rows, tokens, blocks) <= ring_bytes:
        return rows, tokens
    needed = most_bytes(1, 1, blocks)
    if needed > ring_bytes:
        raise StartError(
            f"{device.name} has a ring of {ring_bytes} bytes, and one sequence of {blocks * config.kv_block_size}"
            f" tokens needs {needed}; start the device with --ring-bytes {_whole_pages(needed)} or"
            " more, or lower --max-model-len"
        )
    tokens = min(tokens, max(ring_bytes // 16, 1))
    row_bytes = most_bytes(2, 0, blocks) - most_bytes(1, 0, blocks)
    rows = min(rows, max((ring_bytes - most_bytes(0, tokens, blocks)) // row_bytes, 1), tokens)
    return rows, min(tokens, (ring_bytes - most_bytes(rows, 0, blocks)) // 4)


def _buckets(told: Any) -> tuple[int, ...]:
    """Those before the first 0."""
    return tuple(told[: told.index(0)] if 0 in told else told)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
