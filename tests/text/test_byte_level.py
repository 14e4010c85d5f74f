"""The built-in tokenizer, and the words that stand for tokens without meaning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ironbatch.text.byte_level import ByteTokenizer
from ironbatch.text.tokenizer import Tokenizer, create_tokenizer
from ironbatch.text.words import WORDS, WordDecoder, word
from tests.support import small_config

texts = st.text(st.characters(exclude_categories=["Cs"]))
BYTES: Tokenizer = ByteTokenizer(is_readable=False)


@given(texts)
def test_any_text_comes_out_whole(text: str) -> None:
    token_ids = BYTES.encode(text)
    assert bytes(token_ids) == text.encode()
    decoder = BYTES.decoder()
    parts = [decoder.feed(token) for token in token_ids]
    assert "".join(parts) == text
    assert decoder.end() == ""
    assert all(len(part) <= 1 for part in parts)


@given(st.binary())
def test_invalid_bytes_are_replaced_as_python_does_it(data: bytes) -> None:
    decoder = BYTES.decoder()
    assert "".join(map(decoder.feed, data)) + decoder.end() == data.decode(errors="replace")


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 300)))
def test_any_ids_are_some_text(token_ids: list[int]) -> None:
    for tokenizer in (BYTES, ByteTokenizer(is_readable=True)):
        decoder = tokenizer.decoder()
        ("".join(map(decoder.feed, token_ids)) + decoder.end()).encode()


def test_ids_beyond_the_bytes_are_words() -> None:
    decoder = BYTES.decoder()
    assert [decoder.feed(token) for token in (0xE4, 300, 65)] == ["", "\ufffd" + word(300), "A"]


def test_a_word_is_readable_and_always_the_same() -> None:
    assert len(set(WORDS)) == len(WORDS) > 200
    assert all(entry.isascii() and entry.isalpha() for entry in WORDS)
    decoder = WordDecoder()
    for token_id in range(32_000):
        text = decoder.feed(token_id)
        assert text.startswith(" ")
        assert text.strip(" ,.") in WORDS
    assert (word(7), word(13), word(29), word(-2)) == (" that", f" {WORDS[13]},", f" {WORDS[29]}.", "")


def test_each_backend_gets_the_tokenizer_that_it_needs() -> None:
    mock = create_tokenizer(small_config())
    assert mock is not None
    assert mock.decoder().feed(65) == word(65)
    assert mock.encode("é") == [0xC3, 0xA9]
    real = {"backend": "real", "backend_url": "http://127.0.0.1:1/v1"}
    assert create_tokenizer(small_config(**real)) is None
    named = create_tokenizer(small_config(**real, tokenizer="byte"))
    assert named is not None
    assert named.decoder().feed(65) == "A"
