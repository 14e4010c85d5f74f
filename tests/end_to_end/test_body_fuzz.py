"""Bodies of every kind against one running server: each is served in full, or refused with words that help."""

from __future__ import annotations

import codecs
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.end_to_end.server import Server, running

pytestmark = pytest.mark.end_to_end

MAX_BODY_BYTES = 32_768
BUDGET_S = 30.0
REFUSALS = {400: {"invalid_request"}, 413: {"body_too_large"}, 503: {"queue_full"}, 504: {"timeout"}}
FIELDS = {
    "prompt", "prompt_tokens", "prompt_token_ids", "max_new_tokens", "priority", "ignore_eos", "seed", "details",
    "temperature", "top_p", "top_k", "n", "cache_salt", "timeout_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = {
        "workers": 1,
        "max_body_bytes": MAX_BODY_BYTES,
        "max_model_len": 256,
        "mock_token_latency_us": 0,
        "log_level": "debug",
    }
    with running(**options) as found:
        yield found
        assert found.is_healthy()
        found.wait_idle()
        assert not found.header()["draining"]
        said = "".join(found.output)
        assert "Traceback" not in said
        assert "ERROR" not in said


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    yield connection
    connection.close()


def ask(client: http.client.HTTPConnection, body: bytes) -> tuple[int, bytes]:
    """One request; a connection that the server has closed after a refusal is opened anew."""
    for attempt in (1, 2):
        try:
            client.request("POST", "/generate", body, {"Content-Type": "application/json"})
            answer = client.getresponse()
            return answer.status, answer.read()
        except (http.client.RemoteDisconnected, ConnectionError):
            client.close()
            if attempt == 2:
                raise
    raise AssertionError


def assert_answered(client: http.client.HTTPConnection, body: bytes) -> tuple[int, Any]:
    """What holds for any body. Returns the status, and the lines or the error."""
    status, answer = ask(client, body)
    if status == 200:
        lines = [json.loads(line) for line in answer.splitlines()]
        assert_whole(lines, msgspec.json.decode(body, type=Wanted))
        return status, lines
    assert status in REFUSALS, (status, answer)
    error = json.loads(answer)["error"]
    assert list(error) == ["type", "message", "param"]
    assert error["type"] in REFUSALS[status]
    assert error["param"] is None or error["param"] in FIELDS
    message = error["message"]
    assert 10 < len(message) < 400, "a client must not size our answer"
    assert message.isascii()
    assert message.isprintable()
    if status == 400:
        assert any(
            word in message for word in ("give", "use", "send", "shorten", "encode", "remove", "nested", "token")
        )
        assert error["param"] is None or error["param"] in message or "prompt" in message
    return status, error


class Wanted(msgspec.Struct):
    """How many lines a body asks for. (msgspec looks at no field that is unknown, as long as its end can be found.)"""

    max_new_tokens: int = 16
    n: int = 1
    timeout_s: float | None = None


def assert_whole(lines: list[dict[str, Any]], wanted: Wanted) -> None:
    """Each choice has all its tokens, in order, and one end; or fewer, where its own time-out has ended it."""
    choices = wanted.n
    ends = [line for line in lines if line["done"]]
    assert len(ends) == choices
    assert lines[-1]["done"]
    for choice in range(choices):
        mine = [line for line in lines if line.get("choice", 0) == choice]
        assert [line["token_index"] for line in mine] == list(range(len(mine)))
        if problem := mine[-1].get("error"):
            assert (problem["type"], wanted.timeout_s is None) == ("timeout", False)
        else:
            assert len(mine) == max(wanted.max_new_tokens, 1)


# ------------------------------------------------------------------------------------------------------ strategies

whole = st.integers(-3, 40) | st.integers() | st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400])
numbers = whole | st.floats() | st.sampled_from([1e308, 5e-324, -0.0])
texts = st.text(max_size=40) | st.text(st.characters(categories=["Cs", "Cc", "Lu"]), max_size=5)
leaves = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
good = {
    "prompt": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    "prompt_tokens": st.integers(1, 100),
    "prompt_token_ids": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
    "max_new_tokens": st.integers(0, 40),
    "priority": st.integers(-8, 7),
    "ignore_eos": st.booleans(),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "details": st.booleans(),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 2**31 - 1),
    "n": st.integers(1, 4),
    "cache_salt": st.none() | st.text(min_size=1, max_size=20),
}
prompts = st.fixed_dictionaries({"prompt_tokens": good["prompt_tokens"]}) | st.fixed_dictionaries(
    {"prompt_token_ids": good["prompt_token_ids"]}
)
prompts |= st.fixed_dictionaries({"prompt": good["prompt"]})
options = st.fixed_dictionaries({}, optional={name: good[name] for name in good if not name.startswith("prompt")})
valid = st.builds(lambda prompt, more: {**prompt, **more}, prompts, options)
broken_field = st.tuples(st.sampled_from(sorted(FIELDS)), values)
nearly_valid = st.builds(lambda fields, broken: {**fields, broken[0]: broken[1]}, valid, broken_field)
unknown_too = st.builds(lambda fields, more: {**more, **fields}, valid, st.dictionaries(texts, values, max_size=3))


def dumped(value: Any) -> str:
    """JSON, or nearly: NaN and Infinity as Python writes them, half surrogate pairs as escapes."""
    return json.dumps(value)


def duplicated(fields: dict[str, Any]) -> str:
    text = dumped(fields)
    return text[:-1] + ", " + text[1:]


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


json_texts = st.one_of(
    valid.map(dumped),
    nearly_valid.map(dumped),
    unknown_too.map(dumped),
    valid.map(duplicated),
    values.map(dumped),
    nearly_valid.map(lambda fields: json.dumps(fields, ensure_ascii=False)),
)
encodings = st.sampled_from(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "latin-1", "utf-7", "cp037"])
deep = st.builds(
    lambda depth, opening, field: (b'{"%b": ' % field if field else b"") + opening * depth,
    st.integers(1, 5000),
    st.sampled_from([b"[", b'{"a":', b"[[", b'{"prompt_tokens":']),
    st.sampled_from([b"", b"prompt_token_ids", b"unknown", b"cache_salt"]),
)
huge = st.builds(
    lambda field, unit, count: b'{"%b": "%b"}' % (field, unit * count),
    st.sampled_from([b"cache_salt", b"unknown", b"prompt_tokens", b"prompt"]),
    st.sampled_from([b"x", "é".encode(), b"\\u0041", b"\\ud83d\\ude00"]),
    st.integers(1, 9000),
)
digits = st.builds(
    lambda field, sign, count: b'{"%b": %b%b}' % (field, sign, b"9" * count),
    st.sampled_from([b"prompt_tokens", b"seed", b"temperature", b"unknown"]),
    st.sampled_from([b"", b"-", b"0.", b"1e", b"1e-"]),
    st.integers(1, 6000),
)
damaged = st.builds(
    lambda text, at, what: text[: at % (len(text) + 1)] + what + text[at % (len(text) + 1) + 1 :],
    json_texts.map(as_bytes),
    st.integers(0, 10_000),
    st.binary(max_size=3),
)
bodies = st.one_of(
    json_texts.map(as_bytes),
    json_texts.map(as_bytes),
    st.builds(lambda text, cut: as_bytes(text)[: cut % (len(text) + 1)], json_texts, st.integers(0, 10_000)),
    st.builds(lambda text, encoding: text.encode(encoding, "replace"), json_texts, encodings),
    damaged,
    deep,
    huge,
    digits,
    st.binary(max_size=200),
)


# ------------------------------------------------------------------------------------------------------- the tests


@given(fields=valid)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_a_valid_body_is_served_in_full(client: http.client.HTTPConnection, fields: dict[str, Any]) -> None:
    prompt_tokens = fields.get("prompt_tokens") or len(fields.get("prompt_token_ids") or fields["prompt"].encode())
    assert prompt_tokens + fields.get("max_new_tokens", 16) <= 256
    status, lines = assert_answered(client, dumped(fields).encode())
    assert (status, bool(lines)) == (200, True)
    assert all(("text" in line) == ("prompt" in fields) for line in lines)


def test_any_body_is_served_or_refused_in_words(client: http.client.HTTPConnection) -> None:
    deadline_s = time.monotonic() + BUDGET_S
    seen: dict[int, int] = {}
    failed: list[bytes] = []  # is tried again, however late it is

    @given(body=bodies)
    @settings(max_examples=5000, suppress_health_check=list(HealthCheck))
    def search(body: bytes) -> None:
        if time.monotonic() >= deadline_s and not failed:  # the rest of the examples cost nothing
            return
        try:
            status, _ = assert_answered(client, body)
        except BaseException:
            failed.append(body)
            raise
        seen[status] = seen.get(status, 0) + 1

    search()
    assert seen.get(200, 0) > 10, seen
    assert seen.get(400, 0) > 100, seen


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"prompt_tokens": 1, "cache_salt": "\\ud800"}', "cache_salt", "\\ud800, half of a surrogate pair"),
        (b'{"prompt_tokens": 1, "cache_salt": "\\udfffx"}', "cache_salt", "\\udfff, half of a surrogate pair"),
        (b'{"prompt_tokens": 1, "x": "\\ud800"}', None, None),
        (b'{"prompt": "a\\ud800"}', "prompt", "\\ud800, half of a surrogate pair"),
        (b'{"prompt": "\xed\xa0\x80"}', None, "not UTF-8 at byte 12 (0xed)"),
        (b'{"prompt": ""}', "prompt", "prompt is empty"),
        (b'{"prompt": null}', "prompt", "prompt is null; give a string"),
        (b'{"prompt": "a", "prompt_tokens": 1}', "prompt_tokens", "are both given"),
        (b'{"prompt_tokens": 1, "cache_salt": "\xed\xa0\x80"}', None, "not UTF-8 at byte 36 (0xed)"),
        (b'{"prompt_tokens": NaN}', None, "not valid JSON"),
        (b'{"prompt_tokens": 1, "temperature": -Infinity}', None, "not valid JSON"),
        (b'{"prompt_tokens": 1, "temperature": 1e999}', "temperature", "out of range"),
        (b'{"prompt_tokens": %b}' % (b"9" * 5000), "prompt_tokens", "out of range"),
        (b'{"prompt_token_ids": [1, "2"]}', "prompt_token_ids", "prompt_token_ids[1] is a string"),
        (codecs.BOM_UTF8 + b'{"prompt_tokens": 1}', None, "byte order mark"),
        ('{"prompt_tokens": 1}'.encode("utf-16"), None, "UTF-16; send JSON in UTF-8"),
        ('{"prompt_tokens": 1}'.encode("utf-16-le"), None, "UTF-16; send JSON in UTF-8"),
        ('{"prompt_tokens": 1}'.encode("utf-32-be"), None, "send JSON in UTF-8"),
        (b"[" * 10_000, None, "the body is a list; send a JSON object"),
        (b'{"unknown": %b' % (b"[" * 10_000), None, "nested too deeply"),
        (b"", None, "the body is empty"),
        (b'{"prompt_tokens": 1', None, "not valid JSON"),
    ],
)
def test_found_by_fuzzing(
    client: http.client.HTTPConnection, body: bytes, param: str | None, words: str | None
) -> None:
    status, error = assert_answered(client, body)
    if words is None:  # an unknown field's value is nobody's concern, or malformed: either is an answer
        return
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


def test_the_last_of_a_repeated_field_counts(client: http.client.HTTPConnection) -> None:
    status, lines = assert_answered(client, b'{"prompt_tokens": "no", "prompt_tokens": 1, "max_new_tokens": 1}')
    assert status in {200, 400}
    status, lines = assert_answered(client, b'{"prompt_tokens": 1, "max_new_tokens": 9, "max_new_tokens": 2}')
    assert (status, len(lines)) == (200, 2)
