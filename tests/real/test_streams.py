"""What a real model says comes through unchanged: text, token ids, counts and errors."""

from __future__ import annotations

import json

from tests.end_to_end.server import Server, post
from tests.real.answers import Answer, generate, greedy
from tests.real.model import ModelServer, OwnAnswer, skip_without_model_server
from tests.real.prompts import MULTIBYTE_PROMPT, OUTPUT_TOKENS

skip_without_model_server()

SLOTS = 8


def assert_same(answer: Answer, own: OwnAnswer) -> None:
    """Text, ids and counts are the model server's own."""
    assert answer.is_whole, answer.last
    assert answer.text == own.text
    assert answer.token_ids == own.token_ids
    assert answer.last["finish_reason"] == "length"
    assert answer.last["usage"] == {"prompt_tokens": own.prompt_tokens, "completion_tokens": len(own.token_ids)}


def test_stream_is_the_model_servers_own_answer(server: Server, own_answers: dict[str, OwnAnswer]) -> None:
    for prompt, own in own_answers.items():
        (answer,) = generate(server, greedy(OUTPUT_TOKENS, prompt=prompt))
        assert_same(answer, own)


def test_eight_streams_at_once_are_its_own_answers_too(server: Server, own_answers: dict[str, OwnAnswer]) -> None:
    prompts = list(own_answers)[:SLOTS]
    answers = generate(server, *(greedy(OUTPUT_TOKENS, prompt=prompt) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(answer, own_answers[prompt])


def test_prompt_as_token_ids_is_the_same_prompt(
    server: Server, model: ModelServer, own_answers: dict[str, OwnAnswer]
) -> None:
    for prompt, own in list(own_answers.items())[:3]:
        (answer,) = generate(server, greedy(OUTPUT_TOKENS, prompt_token_ids=model.token_ids(prompt)))
        assert_same(answer, own)


def test_prompt_of_which_only_the_length_is_given_has_that_length(server: Server) -> None:
    (answer,) = generate(server, greedy(8, prompt_tokens=17, ignore_eos=True))
    assert answer.is_whole
    assert answer.last["usage"] == {"prompt_tokens": 17, "completion_tokens": 8}


def test_characters_of_several_tokens_come_whole(server: Server, model: ModelServer) -> None:
    """One character is then one line, though it took three tokens, and nobody says which: a line is not a token."""
    own = model.ask(MULTIBYTE_PROMPT, OUTPUT_TOKENS)
    (answer,) = generate(server, greedy(OUTPUT_TOKENS, prompt=MULTIBYTE_PROMPT))
    assert answer.is_whole
    assert answer.text == own.text
    assert "\N{REPLACEMENT CHARACTER}" not in answer.text
    assert None in answer.token_ids
    assert {token for token in answer.token_ids if token is not None} <= set(own.token_ids)
    assert answer.last["usage"]["completion_tokens"] == OUTPUT_TOKENS > len(answer.lines)


def test_end_of_sequence_ends_the_stream(server: Server) -> None:
    """Asked for a long answer, the model stops by itself; with ignore_eos it does not."""
    prompt = "<|im_start|>user\nSay only: yes<|im_end|>\n<|im_start|>assistant\n"
    (short,) = generate(server, greedy(200, prompt=prompt))
    assert short.is_whole
    assert short.last["finish_reason"] == "stop"
    assert short.last["usage"]["completion_tokens"] < 200
    (long,) = generate(server, greedy(200, prompt=prompt, ignore_eos=True))
    assert long.last["finish_reason"] == "length"
    assert long.last["usage"]["completion_tokens"] == 200


def test_seed_and_temperature_reach_the_model(server: Server) -> None:
    hot = {"prompt": "Once upon a time", "max_new_tokens": 24, "temperature": 1.5, "details": True, "ignore_eos": True}
    texts = {answer.text for answer in generate(server, *(hot | {"seed": seed} for seed in range(4)))}
    assert len(texts) == 4
    cold = hot | {"temperature": 0, "max_new_tokens": 2}
    assert len({answer.text for answer in generate(server, *(cold | {"seed": seed} for seed in range(4)))}) == 1


def test_choices_are_streams_of_their_own(server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_new_tokens": 16, "temperature": 1.5, "ignore_eos": True, "n": 3}
    (answer,) = generate(server, body)
    texts = {k: "".join(line["text"] for line in answer.lines if line["choice"] == k) for k in range(3)}
    assert len(set(texts.values())) == 3
    assert sum(line["done"] for line in answer.lines) == 3


def test_lines_without_details_have_text_and_no_id(server: Server, own_answers: dict[str, OwnAnswer]) -> None:
    prompt, own = next(iter(own_answers.items()))
    (answer,) = generate(server, greedy(OUTPUT_TOKENS, prompt=prompt) | {"details": False})
    assert answer.text == own.text
    assert all(line.keys() == {"token_index", "text", "done"} for line in answer.lines)


def test_prompt_that_exceeds_the_models_context_is_refused_in_its_words(server: Server) -> None:
    """That request alone: the next one is served."""
    status, body = post(server, greedy(4, prompt="1, " * 1000))
    assert status == 400
    error = json.loads(body)["error"]
    assert error["type"] == "backend_refused"
    assert "exceeds the available context size (2048 tokens)" in error["message"]
    assert generate(server, greedy(4, prompt="1, 2, 3,"))[0].is_whole
