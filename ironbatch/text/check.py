"""Whether a --tokenizer can be used, asked before anything starts.

The file is loaded in a process of its own: the library is not ours, may abort or take its time, and the supervisor,
which asks, must have no other thread when it forks. `python -m ironbatch.text.check PATH` is that process.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys

from ironbatch.config import BYTE_TOKENIZER
from ironbatch.errors import StartError
from ironbatch.limits import quoted
from ironbatch.text.json_file import INSTALL, LIBRARY, MOST_REASON_CHARS, JsonTokenizer, is_library_missing

LOAD_LIMIT_S = 60.0
SAMPLE = "Hello, world"
REMEDY = f"give a tokenizer.json, or {BYTE_TOKENIZER}"


def tokenizer_problem(path: str) -> str | None:
    """What is wrong with a value of --tokenizer, and the remedy; None if it can be used, or is empty."""
    if path in {"", BYTE_TOKENIZER}:
        return None
    if is_library_missing():
        return f"{quoted(path)} needs the package {LIBRARY}, which is not installed: {INSTALL}"
    return _file_problem(path) or _load_problem(path)


def _file_problem(path: str) -> str | None:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return f"{quoted(path)} is a directory; give the tokenizer.json in it"
        if not stat.S_ISREG(mode):
            return f"{quoted(path)} is not a regular file; {REMEDY}"
        with open(path, "rb"):
            return None
    except OSError as problem:
        return f"{quoted(path)} cannot be read: {problem.strerror}; {REMEDY}"


def _load_problem(path: str) -> str | None:
    command = [sys.executable, "-m", "ironbatch.text.check", path]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LOAD_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{quoted(path)} was not loaded within {LOAD_LIMIT_S:g} s; {REMEDY}"
    if child.returncode == 0:
        return None
    if said := child.stdout.decode(errors="replace"):
        return f"{said}; {REMEDY}"
    return f"{quoted(path)} makes the package {LIBRARY} crash; {REMEDY}"


def main(path: str) -> int:
    """Load it and use it once. Returns 1 for a file that cannot be used, and says why on the standard output."""
    try:
        tokenizer = JsonTokenizer.load(path)
        decoder = tokenizer.decoder()
        for token_id in tokenizer.encode(SAMPLE):
            decoder.feed(token_id)
    except (StartError, ValueError) as problem:
        said = " ".join(str(problem).removeprefix("--tokenizer ").split())
        sys.stdout.write(said if len(said) <= MOST_REASON_CHARS else said[:MOST_REASON_CHARS] + "…")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
