"""The JSON of a request's body: its fields, each of the right type, and the words for what is none.

What the values may be is the affair of `web/prompts.py` and `web/request.py`.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ironbatch import limits
from ironbatch.errors import RequestRejected

INVALID_REQUEST = "invalid_request"
MAX_NEW_TOKENS_DEFAULT = 16
TEMPERATURE_MAX = 100.0

WANTED = {
    "prompt": "a string, the text to go on with",
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


class RequestBody(msgspec.Struct):
    """The fields of a body as they come; msgspec is strict: a boolean, a fraction or a string is not an integer."""

    prompt: str | UnsetType = UNSET
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


_decoder = msgspec.json.Decoder(RequestBody)


def decode_body(body: bytes) -> RequestBody:
    """The fields of a body.

    Raises:
        RequestRejected: status 400; it is no JSON object, or a field has a value of the wrong type.
    """
    if not body:
        raise invalid(None, f"the body is empty; send JSON such as {_EXAMPLE}")
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as problem:
        message, _, path = str(problem).partition(" - at `$")
        place = path.strip("`.")
        field = place.partition("[")[0].partition(".")[0] or None
        if field is None:
            raise invalid(None, f"the body {_found(message)}; send a JSON object of a request's fields") from None
        raise invalid(field, f"{place} {_found(message)}; give {WANTED.get(field, 'another value')}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise _unreadable(body, str(problem)) from None
    except RecursionError:
        raise invalid(None, "the body is not valid JSON for a request: it is nested too deeply") from None


def _unreadable(body: bytes, problem: str) -> RequestRejected:
    """Why a body is no JSON, where msgspec's words for it would not help."""
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in body[:4]:
        return invalid(None, "the body is in another encoding, such as UTF-16; send JSON in UTF-8")
    if body.startswith(codecs.BOM_UTF8):
        return invalid(None, "the body begins with a byte order mark; send the JSON without it")
    try:
        text = body.decode()
    except UnicodeDecodeError as fault:
        return invalid(None, f"the body is not UTF-8 at byte {fault.start} (0x{body[fault.start]:02x}); encode it so")
    return _surrogate_problem(text) or invalid(None, f"the body is not valid JSON: {problem}; send such as {_EXAMPLE}")


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
        if name in WANTED and isinstance(fields[name], str) and (half := _SURROGATE.search(fields[name])):
            said = f"{name} holds \\u{ord(half[0]):04x}, half of a surrogate pair, which is no character"
            return invalid(name, f"{said}; give {WANTED[name]}")
    return invalid(
        None, "the body holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; remove it"
    )


def _found(message: str) -> str:
    """What msgspec has found, in JSON's words: its own are Python's."""
    match = re.search(r"got `(\w+)`", message)
    if match is None:
        return "is a number out of range" if message.endswith("out of range") else f"is wrong ({message})"
    return f"is {_JSON_WORDS.get(match[1], match[1])}"


def check(field: str, value: int, low: int, high: int) -> None:
    """Raises RequestRejected for a value outside its bound, both ends of which belong to it."""
    if not low <= value <= high:
        remedy = f"{low} or more" if value < low else f"{high} or less"
        raise invalid(field, f"{field} is {shown(value)}, not between {low} and {high}; use {remedy}")


def shown(value: int) -> str:
    """A huge number is cut: its text would be the client's to size, and int refuses over 4,300 digits."""
    if value.bit_length() > 64:  # wider than any field can mean
        return f"a number of {value.bit_length()} bits"
    return str(value)


def invalid(param: str | None, message: str) -> RequestRejected:
    """The answer 400; `param` is the field at fault."""
    return RequestRejected(INVALID_REQUEST, message, param=param)


def error_body(error_type: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The one shape of every error that a client reads."""
    return {"error": {"type": error_type, "message": message, "param": param}}
