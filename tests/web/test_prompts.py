"""The prompt of a request, by each of the three ways to give one."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.errors import RequestRejected
from ironbatch.limits import TEXT_BYTES
from ironbatch.text.byte_level import ByteTokenizer
from ironbatch.text.tokenizer import Decoder, Tokenizer
from ironbatch.text_rows import prompt_room
from ironbatch.web.json_body import RequestBody, decode_body
from ironbatch.web.prompts import MOST_ENCODED_AT_ONCE, Prompt, PromptReader
from ironbatch.web.request import RequestLimits, parse_request
from tests.web.fakes import in_loop, turn

LIMIT = 64
ROW_BYTES = layout.text_row_bytes(LIMIT)
BYTES = ByteTokenizer(is_readable=True)


def read(reader: PromptReader, limit: int = LIMIT, **fields: object) -> Prompt:
    return asyncio.run(reader.read(RequestBody(**fields), limit))  # type: ignore[arg-type]


def refused(reader: PromptReader, limit: int = LIMIT, **fields: object) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        read(reader, limit, **fields)
    problem = caught.value
    assert (problem.type, problem.status) == ("invalid_request", 400)
    assert problem.param in problem.message or "prompt" in problem.message
    assert len(problem.message) < 300
    return problem


class ScriptedTokenizer:
    """Gives the ids that it is told to, or fails."""

    vocab_size = 10

    def __init__(self, answer: list[int] | ValueError) -> None:
        self.answer = answer
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        assert self.may_answer.wait(10)
        if isinstance(self.answer, ValueError):
            raise self.answer
        return self.answer

    def decoder(self) -> Decoder:
        raise NotImplementedError


IDS_ALONE = PromptReader(BYTES, 0)
TEXT_ALONE = PromptReader(None, ROW_BYTES)
BOTH = PromptReader(BYTES, ROW_BYTES)


def test_a_backend_of_ids_gets_ids() -> None:
    prompt = read(IDS_ALONE, prompt="é!")
    assert prompt.token_ids is not None
    assert prompt.token_ids.tolist() == [0xC3, 0xA9, ord("!")]
    assert (prompt.tokens, prompt.flags, prompt.text) == (3, layout.FLAG_TOKEN_IDS, "é!".encode())


def test_a_backend_of_text_gets_text_and_an_estimate() -> None:
    for text, tokens in (("a", 1), ("abcd", 1), ("abcde", 2), ("日本", 2)):
        assert read(TEXT_ALONE, prompt=text) == Prompt(tokens, layout.FLAG_TEXT, None, text.encode(), is_estimate=True)


def test_with_a_tokenizer_it_gets_both() -> None:
    prompt = read(BOTH, prompt="abc")
    assert (prompt.tokens, prompt.flags, prompt.text) == (3, layout.FLAG_TEXT | layout.FLAG_TOKEN_IDS, b"abc")
    assert not prompt.is_estimate


@pytest.mark.parametrize("reader", [IDS_ALONE, TEXT_ALONE, BOTH])
def test_a_prompt_without_text_has_none(reader: PromptReader) -> None:
    assert read(reader, prompt_tokens=7) == Prompt(7)
    prompt = read(reader, prompt_token_ids=[4, 5])
    assert (prompt.tokens, prompt.flags, prompt.text) == (2, layout.FLAG_TOKEN_IDS, None)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "prompt_tokens", "missing; give prompt (a text), prompt_tokens (a count) or prompt_token_ids"),
        (
            {"prompt": "a", "prompt_tokens": 1},
            "prompt_tokens",
            "prompt and prompt_tokens are both given; give one of prompt, prompt_tokens and prompt_token_ids",
        ),
        ({"prompt": "", "prompt_token_ids": []}, "prompt_token_ids", "prompt and prompt_token_ids are both given"),
        ({"prompt": "a", "prompt_tokens": 1, "prompt_token_ids": [1]}, "prompt_token_ids", "are all given; give one"),
        ({"prompt": ""}, "prompt", "prompt is empty; give a text of at least 1 character"),
    ],
)
def test_there_is_exactly_one_and_it_says_something(fields: dict[str, object], param: str, words: str) -> None:
    for reader in (IDS_ALONE, TEXT_ALONE, BOTH):
        problem = refused(reader, **fields)
        assert problem.param == param
        assert words in problem.message


def test_a_text_of_too_many_tokens() -> None:
    assert read(IDS_ALONE, prompt="a" * LIMIT).tokens == LIMIT
    said = "prompt has 65 tokens; this engine's limit is 64 a request; shorten it"
    assert refused(IDS_ALONE, prompt="a" * (LIMIT + 1)).message == said


def test_a_text_of_too_many_tokens_as_it_seems() -> None:
    assert read(TEXT_ALONE, prompt="a" * 4 * LIMIT).tokens == LIMIT
    said = "prompt has about 65 tokens, estimated from its 257 bytes; --tokenizer would count them exactly;"
    assert refused(TEXT_ALONE, prompt="a" * (4 * LIMIT + 1)).message.startswith(said)


@pytest.mark.parametrize("reader", [TEXT_ALONE, BOTH])
@pytest.mark.parametrize("max_new_tokens", [0, 1, 16, 20_000])
def test_a_text_that_no_row_holds_beside_its_output(reader: PromptReader, max_new_tokens: int) -> None:
    """A length that is wrong itself leaves all of the row, so that it is what is told."""
    room = prompt_room(ROW_BYTES) - (max_new_tokens * TEXT_BYTES if max_new_tokens <= 10_000 else 0)
    assert read(reader, 10_000, prompt="a" * room, max_new_tokens=max_new_tokens).text == b"a" * room
    message = refused(reader, 10_000, prompt="é" + "a" * (room - 1), max_new_tokens=max_new_tokens).message
    assert f"prompt has {room + 1} bytes, over the {room} that this engine keeps" in message
    assert "--max-model-len" in message


def parsed(reader: PromptReader, **fields: object) -> RequestRejected:
    engine = RequestLimits(LIMIT, most_choices=20, total_kv_blocks=24, kv_block_size=4)
    body = RequestBody(**fields)  # type: ignore[arg-type]
    with pytest.raises(RequestRejected) as caught:
        parse_request(body, asyncio.run(reader.read(body, LIMIT)), engine, 0)
    return caught.value


def test_an_estimate_is_not_stated_as_a_fact() -> None:
    about = "prompt has about 60 tokens, estimated from its 240 bytes; --tokenizer would count them exactly; "
    problem = parsed(TEXT_ALONE, prompt="a" * 240, max_new_tokens=10)
    limit = "over this engine's limit of 64 a request; shorten one of them by 6"
    assert problem.message == f"{about}with max_new_tokens 10 they are 70, {limit}"
    assert problem.param == "max_new_tokens"
    problem = parsed(TEXT_ALONE, prompt="a" * 240, max_new_tokens=4, n=20)
    assert problem.message.startswith(f"{about}n is 20, and so many choices need ")
    exact = parsed(BOTH, prompt="a" * 60, max_new_tokens=10)
    assert exact.message == f"the prompt's 60 tokens and max_new_tokens 10 are 70, {limit}"


def test_a_tokenizer_that_makes_nothing_of_it() -> None:
    assert "has no token" in refused(PromptReader(ScriptedTokenizer([]), 0), prompt=" ").message
    failing = PromptReader(ScriptedTokenizer(ValueError("the tokenizer cannot encode it: no [UNK]")), 0)
    message = refused(failing, prompt="日").message
    assert message == "prompt is not for this engine: the tokenizer cannot encode it: no [UNK]; give another text"


@pytest.mark.parametrize("is_long", [False, True])
@in_loop
async def test_the_loop_turns_while_a_long_text_is_encoded(*, is_long: bool) -> None:
    tokenizer = ScriptedTokenizer([1, 2])
    reader = PromptReader(tokenizer, 0)
    text = "a" * (MOST_ENCODED_AT_ONCE + is_long)
    if is_long:
        tokenizer.may_answer.clear()
    reading = asyncio.create_task(reader.read(RequestBody(prompt=text), LIMIT))
    await turn(50)
    assert reading.done() != is_long
    tokenizer.may_answer.set()
    assert (await reading).tokens == 2
    assert (tokenizer.threads[0] is threading.main_thread()) != is_long


@in_loop
async def test_a_client_that_leaves_meanwhile() -> None:
    tokenizer = ScriptedTokenizer([1])
    tokenizer.may_answer.clear()
    reader = PromptReader(tokenizer, 0)
    body = RequestBody(prompt="a" * (MOST_ENCODED_AT_ONCE + 1))
    reading = asyncio.create_task(reader.read(body, LIMIT))
    await turn()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    tokenizer.may_answer.set()
    assert (await reader.read(body, LIMIT)).tokens == 1


@given(st.text(max_size=30))
def test_any_text_that_json_can_carry(text: str) -> None:
    """Written with escapes, pairs of surrogates among them."""
    escapes = "".join(f"\\u{unit:04x}" for unit in utf_16(text))
    fields = decode_body(f'{{"prompt": "{escapes}"}}'.encode())
    assert fields.prompt == text
    if 0 < len(text.encode()) <= LIMIT:
        assert read(IDS_ALONE, prompt=fields.prompt).text == text.encode()


def utf_16(text: str) -> list[int]:
    data = text.encode("utf-16-le")
    return [int.from_bytes(data[place : place + 2], "little") for place in range(0, len(data), 2)]


def test_half_a_surrogate_pair_is_no_prompt() -> None:
    with pytest.raises(RequestRejected) as caught:
        decode_body(b'{"prompt": "a\\ud800"}')
    assert caught.value.message.startswith("prompt holds \\ud800, half of a surrogate pair")


def test_tokenizers_are_tokenizers() -> None:
    tokenizer: Tokenizer = ScriptedTokenizer([])
    assert tokenizer.vocab_size == 10
