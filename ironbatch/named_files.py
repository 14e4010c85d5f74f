"""Files that options name, looked at before anything starts: a wrong one is told like any other wrong value."""

from __future__ import annotations

import os
import stat

from ironbatch.config import Config
from ironbatch.limits import quoted
from ironbatch.text.check import tokenizer_problem

MAX_KEY_CHARS = 4096


def read_api_key(path: str) -> str:
    """The key of --backend-api-key-file; empty for an empty path.

    Raises:
        ValueError: what is wrong with the file, and the remedy. It never holds what is in it.
    """
    if not path:
        return ""
    remedy = "give a file whose first line is the key"
    try:
        with open(path, encoding="ascii", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{quoted(path)} is no regular file; {remedy}")
            key = file.readline(MAX_KEY_CHARS + 2).strip()
    except UnicodeDecodeError:
        raise ValueError(f"{quoted(path)} holds something else than ASCII text; {remedy}") from None
    except OSError as problem:
        raise ValueError(f"{quoted(path)} cannot be read: {problem.strerror}; {remedy}") from None
    if not key:
        raise ValueError(f"the first line of {quoted(path)} is empty; {remedy}")
    if len(key) > MAX_KEY_CHARS or not key.isprintable() or " " in key:
        raise ValueError(
            f"the first line of {quoted(path)} is no key: it has over {MAX_KEY_CHARS} characters, or spaces or control"
            f" characters within; {remedy}"
        )
    return key


def _open_at_once(path: str, flags: int) -> int:
    """Of a pipe without a writer, too."""
    return os.open(path, flags | os.O_NONBLOCK)


def file_problems(config: Config) -> list[str]:
    """What is wrong with the files that `config` names, each with its flag."""
    problems = []
    try:
        read_api_key(config.backend_api_key_file)
    except ValueError as problem:
        problems.append(f"--backend-api-key-file: {problem}")
    if wrong := tokenizer_problem(config.tokenizer):
        problems.append(f"--tokenizer: {wrong}")
    return problems
