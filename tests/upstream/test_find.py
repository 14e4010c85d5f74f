"""What is found out about a model server, and what a server that answers badly is taken for."""

import asyncio
import json
from typing import Any

import pytest

from ironbatch.upstream.answers import Answer
from ironbatch.upstream.dialects import LlamaCppDialect, OpenAIDialect
from ironbatch.upstream.find import find, shown_model
from ironbatch.upstream.problems import UpstreamAway, UpstreamBroken, UpstreamMisset, UpstreamProblem
from ironbatch.upstream.types import Found

BASE = "http://host:8000/v1"
MODELS = {"object": "list", "data": [{"id": "first"}, {"id": "second", "max_model_len": 2048}]}
PROPS = {"total_slots": 4, "default_generation_settings": {"n_ctx": 512, "params": {}}, "model_path": "/m"}


class FakeClient:
    """Answers each path as told: with an answer, a JSON value (status 200), or a problem. Unknown paths are 404."""

    base_url = BASE

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    async def get(self, url: str) -> Answer:
        answer = self.answers.get(url.rsplit("/", maxsplit=1)[1], (404, "not here"))
        if isinstance(answer, UpstreamProblem):
            raise answer
        status, value = answer if isinstance(answer, tuple) else (200, answer)
        if isinstance(value, bytes):
            return Answer(url, status, "text/html", value)
        return Answer(
            url, status, "application/json", value.encode() if isinstance(value, str) else json.dumps(value).encode()
        )


def found(wanted: str = "", **answers: Any) -> Found:
    return asyncio.run(find(FakeClient(**answers), wanted))


def test_openai() -> None:
    model, slots, context, dialect, is_listed = found(models=MODELS)
    assert (model, slots, context) == ("first", 0, 0)
    assert is_listed
    assert isinstance(dialect, OpenAIDialect)


def test_context_that_vllm_tells() -> None:
    assert found("second", models=MODELS).context_tokens == 2048


def test_llama_cpp() -> None:
    model, slots, context, dialect, is_listed = found(models=MODELS, props=PROPS)
    assert (model, slots, context) == ("first", 4, 512)
    assert is_listed
    assert isinstance(dialect, LlamaCppDialect)


def test_llama_cpp_without_context() -> None:
    assert found(models=MODELS, props={"total_slots": 1})[1:3] == (1, 0)


@pytest.mark.parametrize("models", [MODELS, (404, ""), (501, ""), {"data": []}, "junk"])
def test_wanted_model_needs_no_list(models: Any) -> None:
    assert found("mine", models=models).model == "mine"


@pytest.mark.parametrize("models", [{"data": []}, {}, "junk", b"<html>", {"data": [{"name": "no id"}]}, [], (204, "")])
def test_no_model_to_be_found(models: Any) -> None:
    with pytest.raises(UpstreamMisset, match=r"--backend-url"):
        found(models=models)


@pytest.mark.parametrize("props", [(404, ""), (405, ""), (501, ""), {"error": "Unexpected endpoint"}, b"<html>"])
def test_clear_answers_that_it_is_no_llama_cpp(props: Any) -> None:
    assert isinstance(found(models=MODELS, props=props).dialect, OpenAIDialect)


@pytest.mark.parametrize(
    "props",
    [
        (500, "oops"), (502, b"<html>"), (400, {"error": "?"}), (302, ""), "junk", [1], {"total_slots": 0},
        {"total_slots": "4"}, {"total_slots": -1}, {"total_slots": None}, {"total_slots": 1.5},
        UpstreamBroken("silent"),
    ],
)  # fmt: skip
def test_props_that_fail_do_not_change_the_dialect(props: Any) -> None:
    with pytest.raises(UpstreamBroken):
        found(models=MODELS, props=props)


LOADING = (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})


@pytest.mark.parametrize("answers", [
    {"models": LOADING}, {"models": MODELS, "props": LOADING}, {"models": (503, "no backend")}, {"models": (429, "")},
    {"models": UpstreamAway("refused")},
])  # fmt: skip
@pytest.mark.parametrize("wanted", ["", "mine"])
def test_not_there_yet(answers: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UpstreamAway):
        found(wanted, **answers)


@pytest.mark.parametrize(("answers", "words"), [
    ({"models": (401, {"error": {"message": "no key"}})}, r'"no key".*--backend-api-key-file'),
    ({"models": MODELS, "props": (401, "")}, "--backend-api-key-file"),
    ({"models": (403, "")}, "--backend-api-key-file"),
    ({"models": (404, "")}, "http://host:8000/v1/models .*404.*--backend-url.*--backend-model"),
    ({"models": (302, "")}, "redirects.*--backend-url"),
    ({"models": (400, "what?")}, "what.*--backend-url"),
])  # fmt: skip
def test_operators_errors(answers: dict[str, Any], words: str) -> None:
    with pytest.raises(UpstreamMisset, match=words):
        found(**answers)


def test_server_that_fails() -> None:
    with pytest.raises(UpstreamBroken, match=r"500"):
        found(models=(500, ""))


def test_names_are_shown_whole_up_to_200_characters() -> None:
    assert shown_model("m" * 200) == "m" * 200
    assert shown_model("m" * 201) == "m" * 200 + "…"
    assert shown_model("a\x1b[2J") == "a�[2J"


def test_a_model_that_the_server_does_not_list_is_noted() -> None:
    assert found("second", models=MODELS).is_listed
    assert not found("third", models=MODELS).is_listed
    assert found("third").is_listed, "a server that lists nothing denies nothing"


def test_a_model_without_a_name_is_none() -> None:
    assert found(models={"data": [{"id": ""}, {"id": "named"}]}).model == "named"
    with pytest.raises(UpstreamMisset, match="names no model"):
        found(models={"data": [{"id": ""}]})
