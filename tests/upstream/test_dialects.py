"""What is posted, and what the events of both dialects say."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.upstream import types
from ironbatch.upstream.dialects import LlamaCppDialect, OpenAIDialect, message_in, root_of
from ironbatch.upstream.problems import UpstreamBroken, UpstreamRefused
from ironbatch.upstream.types import NO_TOKEN_ID, CompletionRequest, Delta, Piece, Prompt, Usage

REQUEST = CompletionRequest(Prompt("hello", None), 5, 0.5, 0.9, 0, 7, ignore_eos=False)
NOTHING = Delta([], None, None, is_done=False)
DIALECTS = [OpenAIDialect(), LlamaCppDialect()]


def read(dialect: Any, *events: Any) -> list[Delta]:
    reader = dialect.reader()
    return [reader.read(event if isinstance(event, bytes) else json.dumps(event).encode()) for event in events]


def llama_event(content: str, tokens: list[int], predicted: int) -> dict[str, Any]:
    return {"index": 0, "content": content, "tokens": tokens, "stop": False, "tokens_predicted": predicted}


def test_unknown_token_id_is_the_layouts() -> None:
    assert types.NO_TOKEN_ID == layout.NO_TOKEN_ID


class TestRequests:
    def test_openai_body_holds_no_field_it_can_do_without(self) -> None:
        assert json.loads(OpenAIDialect().body(REQUEST, "m")) == {
            "model": "m",
            "prompt": "hello",
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def test_openai_body_with_all(self) -> None:
        request = REQUEST._replace(prompt=Prompt(None, [1, 2]), top_k=40, ignore_eos=True)
        fields = json.loads(OpenAIDialect().body(request, "m"))
        assert (fields["prompt"], fields["top_k"], fields["ignore_eos"]) == ([1, 2], 40, True)

    def test_llama_cpp_body(self) -> None:
        request = REQUEST._replace(prompt=Prompt(None, [1, 2]), ignore_eos=True)
        assert json.loads(LlamaCppDialect().body(request, "m")) == {
            "prompt": [1, 2],
            "n_predict": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 0,
            "min_p": 0,
            "seed": 7,
            "stream": True,
            "return_tokens": True,
            "ignore_eos": True,
            "cache_prompt": True,
        }

    @pytest.mark.parametrize("dialect", DIALECTS)
    @given(seed=st.integers(0, 2**63 - 1))
    def test_seed_fits_32_bits_and_is_never_the_random_one(self, dialect: Any, seed: int) -> None:
        assert 0 <= json.loads(dialect.body(REQUEST._replace(seed=seed), "m"))["seed"] < 2**32 - 1

    @pytest.mark.parametrize("base", ["http://h:1/v1", "http://h:1/v1/"])
    def test_paths(self, base: str) -> None:
        assert OpenAIDialect().path_of(base) == "http://h:1/v1/completions"
        assert LlamaCppDialect().path_of(base) == "http://h:1/completion"
        assert root_of("http://h:1/proxy") == "http://h:1/proxy"


class TestOpenAI:
    def test_pieces_finish_usage_and_done(self) -> None:
        assert read(
            OpenAIDialect(),
            {"choices": [{"index": 0, "text": " a", "finish_reason": None}], "usage": None},
            {"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}},
            b"[DONE]",
        ) == [
            Delta([Piece(" a", NO_TOKEN_ID)], None, None, is_done=False),
            Delta([Piece("b", NO_TOKEN_ID)], "length", None, is_done=False),
            Delta([], None, Usage(3, 2), is_done=False),
            Delta([], None, None, is_done=True),
        ]

    @pytest.mark.parametrize("event", [
        {}, {"choices": None}, {"choices": []}, {"choices": [{}]}, {"choices": [{"text": None}]},
        {"choices": [{"text": ""}]}, {"choices": [{"text": "", "finish_reason": ""}]}, {"error": None},
    ])  # fmt: skip
    def test_events_that_say_nothing(self, event: dict[str, Any]) -> None:
        assert read(OpenAIDialect(), event) == [NOTHING]

    @pytest.mark.parametrize(("told", "reason"), [
        ("stop", "stop"), ("length", "length"), ("content_filter", "stop"), ("abort", "stop"), ("?", "stop"),
    ])  # fmt: skip
    def test_finish_reasons(self, told: str, reason: str) -> None:
        assert read(OpenAIDialect(), {"choices": [{"text": "", "finish_reason": told}]})[0].finish_reason == reason

    @pytest.mark.parametrize(("usage", "expected"), [
        ({}, Usage(-1, -1)), ({"prompt_tokens": 3}, Usage(3, -1)), ({"prompt_tokens": -5}, Usage(-1, -1)),
        ({"prompt_tokens": 0, "completion_tokens": 2**70}, Usage(0, -1)),
    ])  # fmt: skip
    def test_counts_that_are_not_told(self, usage: dict[str, Any], expected: Usage) -> None:
        assert read(OpenAIDialect(), {"usage": usage})[0].usage == expected


class TestLlamaCpp:
    def test_tokens_and_final_event(self) -> None:
        final = {"content": "", "tokens": [], "stop": True, "stop_type": "limit"}
        assert read(
            LlamaCppDialect(),
            llama_event(" a", [5], 1),
            llama_event("b", [6], 2),
            final | {"tokens_predicted": 2, "tokens_evaluated": 3},
        ) == [
            Delta([Piece(" a", 5)], None, None, is_done=False),
            Delta([Piece("b", 6)], None, None, is_done=False),
            Delta([], "length", Usage(3, 2), is_done=True),
        ]

    def test_id_of_a_character_of_several_tokens_is_not_known(self) -> None:
        deltas = read(LlamaCppDialect(), llama_event("a", [5], 1), llama_event("😀", [9], 4), llama_event("b", [6], 5))
        assert [delta.pieces for delta in deltas] == [[Piece("a", 5)], [Piece("😀", NO_TOKEN_ID)], [Piece("b", 6)]]

    def test_text_of_several_ids_stands_with_the_last(self) -> None:
        assert read(LlamaCppDialect(), llama_event("é", [5, 6], 2))[0].pieces == [Piece("", 5), Piece("é", 6)]

    @pytest.mark.parametrize(("event", "pieces"), [
        ({"content": "a"}, [Piece("a", NO_TOKEN_ID)]),
        ({"content": "a", "tokens": []}, [Piece("a", NO_TOKEN_ID)]),
        ({"content": "a", "tokens": [5]}, [Piece("a", 5)]),  # without tokens_predicted, the ids are believed
        ({"content": "", "tokens": [5]}, [Piece("", 5)]),
        ({"content": "a", "tokens": [-1]}, [Piece("a", NO_TOKEN_ID)]),
        ({"content": "a", "tokens": [2**31]}, [Piece("a", NO_TOKEN_ID)]),
        ({"content": "", "tokens": []}, []),
        ({"content": None, "tokens": None}, []),
    ])  # fmt: skip
    def test_pieces(self, event: dict[str, Any], pieces: list[Piece]) -> None:
        assert read(LlamaCppDialect(), event)[0].pieces == pieces

    @pytest.mark.parametrize(
        ("stop_type", "reason"), [("eos", "stop"), ("word", "stop"), ("limit", "length"), ("", "stop")]
    )
    def test_stop_types(self, stop_type: str, reason: str) -> None:
        assert read(LlamaCppDialect(), {"stop": True, "stop_type": stop_type})[0].finish_reason == reason


@pytest.mark.parametrize("dialect", DIALECTS)
class TestFaults:
    @pytest.mark.parametrize("data", [
        b"junk", b"[1]", b"{", b'{"choices": 1, "tokens": 1}', b'"\xff"', b"\xff", b"[" * 100_000, b"null",
        b'{"choices": [{"text": "\\ud83d"}], "content": "\\ud83d"}', b'{"choices": {"a": 1}, "content": 5}',
    ])  # fmt: skip
    def test_malformed(self, dialect: Any, data: bytes) -> None:
        with pytest.raises(UpstreamBroken, match="can't be read") as caught:
            read(dialect, data)
        assert len(caught.value.message) <= 400
        assert caught.value.message.isprintable()

    @given(data=st.binary(max_size=40) | st.text().map(str.encode))
    def test_any_data_is_read_or_broken(self, dialect: Any, data: bytes) -> None:
        with contextlib.suppress(UpstreamBroken):
            dialect.reader().read(data)

    def test_error_event(self, dialect: Any) -> None:
        with pytest.raises(UpstreamBroken, match='error: "out of memory"'):
            read(dialect, {"error": {"message": "out of\nmemory", "code": 500}})

    def test_refusal_in_the_stream(self, dialect: Any) -> None:
        with pytest.raises(UpstreamRefused, match=r"^the context is exceeded$"):
            read(dialect, {"error": {"message": "the context is exceeded", "code": 400}})


@pytest.mark.parametrize(("value", "message"), [
    ({"error": {"message": "m"}}, "m"), ({"error": "m"}, "m"), ({"message": "m"}, "m"), ({"detail": "m"}, "m"),
    ({"detail": [{"loc": ["body"], "msg": "m"}]}, "m"), ("m", "m"), ({}, None), ({"error": {}}, None), ([], None),
    ({"error": {"message": " "}, "detail": "m"}, "m"), (5, None), (None, None),
    ({"error": {"error": {"error": {"error": {"error": "too deep"}}}}}, None),
])  # fmt: skip
def test_messages(value: Any, message: str | None) -> None:
    assert message_in(value) == message
