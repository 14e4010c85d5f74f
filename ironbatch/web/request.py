"""A request: the fields of a body, parsed once into a valid type; nothing below checks it again."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ironbatch import layout, limits
from ironbatch.web.json_body import TEMPERATURE_MAX, WANTED, RequestBody, check, invalid
from ironbatch.web.prompts import Prompt

NO_SALT = (0, 0)


class RequestLimits(NamedTuple):
    """What one request may ask of this engine: of its configuration, and of its device once that is open."""

    max_request_tokens: int  # prompt and output together
    most_choices: int  # sequences that can be in the engine at once
    total_kv_blocks: int
    kv_block_size: int


class GenerateRequest(NamedTuple):
    """A valid request: everything in it is within the engine's limits."""

    prompt_tokens: int
    token_ids: NDArray[np.int32] | None  # int32[prompt_tokens]; None when only their number is known
    max_new_tokens: int
    priority: int
    flags: int
    seed: int
    details: bool
    temperature: float
    top_p: float
    top_k: int
    choices: int
    salt: tuple[int, int]  # two int64; NO_SALT without one
    timeout_s: float | None = None  # from the request's arrival to its last token
    text: bytes | None = None  # the prompt's, UTF-8; None if it was not given as text


def parse_request(fields: RequestBody, prompt: Prompt, engine: RequestLimits, default_seed: int) -> GenerateRequest:
    """Check what a body asks for.

    Args:
        fields: of the body.
        prompt: what its prompt has become.
        engine: what can ever fit.
        default_seed: for a request that names none.

    Raises:
        RequestRejected: status 400; the message names the field, the value, the limit and the remedy.
    """
    check("max_new_tokens", fields.max_new_tokens, 0, engine.max_request_tokens)
    check("priority", fields.priority, limits.PRIORITY_MIN, limits.PRIORITY_MAX)
    seed = default_seed if fields.seed is None else fields.seed
    check("seed", seed, limits.SEED.low, limits.SEED.high)
    _check_sampling(fields)
    if fields.timeout_s is not None and not 0 < fields.timeout_s <= limits.REQUEST_TIMEOUT_S_MAX:
        raise invalid("timeout_s", f"timeout_s is {fields.timeout_s:g}; give {WANTED['timeout_s']}")
    _check_length(fields.max_new_tokens, prompt, engine.max_request_tokens)
    if fields.n != 1:
        _check_choices(fields, prompt, engine)
    return GenerateRequest(
        prompt_tokens=prompt.tokens,
        token_ids=prompt.token_ids,
        max_new_tokens=fields.max_new_tokens,
        priority=fields.priority,
        flags=prompt.flags | (layout.FLAG_IGNORE_EOS if fields.ignore_eos else 0),
        seed=seed,
        details=fields.details,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        choices=fields.n,
        salt=NO_SALT if fields.cache_salt is None else _salt(fields.cache_salt),
        timeout_s=fields.timeout_s,
        text=prompt.text,
    )


def _check_length(max_new_tokens: int, prompt: Prompt, max_request_tokens: int) -> None:
    total = prompt.tokens + max_new_tokens
    if total <= max_request_tokens:
        return
    sum_said = f"the prompt's {prompt.tokens} tokens and max_new_tokens {max_new_tokens} are {total}"
    if prompt.is_estimate:
        sum_said = f"prompt has {prompt.length}; with max_new_tokens {max_new_tokens} they are {total}"
    raise invalid(
        "max_new_tokens",
        f"{sum_said}, over this engine's limit of {max_request_tokens} a request; shorten one of them by"
        f" {total - max_request_tokens}",
    )


def _check_sampling(fields: RequestBody) -> None:
    check("top_k", fields.top_k, 0, limits.TOKEN_ID.high)
    if not 0 <= fields.temperature <= TEMPERATURE_MAX:
        raise invalid("temperature", f"temperature is {fields.temperature:g}; give {WANTED['temperature']}")
    if not 0 < fields.top_p <= 1:
        raise invalid("top_p", f"top_p is {fields.top_p:g}; give {WANTED['top_p']}")


def _check_choices(fields: RequestBody, prompt: Prompt, engine: RequestLimits) -> None:
    """Refuse so many choices that they could not be admitted together by an engine that is empty."""
    check("n", fields.n, 1, limits.CHOICES_MAX)
    if fields.n > engine.most_choices:
        raise invalid(
            "n",
            f"n is {fields.n}, over the {engine.most_choices} sequences that this engine can have at once"
            f" (--max-running-seqs, or what its backend allows); use {engine.most_choices} or less",
        )
    first, further = limits.choice_blocks(prompt.tokens, fields.max_new_tokens, engine.kv_block_size)
    blocks = first + (fields.n - 1) * further
    if blocks > engine.total_kv_blocks:
        fitting = 1 + (engine.total_kv_blocks - first) // further
        choices_said = f"n is {fields.n}, and so many choices of {prompt.tokens} prompt tokens"
        if prompt.is_estimate:
            choices_said = f"prompt has {prompt.length}; n is {fields.n}, and so many choices"
        raise invalid(
            "n",
            f"{choices_said} need {blocks} KV blocks, over this engine's {engine.total_kv_blocks} (--total-kv-blocks);"
            f" use {fitting} or less",
        )


def _salt(cache_salt: str) -> tuple[int, int]:
    """A digest of 16 bytes: as good as the text itself, and of one size."""
    if not 1 <= len(cache_salt) <= limits.CACHE_SALT_CHARS_MAX:
        raise invalid("cache_salt", f"cache_salt has {len(cache_salt)} characters; give {WANTED['cache_salt']}")
    first, second = struct.unpack("<qq", hashlib.blake2b(cache_salt.encode(), digest_size=16).digest())
    return first, second
