"""A tokenizer.json of each kind: decoded token by token, its text is what the library makes of all ids at once."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from ironbatch.errors import StartError
from ironbatch.text import json_file
from ironbatch.text.json_file import JsonTokenizer
from ironbatch.text.tokenizer import Decoder
from tests.text.small import END, KINDS

PARTS = [
    "The quick",
    " dog",
    " ",
    "  ",
    "é",
    "日本",
    "😀",
    "👩\u200d👩\u200d👧",
    "\ufffd",
    "two words",
    " .",
    "n't",
    "\n",
]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.lists(
    st.sampled_from(PARTS), max_size=12
).map("".join)
ids = st.integers(0, 450) | st.sampled_from([-(2**31), -2, -1, 10**6, 2**31 - 1])
BYTE_TOKEN = re.compile("<0x(..)>")
every_kind = pytest.mark.parametrize("kind", KINDS)


def shown(decoder: Decoder, token_ids: Sequence[int]) -> list[str]:
    """What each token adds, and what the end does."""
    return [*map(decoder.feed, token_ids), decoder.end()]


def known(library: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    return [token for token in token_ids if token >= 0 and library.id_to_token(token) is not None]


def byte_runs_are_text(library: Tokenizer, token_ids: Sequence[int]) -> bool:
    """Whether each run of byte tokens is valid UTF-8; others are the one case in which a stream differs."""
    special = {token for token, added in library.get_added_tokens_decoder().items() if added.special}
    run = b""
    for token in [*(token for token in token_ids if token not in special), None]:
        found = BYTE_TOKEN.fullmatch(library.id_to_token(token) or "") if token is not None else None
        if found:
            run += bytes.fromhex(found[1])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


@every_kind
@given(text=texts)
@example(text="日本語 😀 naïve")
@example(text=" leading and trailing ")
def test_any_text_comes_out_as_the_library_has_it(kind: str, text: str) -> None:
    library = KINDS[kind]()
    tokenizer = JsonTokenizer(library)
    token_ids = tokenizer.encode(text)
    assert token_ids == library.encode(text).ids
    assert "".join(shown(tokenizer.decoder(), token_ids)) == library.decode(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_in_a_sequence", "sentence_piece"])
@given(text=texts)
def test_and_nothing_of_it_is_lost(kind: str, text: str) -> None:
    text = text.replace("é", "")  # an added token that the library itself takes for another byte
    tokenizer = JsonTokenizer(KINDS[kind]())
    assert "".join(shown(tokenizer.decoder(), tokenizer.encode(text))) == text


@every_kind
@given(token_ids=st.lists(ids, max_size=30))
def test_any_ids_are_as_the_library_has_them(kind: str, token_ids: list[int]) -> None:
    library = KINDS[kind]()
    parts = shown(JsonTokenizer(library).decoder(), token_ids)
    if byte_runs_are_text(library, known(library, token_ids)):
        assert "".join(parts) == library.decode(known(library, token_ids))


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece", "mixed"])
def test_a_character_comes_with_the_token_that_completes_it(kind: str) -> None:
    library = KINDS[kind]()
    tokenizer = JsonTokenizer(library)
    parts = shown(tokenizer.decoder(), tokenizer.encode("dog🤖dog"))
    (place,) = (place for place, part in enumerate(parts) if "🤖" in part)
    assert parts[place] == "🤖"
    assert "".join(parts) == "dog🤖dog"
    assert parts[place - 2 : place] == ["", ""]


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece", "mixed"])
def test_an_incomplete_one_is_replaced_at_the_end(kind: str) -> None:
    tokenizer = JsonTokenizer(KINDS[kind]())
    parts = shown(tokenizer.decoder(), tokenizer.encode("dog🤖")[:-1])
    assert "".join(parts) == "dog\ufffd"
    assert parts[-1] == "\ufffd"


def byte_tokens(library: Tokenizer, data: bytes) -> list[int]:
    return [library.token_to_id(f"<0x{byte:02X}>") for byte in data]


@given(data=st.binary(max_size=12) | st.lists(st.sampled_from([b"\xe4", b"\xb8", b"\xad", b"A", b" "])).map(b"".join))
def test_of_byte_tokens_only_what_is_invalid_is_replaced(data: bytes) -> None:
    library = KINDS["without_strip"]()
    assert "".join(shown(JsonTokenizer(library).decoder(), byte_tokens(library, data))) == data.decode(errors="replace")


def test_a_word_after_invalid_bytes_keeps_its_space() -> None:
    library = KINDS["sentence_piece"]()
    token_ids = [*byte_tokens(library, b"\xe4"), library.token_to_id("▁The")]
    assert shown(JsonTokenizer(library).decoder(), token_ids) == ["", "\ufffd The", ""]


@every_kind
def test_what_is_held_back_is_bounded(kind: str) -> None:
    """Invalid bytes for ever: each comes out within a few tokens."""
    library = KINDS[kind]()
    worst = next((found for token in ("ÿ", "<0xFF>", "\ufffd") if (found := library.token_to_id(token)) is not None), 5)
    decoder = JsonTokenizer(library).decoder()
    parts = [decoder.feed(worst) for _ in range(200)]
    assert len("".join(parts)) >= 196
    assert len(getattr(decoder, "_window", [])) <= 4


def test_special_tokens_are_no_text_and_no_break() -> None:
    tokenizer = JsonTokenizer(KINDS["byte_level"]())
    library = KINDS["byte_level"]()
    end = library.token_to_id(END)
    token_ids = [token for part in tokenizer.encode("naïve 😀") for token in (part, end)]
    assert "".join(shown(tokenizer.decoder(), token_ids)) == "naïve 😀"


def test_a_prompt_gets_the_tokens_that_go_round_it() -> None:
    assert JsonTokenizer(KINDS["word_piece"]()).encode("the dog")[0] == 1
    assert JsonTokenizer(KINDS["sentence_piece"]()).encode("the dog")[0] == 1


def test_a_prompt_is_neither_cut_nor_filled_up() -> None:
    library = Tokenizer.from_str(KINDS["word_piece"]().to_str())
    library.enable_truncation(4)
    library.enable_padding(length=100)
    tokenizer = JsonTokenizer(library)
    assert tokenizer.encode("the dog " * 10) == KINDS["word_piece"]().encode("the dog " * 10).ids


def test_other_threads_run_while_it_encodes() -> None:
    """Of the library's methods not all let them; a worker's streams depend on it."""
    tokenizer = JsonTokenizer(KINDS["byte_level"]())
    with ThreadPoolExecutor(1) as thread:
        encoding = thread.submit(tokenizer.encode, "The quick brown fox. " * 50_000)
        turns = 0
        while not encoding.done():
            time.sleep(0.001)
            turns += 1
    assert turns > 10, "it takes 200 ms"


def test_one_that_cannot_encode_says_so() -> None:
    library = Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match="cannot encode it: WordPiece error"):
        JsonTokenizer(library).encode("日")


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    KINDS["byte_level"]().save(str(path))
    tokenizer = JsonTokenizer.load(str(path))
    assert tokenizer.vocab_size == KINDS["byte_level"]().get_vocab_size()
    assert tokenizer.encode("the dog") == KINDS["byte_level"]().encode("the dog").ids


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(StartError, match=r"is not a tokenizer\.json: Model missing"):
        JsonTokenizer.load(str(path))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "LIBRARY", "no_such_package")
    with pytest.raises(StartError, match=r"needs the package no_such_package: pip install 'ironbatch\[tokenizer\]'"):
        JsonTokenizer.load("x.json")
