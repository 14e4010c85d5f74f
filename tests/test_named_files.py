"""Files that options name: what is wrong with them is told before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ironbatch.config import Config
from ironbatch.named_files import MAX_KEY_CHARS, file_problems, read_api_key


def test_no_file_is_no_key() -> None:
    assert read_api_key("") == ""
    assert file_problems(Config()) == []


@pytest.mark.parametrize("content", ["sesame", "sesame\n", "  sesame \nmore\n", "sesame\r\n"])
def test_the_first_line_is_the_key(content: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(content.encode())
    assert read_api_key(str(path)) == "sesame"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b"\nsecond\n", "is empty"),
        (b"open sesame", "is no key"),
        (b"ses\x07ame", "is no key"),
        ("sésame".encode(), "ASCII"),
        (b"s" * (MAX_KEY_CHARS + 1), "is no key"),
    ],
)
def test_what_is_no_key_is_told_without_repeating_it(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=told) as caught:
        read_api_key(str(path))
    assert "same" not in str(caught.value).replace(str(path), "")


def test_what_is_no_file_does_not_hold_up_the_start(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match=r"no regular file|Is a directory"):
            read_api_key(str(path))


def test_all_wrong_files_are_told_with_their_flags(tmp_path: Path) -> None:
    config = Config(
        backend="real",
        backend_url="http://127.0.0.1:1/v1",
        backend_api_key_file=str(tmp_path / "none"),
        tokenizer=str(tmp_path / "neither"),
    )
    told = file_problems(config)
    assert [problem.partition(":")[0] for problem in told] == ["--backend-api-key-file", "--tokenizer"]
    assert os.strerror(2) in told[0]
