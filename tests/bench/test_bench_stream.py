"""The stream checker: good streams pass however they are cut, and no fault passes."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.bench.stream import (
    DATA_AFTER_DONE,
    MALFORMED_LINE,
    MAX_LINE_BYTES,
    MAX_SHOWN_CHARS,
    OUT_OF_ORDER,
    STREAM_ERROR,
    TOO_MANY_TOKENS,
    TRUNCATED,
    ExpectedStreams,
    StreamChecker,
    StreamFault,
    shown,
)
from tests.bench.server import line, stream

COUNTS = st.integers(0, 25)


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    """`text` in chunks, cut at these places (modulo its length)."""
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def outcome(max_new_tokens: int, chunks: list[bytes]) -> tuple[str, int]:
    """The fault's name ("" for none) and the tokens received."""
    checker = StreamChecker(ExpectedStreams().of(max_new_tokens))
    try:
        lines = sum(checker.feed(chunk) for chunk in chunks)
        checker.finish()
    except StreamFault as fault:
        return fault.name, checker.tokens
    assert lines == checker.lines
    return "", checker.tokens


CUTS = st.lists(st.integers(0, 2000), max_size=30)


@given(asked=COUNTS, cuts=CUTS)
def test_good_stream_passes_however_it_is_cut(asked: int, cuts: list[int]) -> None:
    expected = ExpectedStreams().of(asked)
    assert expected.continues(stream(asked), 0)
    assert expected.length_bytes == len(stream(asked))
    assert outcome(asked, cut(stream(asked), cuts)) == ("", asked)


@given(asked=st.integers(2, 25), data=st.data(), cuts=CUTS)
def test_stream_may_end_early(asked: int, data: st.DataObject, cuts: list[int]) -> None:
    tokens = data.draw(st.integers(1, asked - 1))
    assert outcome(asked, cut(stream(tokens), cuts)) == ("", tokens)
    checker = StreamChecker(ExpectedStreams().of(asked))
    checker.feed(stream(tokens))
    assert checker.ended_early


@given(asked=COUNTS, cuts=CUTS)
def test_fields_not_asked_for_and_other_spacing_pass(asked: int, cuts: list[int]) -> None:
    lines = [{**json.loads(text), "token_id": 7, "more": None} for text in stream(asked).splitlines()]
    text = "".join(json.dumps(item) + "\r\n" for item in lines).encode()
    assert outcome(asked, cut(text, cuts)) == ("", asked)


@given(asked=COUNTS, place=st.integers(0, 2000), byte=st.integers(0, 255), cuts=CUTS)
def test_any_one_byte_changed_is_a_fault(asked: int, place: int, byte: int, cuts: list[int]) -> None:
    text = bytearray(stream(asked))
    place %= len(text)
    if text[place] == byte:
        byte ^= 1
    text[place] = byte
    assert outcome(asked, cut(bytes(text), cuts))[0]


@given(asked=COUNTS, place=st.integers(0, 2000), cuts=CUTS)
def test_any_one_byte_lost_is_a_fault(asked: int, place: int, cuts: list[int]) -> None:
    text = stream(asked)
    place %= len(text)
    assert outcome(asked, cut(text[:place] + text[place + 1 :], cuts))[0]


@given(asked=COUNTS, length=st.integers(0, 2000), cuts=CUTS)
def test_any_early_end_is_truncated(asked: int, length: int, cuts: list[int]) -> None:
    text = stream(asked)
    assert outcome(asked, cut(text[: length % len(text)], cuts))[0] == TRUNCATED


@given(asked=COUNTS, more=st.binary(min_size=1, max_size=60), cuts=CUTS)
def test_any_data_after_the_last_line_is_a_fault(asked: int, more: bytes, cuts: list[int]) -> None:
    assert outcome(asked, cut(stream(asked) + more, cuts)) == (DATA_AFTER_DONE, asked)


@given(asked=st.integers(2, 25), data=st.data(), cuts=CUTS)
def test_lines_lost_doubled_or_swapped_are_faults(asked: int, data: st.DataObject, cuts: list[int]) -> None:
    lines = stream(asked).splitlines(keepends=True)
    index = data.draw(st.integers(0, asked - 2))
    mutations = {
        "lost": lines[:index] + lines[index + 1 :],
        "doubled": lines[: index + 1] + lines[index:],
        "swapped": [*lines[:index], lines[index + 1], lines[index], *lines[index + 2 :]],
        "last lost": lines[:-1],
        "last doubled": [*lines, lines[-1]],
    }
    for mutated in mutations.values():
        assert outcome(asked, cut(b"".join(mutated), cuts))[0]


@given(
    asked=st.integers(0, 4),
    lines=st.lists(st.builds(line, st.integers(-1, 5), done=st.booleans()) | st.binary(max_size=40), max_size=8),
    cuts=CUTS,
)
def test_how_a_stream_is_cut_never_changes_the_verdict(asked: int, lines: list[bytes], cuts: list[int]) -> None:
    text = b"".join(lines)
    assert outcome(asked, cut(text, cuts)) == outcome(asked, [text])


@pytest.mark.parametrize(
    ("asked", "text", "name", "tokens"),
    [
        (3, b"", TRUNCATED, 0),
        (3, line(0) + line(2), OUT_OF_ORDER, 1),
        (3, line(0) + line(0), OUT_OF_ORDER, 1),
        (3, line(-1), OUT_OF_ORDER, 0),
        (2, line(0) + line(1) + line(2, done=True), TOO_MANY_TOKENS, 2),
        (0, line(0), TOO_MANY_TOKENS, 0),
        (0, line(0, done=True) + line(1, done=True), DATA_AFTER_DONE, 0),
        (3, line(0) + b"\n", MALFORMED_LINE, 1),
        (3, b'{"token_index":true,"done":false}\n', MALFORMED_LINE, 0),
        (3, b'{"token_index":0.0,"done":false}\n', MALFORMED_LINE, 0),
        (3, b'{"token_index":0,"done":0}\n', MALFORMED_LINE, 0),
        (3, b'{"token_index":0}\n', MALFORMED_LINE, 0),
        (3, b"<html>\n", MALFORMED_LINE, 0),
        (3, b'{"token_index":0,"done":false,"x":' + b"[" * 20_000 + b"\n", MALFORMED_LINE, 0),
        (3, line(0) + b"x" * (MAX_LINE_BYTES + 1), MALFORMED_LINE, 1),
        (3, line(0) + line(1, done=True, error={"type": "lost", "message": "m"}), f"{STREAM_ERROR}: lost", 1),
        (3, line(0) + line(1, done=True, error={"type": 7}), MALFORMED_LINE, 1),
    ],
)
def test_each_fault_has_its_name(asked: int, text: bytes, name: str, tokens: int) -> None:
    assert outcome(asked, [text]) == (name, tokens)
    assert outcome(asked, [text[start : start + 1000] for start in range(0, len(text), 1000)]) == (name, tokens)


def test_error_line_tells_the_servers_message() -> None:
    checker = StreamChecker(ExpectedStreams().of(3))
    with pytest.raises(StreamFault, match="the device is gone"):
        checker.feed(line(0, done=True, error={"type": "lost", "message": "the device is gone"}))


@given(st.text() | st.binary())
def test_what_is_shown_is_short_and_printable(text: str | bytes) -> None:
    assert shown(text).isprintable()
    assert len(shown(text)) <= MAX_SHOWN_CHARS


@given(lengths=st.lists(COUNTS, min_size=1), data=st.data(), cuts=CUTS)
def test_lengths_share_one_text_and_do_not_disturb_each_other(
    lengths: list[int], data: st.DataObject, cuts: list[int]
) -> None:
    expected = ExpectedStreams()
    streams = [(length, expected.of(length)) for length in lengths]  # each may have made the common text longer
    length, chosen = data.draw(st.sampled_from(streams))
    checker = StreamChecker(chosen)
    for chunk in cut(stream(length), cuts):
        checker.feed(chunk)
    checker.finish()
    assert checker.lines == max(length, 1)
    place = data.draw(st.integers(0, len(stream(length))))
    assert chosen.partial_line(place) == stream(length)[:place].rsplit(b"\n", 1)[-1]
