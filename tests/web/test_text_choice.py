"""Lines with text: from a text row, which a backend fills, and from token ids by a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.backends.mock import MockBackend
from ironbatch.errors import RequestRejected
from ironbatch.layout import FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, NO_TOKEN_ID
from ironbatch.text.byte_level import ByteTokenizer
from ironbatch.text_rows import TextRow, TokenUsage
from ironbatch.web import stream as stream_module
from ironbatch.web.collector import TokenCollector
from tests.web.fakes import assert_well_formed, in_loop, parsed, turn
from tests.web.test_choices import UNADMITTED
from tests.web.test_collector import GENERATION, LANE, Client, Worker

REAL = {"backend": "real", "backend_url": "http://127.0.0.1:9/v1"}
STATS = json.dumps(UNADMITTED, separators=(",", ":"))[1:-1]
BAD = b"\xff"


class TextWorker(Worker):
    """With the test in the scheduler's part. Its tokens are words of a text row, or bytes."""

    def __init__(self, *, has_rows: bool) -> None:
        super().__init__(MockBackend, total_kv_blocks=256, **(REAL if has_rows else {}))
        self.has_rows = has_rows
        tokenizer = ByteTokenizer(is_readable=False)
        self.collector = TokenCollector(self.engine, LANE, GENERATION, self.small.clock, tokenizer)
        self.places: dict[int, int] = {}
        self.produced: dict[int, int] = {}

    def ask(self, text: bytes | None = b"once", max_new_tokens: int = 20, **fields: Any) -> Client:
        client = self.submit(4, max_new_tokens, text=text, **fields)
        for choice in client.stream.choices:
            self.produced[choice.slot] = 0
            self.places[choice.slot] = TextRow(self.segment.texts[choice.slot]).first_piece if self.has_rows else 0
        return client

    def publish(self, slot: int, *pieces: bytes, ids: list[int] | None = None, **end: int) -> None:
        """A token for each piece, and maybe the end: `reason`, `code`. Without rows a piece is one byte."""
        before = self.produced[slot]
        for index, piece in enumerate(pieces, before):
            if self.has_rows:
                self.places[slot] = TextRow(self.segment.texts[slot]).append(self.places[slot], piece)
                self.segment.tokens[slot, 4 + index] = NO_TOKEN_ID if ids is None else ids[index - before]
            else:
                self.segment.tokens[slot, 4 + index] = piece[0]
        self.produced[slot] += len(pieces)
        reason = end.get("reason", FINISH_NONE)
        if not pieces and reason in (FINISH_LENGTH, FINISH_STOP):
            reason |= layout.FINISH_WITHOUT_TOKEN
        row = self.segment.slots[slot]
        row["error_code"] = end.get("code", layout.ERROR_NONE)
        row["published"] = (int(row["generation"]) << 32) | (reason << 24) | self.produced[slot]

    def more(self, client: Client, *pieces: bytes, **others: Any) -> None:
        self.publish(client.slot, *pieces, **others)
        self.collector.collect()

    def row(self, client: Client) -> TextRow:
        return TextRow(self.segment.texts[client.slot])

    def spoil(self, slot: int) -> None:
        """Somebody else has the slot."""
        self.segment.tokens[slot] = 1
        if self.has_rows:
            self.segment.texts[slot] = BAD[0]


@pytest.fixture
def rows() -> Iterator[TextWorker]:
    worker = TextWorker(has_rows=True)
    yield worker
    worker.close()


@pytest.fixture
def ids() -> Iterator[TextWorker]:
    worker = TextWorker(has_rows=False)
    yield worker
    worker.close()


# -------------------------------------------------------------------------------------------------------- the lines


@in_loop
async def test_the_lines_of_a_backend_that_has_text(rows: TextWorker) -> None:
    client = rows.ask()
    rows.more(client, b" Hello", b'"\n', "é日".encode())
    rows.more(client, b"", reason=FINISH_STOP)
    assert client.send.body.decode() == (
        '{"token_index":0,"text":" Hello","done":false}\n'
        '{"token_index":1,"text":"\\"\\n","done":false}\n'
        '{"token_index":2,"text":"é日","done":false}\n'
        '{"token_index":3,"text":"","done":true}\n'
    )


@in_loop
async def test_and_of_a_request_without_a_text_there(rows: TextWorker) -> None:
    client = rows.ask(None)
    rows.more(client, b"a", reason=FINISH_LENGTH)
    assert client.send.body == b'{"token_index":0,"text":"a","done":true}\n'


@in_loop
async def test_details_name_tokens_that_are_known_and_what_was_counted(rows: TextWorker) -> None:
    client = rows.ask(details=True)
    rows.more(client, b" a", b" b", ids=[5, NO_TOKEN_ID])
    rows.row(client).write_usage(TokenUsage(12, -1))
    rows.more(client, b" c", ids=[7], reason=FINISH_LENGTH)
    assert client.send.body.decode() == (
        '{"token_index":0,"token_id":5,"text":" a","done":false}\n'
        '{"token_index":1,"token_id":null,"text":" b","done":false}\n'
        f'{{"token_index":2,"token_id":7,"text":" c","done":true,"finish_reason":"length",{STATS},'
        '"usage":{"prompt_tokens":12,"completion_tokens":null}}\n'
    )


@in_loop
async def test_an_end_without_a_token(rows: TextWorker) -> None:
    plain, detailed = rows.ask(), rows.ask(details=True)
    for client in (plain, detailed):
        rows.more(client, b"a", ids=[3])
        rows.more(client, reason=FINISH_STOP)
    assert plain.send.body.splitlines()[1] == b'{"token_index":1,"text":"","done":true}'
    usage = '"usage":{"prompt_tokens":null,"completion_tokens":null}'
    assert detailed.send.body.splitlines()[1].decode() == (
        f'{{"token_index":1,"text":"","done":true,"finish_reason":"stop",{STATS},{usage}}}'
    )


@in_loop
async def test_several_choices(rows: TextWorker) -> None:
    client = rows.ask(b"twice", choices=2, details=True, flags=layout.FLAG_TEXT)
    first, second = (choice.slot for choice in client.stream.choices)
    assert [TextRow(rows.segment.texts[slot]).prompt for slot in (first, second)] == [b"twice", b"twice"]
    assert int(rows.segment.slots[second]["flags"]) == layout.FLAG_TEXT
    rows.publish(second, b"x", b"y", ids=[1, 2])
    rows.publish(first, b"z", reason=FINISH_LENGTH)
    rows.collector.collect()
    rows.publish(second, reason=FINISH_STOP)
    rows.collector.collect()
    lines = parsed(client.send.body)
    assert [(line["choice"], line["text"], line["done"]) for line in lines] == [
        (0, "z", True),
        (1, "x", False),
        (1, "y", False),
        (1, "", True),
    ]
    assert b'{"token_index":0,"choice":1,"token_id":1,"text":"x","done":false}\n' in client.send.body


@in_loop
async def test_tokens_are_decoded_for_a_request_with_a_text_alone(ids: TextWorker) -> None:
    told, silent = ids.ask(), ids.ask(None)
    for client in (told, silent):
        ids.more(client, *(bytes((byte,)) for byte in "aé".encode()))
        ids.more(client, b"!", reason=FINISH_LENGTH)
    assert told.send.body.decode() == (
        '{"token_index":0,"text":"a","done":false}\n'
        '{"token_index":1,"text":"","done":false}\n'
        '{"token_index":2,"text":"é","done":false}\n'
        '{"token_index":3,"text":"!","done":true}\n'
    )
    assert silent.send.body.splitlines()[-1] == b'{"token_index":3,"done":true}'


@in_loop
async def test_details_of_decoded_tokens_have_no_usage(ids: TextWorker) -> None:
    client = ids.ask(details=True)
    ids.more(client, b"a", b"b", reason=FINISH_LENGTH)
    assert client.send.body.decode() == (
        '{"token_index":0,"token_id":97,"text":"a","done":false}\n'
        f'{{"token_index":1,"token_id":98,"text":"b","done":true,"finish_reason":"length",{STATS}}}\n'
    )


@pytest.mark.parametrize("how", ["with its token", "bare", "error", "timeout"])
@in_loop
async def test_an_incomplete_character_is_in_the_last_line(ids: TextWorker, how: str) -> None:
    client = ids.ask()
    if how == "with its token":
        ids.more(client, b"a", b"\xc3", reason=FINISH_LENGTH)
    else:
        ids.more(client, b"a", b"\xc3")
    if how == "bare":
        ids.more(client, reason=FINISH_STOP)
    elif how == "error":
        ids.more(client, reason=FINISH_ERROR, code=layout.ERROR_BACKEND)
    elif how == "timeout":
        assert ids.collector.end(client.stream, RequestRejected("timeout", "too long", status=504))
    texts = [line["text"] for line in parsed(client.send.body)]
    assert texts == (["a", "\ufffd"] if how == "with its token" else ["a", "", "\ufffd"])


# -------------------------------------------------------------------------------------------------------- its errors


@in_loop
async def test_the_backends_words_for_an_error(rows: TextWorker) -> None:
    client, detailed = rows.ask(), rows.ask(details=True)
    for one in (client, detailed):
        rows.more(one, b"a")
        rows.row(one).write_note('the model server says "no"')
        rows.more(one, reason=FINISH_ERROR, code=layout.ERROR_BACKEND)
    error = {"type": "backend_error", "message": 'the model server says "no"', "param": None}
    end = parsed(client.send.body)[-1]
    assert end == {"token_index": 1, "text": "", "done": True, "error": error}
    usage = {"prompt_tokens": None, "completion_tokens": None}
    assert parsed(detailed.send.body)[-1] == end | UNADMITTED | {"usage": usage}


@in_loop
async def test_and_for_one_before_the_first_token(rows: TextWorker) -> None:
    client = rows.ask()
    rows.row(client).write_note("context of 512 tokens exceeded")
    rows.more(client, reason=FINISH_ERROR, code=layout.ERROR_REQUEST)
    with pytest.raises(RequestRejected, match="context of 512 tokens exceeded") as caught:
        await client.stream.ended
    assert (caught.value.type, caught.value.status) == ("backend_refused", 400)


@in_loop
async def test_one_that_is_not_there_may_be_asked_again(rows: TextWorker) -> None:
    client = rows.ask()
    rows.more(client, reason=FINISH_ERROR, code=layout.ERROR_UNAVAILABLE)
    with pytest.raises(RequestRejected, match="the model server is away") as caught:
        await client.stream.ended
    assert (caught.value.type, caught.value.status) == ("engine_unavailable", 503)
    assert caught.value.retry_after_s


@in_loop
async def test_a_note_on_a_good_end_is_no_error(rows: TextWorker) -> None:
    client = rows.ask()
    rows.row(client).write_note("something to know")
    rows.more(client, b"a", reason=FINISH_STOP)
    assert client.send.body == b'{"token_index":0,"text":"a","done":true}\n'


@in_loop
async def test_a_timeout_is_its_own_error(rows: TextWorker) -> None:
    client = rows.ask()
    rows.more(client, b"a")
    rows.row(client).write_note("the backend's")
    assert rows.collector.end(client.stream, RequestRejected("timeout", "too long", status=504))
    assert parsed(client.send.body)[-1]["error"]["message"] == "too long"


# ------------------------------------------------------------------------------------------------------- the slot

READS = ["row", "ids"]


@pytest.mark.parametrize("kind", READS)
@in_loop
async def test_a_slow_reader_outlives_its_slot(kind: str, rows: TextWorker, ids: TextWorker) -> None:
    worker = rows if kind == "row" else ids
    client = worker.ask(details=True)
    slot = client.slot
    client.send.stall()
    worker.more(client, b"a")
    await turn()
    worker.more(client, b"b", b"c")
    worker.more(client, b"d", reason=FINISH_LENGTH)
    assert worker.owned_slots() == 0
    worker.spoil(slot)
    client.send.resume()
    await client.stream.ended
    assert [line["text"] for line in parsed(client.send.body)] == ["a", "b", "c", "d"]


def test_a_new_request_in_a_slot_sees_nothing_of_the_last(rows: TextWorker) -> None:
    @in_loop
    async def use(text: bytes | None) -> None:
        client = rows.ask(text)
        slot = rows.row(client)
        assert (slot.prompt, slot.note, slot.usage) == (text or b"", "", (-1, -1))
        slot.write_note("why")
        slot.write_usage(TokenUsage(1, 2))
        rows.more(client, b"x", reason=FINISH_STOP)

    for text in (b"a longer prompt", b"s", None):
        rows.collector._next_slot = 0
        use(text)


# ------------------------------------------------------------------------------------------------------ any course

COUNT = 3
moves = st.tuples(st.sampled_from(["publish", "more", "stall", "resume", "turn"]), st.integers(0, COUNT - 1))
pieces = st.lists(st.binary(min_size=1, max_size=1) | st.sampled_from([b"\xc3", b"\xa9", b"\xe6"]), max_size=4)
ends = st.sampled_from([FINISH_LENGTH, FINISH_STOP, FINISH_ERROR])


@given(
    st.lists(st.tuples(moves, pieces), max_size=15),
    st.lists(st.tuples(ends, pieces), min_size=COUNT, max_size=COUNT),
    st.sampled_from([3, stream_module.MAX_CHUNK_LINES]),
    st.booleans(),
    st.booleans(),
)
def test_in_any_order_and_any_chunks_each_choice_gets_its_own_text(
    course: list[Any],
    finals: list[Any],
    chunk_lines: int,
    has_rows: bool,  # noqa: FBT001
    has_details: bool,  # noqa: FBT001
) -> None:
    with patch.object(stream_module, "MAX_CHUNK_LINES", chunk_lines):
        run_course(course, finals, has_rows=has_rows, has_details=has_details)


@in_loop
async def run_course(course: list[Any], finals: list[Any], *, has_rows: bool, has_details: bool) -> None:
    worker = TextWorker(has_rows=has_rows)
    try:
        client = worker.ask(choices=COUNT, max_new_tokens=100, details=has_details)
        slots = [choice.slot for choice in client.stream.choices]
        said: list[list[bytes]] = [[] for _ in slots]

        def publish(choice: int, some: list[bytes], reason: int = FINISH_NONE) -> None:
            # A row has whole characters, a tokenizer gives bytes.
            some = [piece.decode("latin-1").encode() for piece in some] if has_rows else some
            said[choice] += some
            worker.publish(slots[choice], *some, reason=reason, code=int(reason == FINISH_ERROR))

        for (what, choice), some in course:
            if what in ("publish", "more") and some:
                publish(choice, some)
                if what == "more":
                    worker.collector.collect()
            elif what == "turn":
                await turn(3)
            elif what in ("stall", "resume"):
                getattr(client.send, what)()
        for choice, (reason, some) in enumerate(finals):
            publish(choice, some, reason)
            worker.collector.collect()
            worker.spoil(slots[choice])
        client.send.resume()
        await check(client, said, [reason for reason, _ in finals])
    finally:
        worker.close()


async def check(client: Client, said: list[list[bytes]], reasons: list[int]) -> None:
    if not any(said) and set(reasons) == {FINISH_ERROR}:
        with pytest.raises(RequestRejected):
            await client.stream.ended
        return
    await client.stream.ended
    assert_well_formed(client.send)
    lines = parsed(client.send.body)
    for choice, parts in enumerate(said):
        mine = [line for line in lines if line["choice"] == choice]
        assert [line["token_index"] for line in mine] == list(range(len(mine)))
        assert len(mine) - len(parts) in {0, 1}
        assert [line["done"] for line in mine] == [False] * (len(mine) - 1) + [True]
        assert "".join(line["text"] for line in mine) == b"".join(parts).decode(errors="replace")
        assert ("error" in mine[-1]) == (reasons[choice] == FINISH_ERROR)
