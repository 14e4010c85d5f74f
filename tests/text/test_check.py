"""A --tokenizer that cannot be used is told before anything starts, with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ironbatch.text import check
from ironbatch.text.check import main, tokenizer_problem
from tests.text.small import KINDS


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    KINDS["byte_level"]().save(str(path))
    return path


@pytest.mark.parametrize("path", ["", "byte"])
def test_no_file_no_problem(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "is_library_missing", lambda: True)
    assert tokenizer_problem(path) is None


def test_a_good_file(good: Path) -> None:
    assert tokenizer_problem(str(good)) is None
    assert main(str(good)) == 0


def test_a_file_of_the_built_in_s_name(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good.rename(good.with_name("byte"))
    monkeypatch.chdir(good.parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert tokenizer_problem("./byte") is None


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    remedy = "; give a tokenizer.json, or byte"
    for name, said in {
        "none": f"cannot be read: No such file or directory{remedy}",
        ".": "is a directory; give the tokenizer.json in it",
        "pipe": f"is not a regular file{remedy}",
    }.items():
        problem = tokenizer_problem(str(tmp_path / name))
        assert problem is not None
        assert problem.endswith(said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not a tokenizer.json: EOF while parsing"),
        ("{}", "is not a tokenizer.json: Model missing"),
        ("\x00\xff", "is not a tokenizer.json: stream did not contain valid UTF-8"),
        ('{"model":{"type":"BPE","vocab":{},"merges":[["a","b"]]}}', "Token `a` out of vocabulary"),
        ('{"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"u"}}', "the tokenizer cannot encode it"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="latin-1")
    problem = tokenizer_problem(str(path))
    assert problem is not None
    assert said in problem
    assert problem.endswith("; give a tokenizer.json, or byte")
    assert "\n" not in problem
    assert len(problem) < 400


def test_a_load_that_takes_too_long(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LOAD_LIMIT_S", 0.001)
    assert "was not loaded within 0.001 s" in str(tokenizer_problem(str(good)))


def test_a_library_that_crashes(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: object, **options: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], -6, b"", b"panicked")

    monkeypatch.setattr(check.subprocess, "run", killed)
    assert "makes the package tokenizers crash" in str(tokenizer_problem(str(good)))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "is_library_missing", lambda: True)
    said = "'x.json' needs the package tokenizers, which is not installed: pip install 'ironbatch[tokenizer]'"
    assert tokenizer_problem("x.json") == said


def test_the_supervisor_does_not_load_it() -> None:
    """It forks; and the library is 10 MB."""
    code = "import ironbatch.text.check, sys; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
