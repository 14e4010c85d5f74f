"""Prompts that are text, against whole servers: the built-in tokenizer, a tokenizer.json, and a wrong one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ironbatch.errors import EXIT_USAGE
from ironbatch.text.words import WORDS
from tests.end_to_end.clients import fetch
from tests.end_to_end.server import FORMS, command, running
from tests.text.small import KINDS

pytestmark = pytest.mark.end_to_end

forms = pytest.mark.parametrize("form", FORMS)


def lines_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.splitlines()]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    KINDS["byte_level"]().save(str(path))
    return path


def test_the_mock_answers_text_with_the_same_readable_text() -> None:
    with running(workers=2, mock_token_latency_us=0) as server:
        body = {"prompt": "Once upon a time", "max_new_tokens": 40, "seed": 5}
        answers = [fetch(server.port, "POST", "/generate", body) for _ in range(6)]
        assert {answer.status for answer in answers} == {200}
        assert len({answer.body for answer in answers}) == 1
        texts = [line["text"] for line in lines_of(answers[0].body)]
        assert all(text.strip(" ,.") in WORDS for text in texts)


@forms
def test_a_tokenizer_json(form: str, tokenizer: Path) -> None:
    with running(form, workers=1, mock_token_latency_us=0, tokenizer=str(tokenizer)) as server:
        library = KINDS["byte_level"]()
        body = {"prompt": "The quick brown fox", "max_new_tokens": 200, "details": True}
        lines = lines_of(fetch(server.port, "POST", "/generate", body).body)
        known = [line["token_id"] for line in lines if library.id_to_token(line["token_id"]) is not None]
        assert "".join(line["text"] for line in lines) == library.decode(known)
        assert len(lines) == 200
        long = fetch(server.port, "POST", "/generate", {"prompt": "The quick brown fox " * 20_000})
        assert long.status == 400
        assert "tokens; this engine's limit is" in json.loads(long.body)["error"]["message"]


@forms
def test_a_wrong_tokenizer_is_told_before_anything_starts(form: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": 1}')
    words, environ = command(form, {"tokenizer": str(path), "workers": 1})
    result = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, cwd="/", check=False)
    assert result.returncode == EXIT_USAGE
    assert "--tokenizer: " in result.stderr
    assert "is not a tokenizer.json: " in result.stderr
    assert result.stderr.rstrip().endswith("; give a tokenizer.json, or byte")
    assert "Traceback" not in result.stderr
