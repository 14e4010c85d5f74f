"""What one upstream stream keeps, and what it would ask for if it broke off now."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from ironbatch import layout
from ironbatch.backends.base import FINISH_LENGTH
from ironbatch.backends.stream import Stream, StreamEnd
from ironbatch.text_rows import TextRow
from ironbatch.upstream.types import CompletionRequest, Enough, Piece, Prompt

ROW_BYTES = layout.text_row_bytes(16)


ONCE = Prompt("once ", None)


def stream(max_tokens: int = 3, prompt: Prompt = ONCE, *, can_continue: bool = True, before: bytes = b"") -> Stream:
    row = TextRow(np.zeros(ROW_BYTES, np.uint8))
    row.write_prompt(b"once ")
    place = row.append(row.first_piece, before) if before else row.first_piece
    request = CompletionRequest(prompt, max_tokens, 0.0, 1.0, 0, 0, ignore_eos=False)
    return Stream(7, request, row, place, can_continue=can_continue)


def test_the_last_piece_goes_out_with_the_finish() -> None:
    one = stream(max_tokens=2)
    assert one.deliver(Piece("a", 1))
    assert not one.deliver(Piece("b", 2))
    assert one.is_complete
    assert list(one.unread) == [(b"a", 1)]
    with pytest.raises(Enough):
        one.deliver(Piece("c", 3))
    one.finish(StreamEnd(FINISH_LENGTH))
    assert list(one.unread) == [(b"a", 1), (b"b", 2)]


def test_text_never_leaves_the_row() -> None:
    one = stream(max_tokens=1000)
    with pytest.raises(Enough):
        deque(map(one.deliver, [Piece("x" * 50, 1)] * 1000), maxlen=0)
    for text, _ in one.unread:
        one.place = one.row.append(one.place, text)
    assert one.row.pieces_end - one.place < 51


def test_what_cannot_be_utf8_is_replaced() -> None:
    one = stream()
    one.deliver(Piece("a\ud800b", 1))
    assert list(one.unread) == [(b"a?b", 1)]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_piece_without_room_is_told_also_if_it_is_the_last(max_tokens: int) -> None:
    one = stream(max_tokens=max_tokens)
    with pytest.raises(Enough):
        one.deliver(Piece("x" * ROW_BYTES, 1))
    assert one.is_full
    assert not one.has_begun


def test_the_rest_of_a_text_is_asked_for_with_the_text_so_far() -> None:
    one = stream(max_tokens=3)
    assert one.request_now().prompt.text == "once "
    assert one.is_whole
    one.deliver(Piece("upon", -2))
    assert one.can_continue
    rest = one.request_now()
    assert (rest.prompt, rest.max_tokens) == (Prompt("once upon", None), 2)
    assert not one.is_whole


def test_the_rest_of_ids_is_asked_for_with_all_ids_or_not_at_all() -> None:
    one = stream(prompt=Prompt(None, [4, 5]))
    one.deliver(Piece("a", 6))
    assert one.can_continue
    assert one.request_now().prompt == Prompt(None, [4, 5, 6])
    one.deliver(Piece("b", layout.NO_TOKEN_ID))
    assert not one.can_continue
    assert not stream(prompt=Prompt(None, [4, layout.NO_TOKEN_ID])).can_continue, "a scheduler before this one lost it"


def test_one_that_must_not_continue_keeps_nothing_for_it() -> None:
    one = stream(can_continue=False)
    assert not one.has_begun
    one.deliver(Piece("a", 1))
    assert one.has_begun
    assert not one.can_continue
    assert stream(before=b"said").has_begun, "the client has it from the scheduler before this one"
