"""A request's body: valid, or rejected with the field and the limit; never anything else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ironbatch import layout, limits
from ironbatch.errors import RequestRejected
from ironbatch.text.byte_level import ByteTokenizer
from ironbatch.web.json_body import MAX_NEW_TOKENS_DEFAULT, decode_body
from ironbatch.web.prompts import PromptReader
from ironbatch.web.request import NO_SALT, GenerateRequest, RequestLimits, parse_request

LIMIT = 64
MOST_CHOICES = 20
BLOCKS, BLOCK_SIZE = 24, 4
ENGINE = RequestLimits(LIMIT, MOST_CHOICES, BLOCKS, BLOCK_SIZE)
DEFAULT_SEED = 1234
FIELDS = (
    "prompt",
    "prompt_tokens",
    "prompt_token_ids",
    "max_new_tokens",
    "priority",
    "ignore_eos",
    "seed",
    "details",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "cache_salt",
)
TOP_ID = limits.TOKEN_ID.high


def parse(body: bytes | str | dict[str, Any]) -> GenerateRequest:
    if isinstance(body, dict):
        body = json.dumps(body)
    if isinstance(body, str):
        body = body.encode()
    return parsed(body, ENGINE)


def parsed(body: bytes, engine: RequestLimits) -> GenerateRequest:
    fields = decode_body(body)
    reading = PromptReader(ByteTokenizer(is_readable=True), 0).read(fields, engine.max_request_tokens)
    with pytest.raises(StopIteration) as returned:
        reading.send(None)  # none of these is so long that it would wait
    return parse_request(fields, returned.value.value, engine, DEFAULT_SEED)


def rejected(body: bytes | str | dict[str, Any]) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        parse(body)
    return checked(caught.value)


def checked(problem: RequestRejected) -> RequestRejected:
    """What holds for every rejection."""
    assert problem.status == 400
    assert problem.type == "invalid_request"
    assert problem.param is None or problem.param in FIELDS
    assert problem.retry_after_s is None
    assert 10 < len(problem.message) < 300, "a client must not size our answer"
    assert problem.message.encode().isascii()
    assert "\n" not in problem.message
    if problem.param is not None:
        assert problem.param in problem.message or "prompt" in problem.message
    return problem


# ------------------------------------------------------------------------------------------------ what is accepted


def test_the_smallest_request_has_the_documented_defaults() -> None:
    assert parse('{"prompt_tokens": 1}') == GenerateRequest(
        prompt_tokens=1,
        token_ids=None,
        max_new_tokens=MAX_NEW_TOKENS_DEFAULT,
        priority=limits.PRIORITY_DEFAULT,
        flags=0,
        seed=DEFAULT_SEED,
        details=False,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        choices=1,
        salt=NO_SALT,
    )


def test_token_ids_are_the_prompt() -> None:
    found = parse({"prompt_token_ids": [0, 7, TOP_ID], "max_new_tokens": 3, "ignore_eos": True})
    assert found.prompt_tokens == 3
    assert found.token_ids is not None
    assert found.token_ids.dtype == np.int32
    assert found.token_ids.tolist() == [0, 7, TOP_ID]
    assert found.flags == layout.FLAG_TOKEN_IDS | layout.FLAG_IGNORE_EOS


def test_zero_new_tokens_is_a_request_too() -> None:
    assert parse({"prompt_tokens": LIMIT, "max_new_tokens": 0}).max_new_tokens == 0


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"prompt_tokens": 1, "max_new_tokens": LIMIT - 1}, "max_new_tokens", LIMIT - 1),
        ({"prompt_tokens": LIMIT, "max_new_tokens": 0}, "prompt_tokens", LIMIT),
        ({"priority": limits.PRIORITY_MIN}, "priority", limits.PRIORITY_MIN),
        ({"priority": limits.PRIORITY_MAX}, "priority", limits.PRIORITY_MAX),
        ({"seed": limits.SEED.high}, "seed", limits.SEED.high),
        ({"seed": 0}, "seed", 0),
        ({"seed": None}, "seed", DEFAULT_SEED),
        ({"top_k": TOP_ID}, "top_k", TOP_ID),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 100.0}, "temperature", 100.0),
        ({"top_p": 1}, "top_p", 1.0),
        ({"top_p": 5e-324}, "top_p", 5e-324),
        ({"n": 1}, "choices", 1),
        ({"n": MOST_CHOICES}, "choices", MOST_CHOICES),
        ({"cache_salt": None}, "salt", NO_SALT),
    ],
)
def test_each_bound_is_included(fields: dict[str, Any], name: str, value: object) -> None:
    assert getattr(parse({"prompt_tokens": 1} | fields), name) == value


def test_a_whole_prompt_of_ids_may_fill_the_limit() -> None:
    found = parse({"prompt_token_ids": list(range(LIMIT)), "max_new_tokens": 0})
    assert found.prompt_tokens == LIMIT


def test_unknown_fields_are_ignored() -> None:
    body = {"prompt_tokens": 2, "best_of": 3, "id": "a", "stop": ["x"], "": None, "x": {"prompt_tokens": "y"}}
    assert parse(body) == parse({"prompt_tokens": 2})


def test_of_duplicate_keys_the_last_counts() -> None:
    """As everywhere in Python's json; what matters is that both ways of reading agree."""
    assert parse('{"prompt_tokens": 1, "prompt_tokens": 5}').prompt_tokens == 5
    assert rejected('{"prompt_tokens": 5, "prompt_tokens": 0}').param == "prompt_tokens"


def test_a_duplicate_key_of_a_wrong_type_is_seen_even_if_a_good_one_follows() -> None:
    assert rejected('{"prompt_tokens": "x", "prompt_tokens": 5}').param == "prompt_tokens"


def test_escaped_keys_and_white_space_are_json() -> None:
    assert parse(' \t\r\n{ "prompt\\u005ftokens" : 7 } \n').prompt_tokens == 7


# ------------------------------------------------------------------------------------------------ what is rejected


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens", "0, not between 1 and 64; use 1 or more"),
        ({"prompt_tokens": -1}, "prompt_tokens", "-1, not between 1 and 64"),
        ({"prompt_tokens": LIMIT + 1}, "prompt_tokens", "65, not between 1 and 64; use 64 or less"),
        ({"prompt_tokens": 1, "max_new_tokens": -1}, "max_new_tokens", "-1, not between 0 and 64"),
        ({"prompt_tokens": 1, "max_new_tokens": LIMIT + 1}, "max_new_tokens", "not between 0 and 64"),
        ({"prompt_tokens": 1, "max_new_tokens": LIMIT}, "max_new_tokens", "limit of 64"),
        ({"prompt_tokens": 60, "max_new_tokens": 7}, "max_new_tokens", "are 67, over this engine's limit of 64"),
        ({"prompt_tokens": 1, "priority": limits.PRIORITY_MIN - 1}, "priority", "between -8 and 7"),
        ({"prompt_tokens": 1, "priority": limits.PRIORITY_MAX + 1}, "priority", "between -8 and 7"),
        ({"prompt_tokens": 1, "seed": -1}, "seed", f"between 0 and {limits.SEED.high}"),
        ({"prompt_tokens": 1, "seed": limits.SEED.high + 1}, "seed", f"between 0 and {limits.SEED.high}"),
        ({"prompt_tokens": 1, "top_k": -1}, "top_k", "between 0 and 2147483647"),
        ({"prompt_tokens": 1, "top_k": TOP_ID + 1}, "top_k", "between 0 and 2147483647"),
        ({"prompt_tokens": 1, "temperature": -0.01}, "temperature", "between 0 and 100"),
        ({"prompt_tokens": 1, "temperature": 100.01}, "temperature", "between 0 and 100"),
        ({"prompt_tokens": 1, "top_p": 0}, "top_p", "above 0 and at most 1"),
        ({"prompt_tokens": 1, "top_p": 1.01}, "top_p", "above 0 and at most 1"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "at least 1"),
        ({"prompt_token_ids": [1] * (LIMIT + 1)}, "prompt_token_ids", "65 tokens, over this engine's limit of 64"),
        ({"prompt_token_ids": [5, 6, -1]}, "prompt_token_ids", "prompt_token_ids[2] is -1; a token id is between 0"),
        ({"prompt_token_ids": [TOP_ID + 1, 1]}, "prompt_token_ids", f"prompt_token_ids[0] is {TOP_ID + 1}"),
        ({"prompt_token_ids": [1, 10**300]}, "prompt_token_ids", "prompt_token_ids[1] is a number of 997 bits"),
        ({"prompt_token_ids": [1] * 60, "max_new_tokens": 5}, "max_new_tokens", "limit of 64"),
        ({"prompt_tokens": 1, "n": 0}, "n", "0, not between 1 and 128; use 1 or more"),
        ({"prompt_tokens": 1, "n": -3}, "n", "-3, not between 1 and 128"),
        ({"prompt_tokens": 1, "n": 129}, "n", "129, not between 1 and 128; use 128 or less"),
        ({"prompt_tokens": 1, "n": 128}, "n", "over the 20 sequences that this engine can have at once"),
        ({"prompt_tokens": 1, "n": MOST_CHOICES + 1}, "n", "use 20 or less"),
        ({"prompt_tokens": 1, "cache_salt": ""}, "cache_salt", "has 0 characters; give a string of 1 to 256"),
        ({"prompt_tokens": 1, "cache_salt": "x" * 257}, "cache_salt", "has 257 characters; give a string of 1 to 256"),
        ({"prompt_tokens": 1, "prompt_token_ids": [1]}, "prompt_token_ids", "both given"),
        ({}, "prompt_tokens", "missing"),
        ({"max_new_tokens": 4}, "prompt_tokens", "missing"),
    ],
)
def test_outside_a_bound_the_message_names_it(fields: dict[str, Any], param: str, words: str) -> None:
    problem = rejected(fields)
    assert problem.param == param
    assert words in problem.message


WHOLE = ("prompt_tokens", "max_new_tokens", "priority", "seed", "top_k", "n")
NOT_WHOLE = ["true", "false", "1.0", "1.5", "1e2", "1E0", "-0.0", '"1"', '""', "[1]", "{}", "[]", "1e400", "9" * 5000]


@pytest.mark.parametrize("text", [*NOT_WHOLE, "null"])
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_a_whole_number_is_never_taken_for_one(name: str, text: str) -> None:
    if (name, text) == ("seed", "null"):
        return  # the same as none
    prompt = "" if name == "prompt_tokens" else '"prompt_tokens": 1, '
    problem = rejected(f'{{{prompt}"{name}": {text}}}')
    assert problem.param == name
    assert "whole number" in problem.message


@pytest.mark.parametrize("text", [*NOT_WHOLE, "null"])
def test_nor_for_a_token_id(text: str) -> None:
    problem = rejected(f'{{"prompt_token_ids": [1, {text}]}}')
    assert problem.param == "prompt_token_ids"


@pytest.mark.parametrize("text", ["null", "7", '"1, 2"', "true", '{"0": 1}', "1.5"])
def test_the_ids_are_a_list(text: str) -> None:
    assert rejected(f'{{"prompt_token_ids": {text}}}').param == "prompt_token_ids"


@pytest.mark.parametrize("name", ["ignore_eos", "details"])
@pytest.mark.parametrize("text", ["0", "1", '"true"', "null", "[]", "1.0"])
def test_a_switch_is_true_or_false(name: str, text: str) -> None:
    problem = rejected(f'{{"prompt_tokens": 1, "{name}": {text}}}')
    assert problem.param == name
    assert "true or false" in problem.message


@pytest.mark.parametrize("text", ["0", "true", "[]", "{}", "1.5", '["x"]'])
def test_a_salt_is_a_string(text: str) -> None:
    problem = rejected(f'{{"prompt_tokens": 1, "cache_salt": {text}}}')
    assert problem.param == "cache_salt"
    assert "string" in problem.message


def admission_blocks(prompt_tokens: int, max_new_tokens: int, choices: int) -> int:
    """The blocks of n block tables, written out: what a fork shares with its parent counts once."""
    held = -(-min(prompt_tokens + 1, prompt_tokens + max_new_tokens) // BLOCK_SIZE)
    shared = [(k + 1) * BLOCK_SIZE < prompt_tokens for k in range(held)]
    return len({(0 if shared[k] else choice, k) for choice in range(choices) for k in range(held)})


@given(st.integers(1, LIMIT), st.integers(0, LIMIT), st.integers(1, MOST_CHOICES))
def test_choices_that_an_empty_pool_could_not_hold_are_refused(prompt: int, new: int, choices: int) -> None:
    new = min(new, LIMIT - prompt)
    body = {"prompt_tokens": prompt, "max_new_tokens": new}
    if admission_blocks(prompt, new, choices) <= BLOCKS:
        assert parse(body | {"n": choices}).choices == choices
        return
    problem = rejected(body | {"n": choices})
    assert problem.param == "n"
    assert f"n is {choices}, and so many choices of {prompt} prompt tokens need" in problem.message
    assert f"{admission_blocks(prompt, new, choices)} KV blocks, over this engine's {BLOCKS}" in problem.message
    fitting = int(problem.message.rpartition("use ")[2].partition(" or less")[0])
    assert admission_blocks(prompt, new, fitting) <= BLOCKS < admission_blocks(prompt, new, fitting + 1)
    assert parse(body | {"n": fitting}).choices == fitting


def test_one_choice_is_always_within_the_pool() -> None:
    assert parse({"prompt_tokens": LIMIT - 1, "max_new_tokens": 1, "n": 1}).choices == 1


@given(st.text(min_size=1, max_size=limits.CACHE_SALT_CHARS_MAX))
def test_a_salt_is_two_words_of_the_segment(salt: str) -> None:
    found = parse(json.dumps({"prompt_tokens": 1, "cache_salt": salt}, ensure_ascii=False))
    assert found.salt == parse({"prompt_tokens": 1, "cache_salt": salt}).salt
    assert found.salt != NO_SALT
    assert found.salt != parse({"prompt_tokens": 1, "cache_salt": salt[:-1] + ("z" if salt[-1] == "y" else "y")}).salt
    for word in found.salt:
        assert np.int64(word) == word


def test_a_salts_words_are_the_same_in_every_process() -> None:
    assert parse({"prompt_tokens": 1, "cache_salt": "tenant 7"}).salt == (5745461870383662701, -1506269857688757168)
    longest = parse({"prompt_tokens": 1, "cache_salt": "\u00e9" * limits.CACHE_SALT_CHARS_MAX})
    assert longest.salt != NO_SALT


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("text", ["true", "null", '"1"', "[]", "1e400", "-1e400", "9" * 5000])
def test_a_number_is_finite_and_a_number(name: str, text: str) -> None:
    assert rejected(f'{{"prompt_tokens": 1, "{name}": {text}}}').param == name


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_what_only_python_calls_json_is_malformed(name: str, text: str) -> None:
    assert rejected(f'{{"prompt_tokens": 1, "{name}": {text}}}').param is None


@pytest.mark.parametrize("digits", [20, 40, 400, 4000, 100_000])
@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_huge_number_is_not_repeated_to_the_client(name: str, sign: str, digits: int) -> None:
    prompt = "" if name == "prompt_tokens" else '"prompt_tokens": 1, '
    problem = rejected(f'{{{prompt}"{name}": {sign}{"9" * digits}}}')
    assert problem.param == name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"\x00",
        b"[]",
        b"[1, 2]",
        b"null",
        b"true",
        b"7",
        b'"prompt_tokens"',
        b"{",
        b"}",
        b'{"prompt_tokens": 1',
        b'{"prompt_tokens": 1,}',
        b'{"prompt_tokens": 1} x',
        b'{"prompt_tokens": 1}{"prompt_tokens": 1}',
        b"{'prompt_tokens': 1}",
        b"{prompt_tokens: 1}",
        b'{"prompt_tokens": 01}',
        b'{"prompt_tokens": +1}',
        b'{"prompt_tokens": 0x10}',
        b'{"prompt_tokens": 1 /* one */}',
        b'\xef\xbb\xbf{"prompt_tokens": 1}',
        '{"prompt_tokens": 1}'.encode("utf-16"),
        '{"prompt_tokens": 1}'.encode("utf-32"),
        b"\xff\xfe\xfd",
        b"prompt_tokens=1&max_new_tokens=2",
    ],
)
def test_what_is_no_json_object(body: bytes) -> None:
    problem = rejected(body)
    assert problem.param is None
    assert "body" in problem.message


def test_an_empty_body_is_shown_what_to_send() -> None:
    message = rejected(b"").message
    assert message.startswith("the body is empty; send JSON such as ")
    example = message.partition("such as ")[2].encode()
    assert parsed(example, ENGINE._replace(max_request_tokens=8192)).max_new_tokens == 64


@pytest.mark.parametrize("opening", [b"[", b'{"x":', b'[{"x":'])
@pytest.mark.parametrize("is_closed", [True, False])
def test_nested_a_hundred_thousand_deep(opening: bytes, *, is_closed: bool) -> None:
    closing = opening[::-1].replace(b"[", b"]").replace(b"{", b"}").translate(None, b':x"')
    deep = opening * 100_000 + b"1" + (closing * 100_000 if is_closed else b"")
    rejected(deep)
    rejected(b'{"prompt_tokens": 1, "unknown": ' + deep + b"}")
    rejected(b'{"prompt_token_ids": ' + deep + b"}")
    assert parse('{"prompt_tokens": 1}').prompt_tokens == 1, "the parser is as good as new"


@pytest.mark.parametrize("value", [b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\xaf"', b'"\\ud800"', b'"\\udc00\\ud800"'])
def test_text_that_is_not_unicode(value: bytes) -> None:
    """In a field's place it is a wrong type or malformed; in an unknown field it may be skipped unread."""
    assert rejected(b'{"prompt_tokens": ' + value + b"}").param in {None, "prompt_tokens"}
    assert rejected(b'{"prompt_token_ids": [' + value + b"]}").param in {None, "prompt_token_ids"}
    assert_valid_or_rejected(b'{"prompt_tokens": 1, "unknown": ' + value + b"}")
    assert_valid_or_rejected(b'{"prompt_tokens": 1, ' + value + b": 1}")


# ---------------------------------------------------------------------------------------------------- for anything


def assert_valid_or_rejected(body: bytes) -> None:
    try:
        found = parse(body)
    except RequestRejected as problem:
        checked(problem)
        return
    assert type(found) is GenerateRequest
    assert type(found.prompt_tokens) is int
    assert type(found.max_new_tokens) is int
    assert found.prompt_tokens >= 1
    assert found.max_new_tokens >= 0
    assert found.prompt_tokens + found.max_new_tokens <= LIMIT
    assert type(found.priority) is int
    assert found.priority in limits.PRIORITY
    assert type(found.seed) is int
    assert found.seed in limits.SEED
    assert type(found.details) is bool
    assert 0 <= found.temperature <= 100
    assert 0 < found.top_p <= 1
    assert 0 <= found.top_k <= TOP_ID
    assert 1 <= found.choices <= MOST_CHOICES
    assert admission_blocks(found.prompt_tokens, found.max_new_tokens, found.choices) <= BLOCKS
    assert all(-(2**63) <= word < 2**63 for word in found.salt)
    assert (found.token_ids is not None) == bool(found.flags & layout.FLAG_TOKEN_IDS)
    if found.token_ids is not None:
        assert found.token_ids.shape == (found.prompt_tokens,)
        assert (found.token_ids >= 0).all()


huge = st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 10**400])
integers = st.integers(-10, LIMIT + 10) | st.integers() | huge
scalars = st.none() | st.booleans() | integers | st.floats() | st.text(max_size=5)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
likely = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(integers, json_values, st.lists(integers, max_size=LIMIT + 2), st.booleans()) for name in FIELDS
    },
)


@given(st.one_of(likely, json_values))
def test_any_json_value_is_a_request_or_a_rejection(value: Any) -> None:
    assert_valid_or_rejected(json.dumps(value).encode())


@given(st.one_of(likely, json_values))
def test_so_is_any_value_written_without_escapes(value: Any) -> None:
    assert_valid_or_rejected(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=40))
@example(b'{"prompt_tokens":1\xff}')
def test_so_are_any_bytes(body: bytes) -> None:
    assert_valid_or_rejected(body)


@given(likely, st.data())
def test_so_is_a_request_with_a_piece_damaged(value: dict[str, Any], data: st.DataObject) -> None:
    body = bytearray(json.dumps({"prompt_tokens": 3} | value).encode())
    start = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(start, min(start + 4, len(body))))
    body[start:end] = data.draw(st.binary(max_size=4) | st.sampled_from([b'"', b"[", b"{", b"1e999", b"\\u", b",,"]))
    assert_valid_or_rejected(bytes(body))


@given(
    st.fixed_dictionaries(
        {"max_new_tokens": st.integers(0, LIMIT // 2)},
        optional={
            "priority": st.integers(limits.PRIORITY_MIN, limits.PRIORITY_MAX),
            "ignore_eos": st.booleans(),
            "seed": st.integers(0, limits.SEED.high),
            "details": st.booleans(),
            "temperature": st.floats(0, 100) | st.integers(0, 100),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(0, TOP_ID),
        },
    ),
    st.integers(1, LIMIT // 2) | st.lists(st.integers(0, TOP_ID), min_size=1, max_size=LIMIT // 2),
)
def test_whatever_is_within_the_limits_is_accepted_as_it_is(fields: dict[str, Any], prompt: int | list[int]) -> None:
    named = {"prompt_token_ids": prompt} if isinstance(prompt, list) else {"prompt_tokens": prompt}
    found = parse(fields | named)
    for name in fields.keys() - {"ignore_eos"}:
        assert getattr(found, name) == fields[name], name
    assert bool(found.flags & layout.FLAG_IGNORE_EOS) == fields.get("ignore_eos", False)
    if isinstance(prompt, list):
        assert found.token_ids is not None
        assert found.token_ids.tolist() == prompt
    else:
        assert (found.prompt_tokens, found.token_ids) == (prompt, None)


@pytest.mark.parametrize("end", [b'"\\ud800"]}', b'"NaN"', b"", b"\xff"])
def test_a_long_body_is_read_once_whatever_is_wrong_with_it(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams of the worker wait meanwhile."""

    def forbidden(text: str) -> None:
        raise AssertionError(len(text))

    monkeypatch.setattr(json, "loads", forbidden)
    with pytest.raises(RequestRejected, match=r"JSON|UTF-8"):
        parse(b'{"b":[' + b"[]," * 10_000 + end)
