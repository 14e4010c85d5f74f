"""A request body, parsed once into a valid type; nothing below checks it again."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from ironbatch import layout, limits
from ironbatch.errors import RequestRejected

INVALID_REQUEST = "invalid_request"
MAX_NEW_TOKENS_DEFAULT = 16
TEMPERATURE_MAX = 100.0

_WANTED = {
    "prompt_tokens": "a whole number, the length of the prompt in tokens",
    "prompt_token_ids": f"a list of token ids, whole numbers {limits.TOKEN_ID}",
    "max_new_tokens": "a whole number, the tokens to generate",
    "priority": f"a whole number {limits.PRIORITY}; lower is sooner",
    "ignore_eos": "true or false",
    "seed": f"a whole number {limits.SEED}",
    "details": "true or false",
    "temperature": f"a number between 0 and {TEMPERATURE_MAX:g}",
    "top_p": "a number above 0 and at most 1",
    "top_k": "a whole number between 0 (off) and 2147483647",
    "n": f"a whole number between 1 and {limits.CHOICES_MAX}, the choices to generate",
    "timeout_s": f"a number of seconds above 0 and at most {limits.REQUEST_TIMEOUT_S_MAX}, or leave it out",
    "cache_salt": f"a string of 1 to {limits.CACHE_SALT_CHARS_MAX} characters, or leave it out",
}

_EXAMPLE = '{"prompt_tokens": 128, "max_new_tokens": 64}'

NO_SALT = (0, 0)

_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
MOST_READ_AGAIN = 4096  # characters
_CONSTANT = re.compile("NaN|Infinity")  # which Python's reader takes for numbers

_JSON_WORDS = {
    "int": "a whole number",
    "float": "a number with a fraction",
    "bool": "true or false",
    "str": "a string",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


class _Body(msgspec.Struct):
    """The fields of a body as they come; msgspec is strict: a boolean, a fraction or a string is not an integer."""

    prompt_tokens: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    max_new_tokens: int = MAX_NEW_TOKENS_DEFAULT
    priority: int = limits.PRIORITY_DEFAULT
    ignore_eos: bool = False
    seed: int | None = None
    details: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    cache_salt: str | None = None
    timeout_s: float | None = None


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


_decoder = msgspec.json.Decoder(_Body)


def parse_request(body: bytes, engine: RequestLimits, default_seed: int) -> GenerateRequest:
    """Read a JSON body.

    Args:
        body: the whole body.
        engine: what can ever fit.
        default_seed: for a request that names none.

    Raises:
        RequestRejected: status 400; the message names the field, the value, the limit and the remedy.
    """
    fields = _decode(body)
    _check_one_prompt(fields)
    max_request_tokens = engine.max_request_tokens
    prompt_tokens = _prompt_tokens(fields, max_request_tokens)  # before the ids, whose number is the client's to choose
    token_ids = _token_ids(fields)
    _check("max_new_tokens", fields.max_new_tokens, 0, max_request_tokens)
    _check("priority", fields.priority, limits.PRIORITY_MIN, limits.PRIORITY_MAX)
    seed = default_seed if fields.seed is None else fields.seed
    _check("seed", seed, limits.SEED.low, limits.SEED.high)
    _check_sampling(fields)
    if fields.timeout_s is not None and not 0 < fields.timeout_s <= limits.REQUEST_TIMEOUT_S_MAX:
        raise _invalid("timeout_s", f"timeout_s is {fields.timeout_s:g}; give {_WANTED['timeout_s']}")
    total = prompt_tokens + fields.max_new_tokens
    if total > max_request_tokens:
        raise _invalid(
            "max_new_tokens",
            f"the prompt's {prompt_tokens} tokens and max_new_tokens {fields.max_new_tokens} are {total}, over this"
            f" engine's limit of {max_request_tokens} a request; shorten one of them by {total - max_request_tokens}",
        )
    if fields.n != 1:
        _check_choices(fields, prompt_tokens, engine)
    flags = (layout.FLAG_TOKEN_IDS if token_ids is not None else 0) | (
        layout.FLAG_IGNORE_EOS if fields.ignore_eos else 0
    )
    return GenerateRequest(
        prompt_tokens=prompt_tokens,
        token_ids=token_ids,
        max_new_tokens=fields.max_new_tokens,
        priority=fields.priority,
        flags=flags,
        seed=seed,
        details=fields.details,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        choices=fields.n,
        salt=NO_SALT if fields.cache_salt is None else _salt(fields.cache_salt),
        timeout_s=fields.timeout_s,
    )


def _decode(body: bytes) -> _Body:
    if not body:
        raise _invalid(None, f"the body is empty; send JSON such as {_EXAMPLE}")
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as problem:
        message, _, path = str(problem).partition(" - at `$")
        place = path.strip("`.")
        field = place.partition("[")[0].partition(".")[0] or None
        if field is None:
            raise _invalid(None, f"the body {_found(message)}; send a JSON object of a request's fields") from None
        raise _invalid(field, f"{place} {_found(message)}; give {_WANTED.get(field, 'another value')}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise _unreadable(body, str(problem)) from None
    except RecursionError:
        raise _invalid(None, "the body is not valid JSON for a request: it is nested too deeply") from None


def _unreadable(body: bytes, problem: str) -> RequestRejected:
    """Why a body is no JSON, where msgspec's words for it would not help."""
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in body[:4]:
        return _invalid(None, "the body is in another encoding, such as UTF-16; send JSON in UTF-8")
    if body.startswith(codecs.BOM_UTF8):
        return _invalid(None, "the body begins with a byte order mark; send the JSON without it")
    try:
        text = body.decode()
    except UnicodeDecodeError as fault:
        return _invalid(None, f"the body is not UTF-8 at byte {fault.start} (0x{body[fault.start]:02x}); encode it so")
    return _surrogate_problem(text) or _invalid(None, f"the body is not valid JSON: {problem}; send such as {_EXAMPLE}")


def _surrogate_problem(text: str) -> RequestRejected | None:
    """Half of a surrogate pair, which Python's reader takes, and msgspec calls malformed or truncated.

    A long text is not read a second time, only to find better words: all streams of this worker wait meanwhile.
    """
    if len(text) > MOST_READ_AGAIN or not _SURROGATE_ESCAPE.search(text) or _CONSTANT.search(text):
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for name in fields if isinstance(fields, dict) else ():
        if name in _WANTED and isinstance(fields[name], str) and (half := _SURROGATE.search(fields[name])):
            said = f"{name} holds \\u{ord(half[0]):04x}, half of a surrogate pair, which is no character"
            return _invalid(name, f"{said}; give {_WANTED[name]}")
    return _invalid(
        None, "the body holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; remove it"
    )


def _found(message: str) -> str:
    """What msgspec has found, in JSON's words: its own are Python's."""
    match = re.search(r"got `(\w+)`", message)
    if match is None:
        return "is a number out of range" if message.endswith("out of range") else f"is wrong ({message})"
    return f"is {_JSON_WORDS.get(match[1], match[1])}"


def _prompt_tokens(fields: _Body, max_request_tokens: int) -> int:
    if isinstance(fields.prompt_token_ids, list):
        count = len(fields.prompt_token_ids)
        if count == 0:
            raise _invalid("prompt_token_ids", "prompt_token_ids is empty; a prompt has at least 1 token")
        if count > max_request_tokens:
            raise _invalid(
                "prompt_token_ids",
                f"prompt_token_ids has {count} tokens, over this engine's limit of {max_request_tokens} a request",
            )
        return count
    assert isinstance(fields.prompt_tokens, int), "one of the two is there"
    _check("prompt_tokens", fields.prompt_tokens, 1, max_request_tokens)
    return fields.prompt_tokens


def _check_one_prompt(fields: _Body) -> None:
    has_ids, has_count = isinstance(fields.prompt_token_ids, list), isinstance(fields.prompt_tokens, int)
    if has_ids and has_count:
        raise _invalid("prompt_token_ids", "prompt_tokens and prompt_token_ids are both given; give one of them")
    if not (has_ids or has_count):
        raise _invalid("prompt_tokens", "the prompt is missing; give prompt_tokens (a count) or prompt_token_ids")


def _token_ids(fields: _Body) -> NDArray[np.int32] | None:
    ids = fields.prompt_token_ids
    if not isinstance(ids, list):
        return None
    if min(ids) < limits.TOKEN_ID.low or max(ids) > limits.TOKEN_ID.high:
        index = next(i for i, token in enumerate(ids) if token not in limits.TOKEN_ID)
        raise _invalid(
            "prompt_token_ids",
            f"prompt_token_ids[{index}] is {_shown(ids[index])}; a token id is {limits.TOKEN_ID}",
        )
    return np.array(ids, np.int32)


def _check_sampling(fields: _Body) -> None:
    _check("top_k", fields.top_k, 0, limits.TOKEN_ID.high)
    if not 0 <= fields.temperature <= TEMPERATURE_MAX:
        raise _invalid("temperature", f"temperature is {fields.temperature:g}; give {_WANTED['temperature']}")
    if not 0 < fields.top_p <= 1:
        raise _invalid("top_p", f"top_p is {fields.top_p:g}; give {_WANTED['top_p']}")


def _check_choices(fields: _Body, prompt_tokens: int, engine: RequestLimits) -> None:
    """Refuse so many choices that they could not be admitted together by an engine that is empty."""
    _check("n", fields.n, 1, limits.CHOICES_MAX)
    if fields.n > engine.most_choices:
        raise _invalid(
            "n",
            f"n is {fields.n}, over the {engine.most_choices} sequences that this engine can have at once"
            f" (--max-running-seqs, or what its device allows); use {engine.most_choices} or less",
        )
    first, further = limits.choice_blocks(prompt_tokens, fields.max_new_tokens, engine.kv_block_size)
    blocks = first + (fields.n - 1) * further
    if blocks > engine.total_kv_blocks:
        fitting = 1 + (engine.total_kv_blocks - first) // further
        raise _invalid(
            "n",
            f"n is {fields.n}, and so many choices of {prompt_tokens} prompt tokens need {blocks} KV blocks, over this"
            f" engine's {engine.total_kv_blocks} (--total-kv-blocks); use {fitting} or less",
        )


def _salt(cache_salt: str) -> tuple[int, int]:
    """A digest of 16 bytes: as good as the text itself, and of one size."""
    if not 1 <= len(cache_salt) <= limits.CACHE_SALT_CHARS_MAX:
        raise _invalid("cache_salt", f"cache_salt has {len(cache_salt)} characters; give {_WANTED['cache_salt']}")
    first, second = struct.unpack("<qq", hashlib.blake2b(cache_salt.encode(), digest_size=16).digest())
    return first, second


def _check(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        remedy = f"{low} or more" if value < low else f"{high} or less"
        raise _invalid(field, f"{field} is {_shown(value)}, not between {low} and {high}; use {remedy}")


def _shown(value: int) -> str:
    """A huge number is cut: its text would be the client's to size, and int refuses over 4,300 digits."""
    if value.bit_length() > 64:  # wider than any field can mean
        return f"a number of {value.bit_length()} bits"
    return str(value)


def _invalid(param: str | None, message: str) -> RequestRejected:
    return RequestRejected(INVALID_REQUEST, message, param=param)


def error_body(error_type: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The one shape of every error that a client reads."""
    return {"error": {"type": error_type, "message": message, "param": param}}
