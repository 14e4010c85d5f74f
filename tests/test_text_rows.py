"""The text of a slot: what is written is read, whatever stood there before, and nothing leaves its row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.text_rows import LONG, NO_USAGE, TextRow, TokenUsage, piece_bytes, prompt_room

MAX_MODEL_LEN = 400
ROW_BYTES = layout.text_row_bytes(MAX_MODEL_LEN)
GARBAGE = 0xA5

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).map(str.encode)


def row_between_walls() -> tuple[np.ndarray, TextRow]:  # type: ignore[type-arg]
    """A row of a table of three, full of what others have left."""
    table = np.full((3, ROW_BYTES), GARBAGE, np.uint8)
    return table, TextRow(table[1])


@given(texts, st.lists(texts, max_size=30), st.lists(st.integers(0, 30), max_size=4))
def test_what_is_appended_is_read_in_any_portions(prompt: bytes, pieces: list[bytes], portions: list[int]) -> None:
    table, row = row_between_walls()
    row.write_prompt(prompt)
    place = row.first_piece
    for piece in pieces:
        assert row.append(place, piece) == place + piece_bytes(len(piece))
        place += piece_bytes(len(piece))
    assert row.prompt == prompt
    found: list[bytes] = []
    reader = row.first_piece
    for portion in [*portions, len(pieces)]:
        some, reader = row.read(reader, min(portion, len(pieces) - len(found)))
        found += some
    assert found == pieces
    assert reader == place
    assert (table[[0, 2]] == GARBAGE).all()


@pytest.mark.parametrize("size", [0, 1, LONG - 1, LONG, LONG + 1])
def test_pieces_of_any_length(size: int) -> None:
    _, row = row_between_walls()
    row.write_prompt(b"p")
    end = row.append(row.append(row.first_piece, b"x" * size), b"next")
    assert row.read(row.first_piece, 2) == ([b"x" * size, b"next"], end)


def test_a_row_can_be_filled_to_its_last_byte_and_no_further() -> None:
    table, row = row_between_walls()
    row.write_prompt(b"p" * prompt_room(ROW_BYTES))
    assert row.first_piece == row.pieces_end
    row.write_note("n" * layout.TEXT_NOTE_BYTES)
    assert row.prompt == b"p" * prompt_room(ROW_BYTES)
    with pytest.raises(AssertionError):
        row.append(row.first_piece, b"")
    with pytest.raises(AssertionError):
        row.write_prompt(b"p" * (prompt_room(ROW_BYTES) + 1))
    assert (table[[0, 2]] == GARBAGE).all()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=600))
def test_a_note_is_cut_between_characters(note: str) -> None:
    table, row = row_between_walls()
    row.write_prompt(b"")
    assert row.note == ""
    row.write_note(note)
    if len(note.encode()) <= layout.TEXT_NOTE_BYTES:
        assert row.note == note
    else:
        assert row.note.endswith("…")
        assert note.startswith(row.note[:-1])
        assert layout.TEXT_NOTE_BYTES - 8 < len(row.note.encode()) <= layout.TEXT_NOTE_BYTES
    assert (table[[0, 2]] == GARBAGE).all()


def test_a_new_prompt_forgets_the_last_request() -> None:
    _, row = row_between_walls()
    row.write_prompt(b"one")
    row.write_note("why")
    row.write_usage(TokenUsage(3, 4))
    assert row.usage == (3, 4)
    row.write_prompt(b"")
    assert (row.prompt, row.note, row.usage) == (b"", "", NO_USAGE)
