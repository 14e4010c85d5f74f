"""The UAPI needs no Python: a C program gets the tokens that a request alone determines from a node."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ironbatch.driver import abi
from ironbatch.kernels.mock_kv import mock_kv_tokens
from tests.driver.node_process import environment, needs_node, running_node

FOLDER = Path(abi.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "driver.md"
SOURCE = FOLDER / "examples" / "step.c"
SEED = 7  # the program's
NEW_TOKENS = 8  # likewise
PROMPT = [11, 22, 33, 44, 55]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    path = str(tmp_path_factory.mktemp("example") / "step")
    command = ["gcc", "-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O2", "-I", str(FOLDER)]
    subprocess.run([*command, "-o", path, str(SOURCE)], check=True)
    return path


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def expected(prompt: list[int]) -> str:
    context = np.array(prompt + [0] * NEW_TOKENS, np.int32)
    mock_kv_tokens(SEED, context, len(prompt), NEW_TOKENS, -1, 0)
    return " ".join(map(str, context[len(prompt) :].tolist())) + "\n"


@needs_node
def test_the_page_s_example_in_python_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    with running_node(tmp_path, name="device0"):
        command = [sys.executable, "-W", "error", "-c", example]
        subprocess.run(command, cwd=tmp_path, env=environment(), check=True, timeout=120)


def test_it_is_short() -> None:
    assert len(SOURCE.read_text().splitlines()) < 150


@needs_node
@pytest.mark.parametrize("memory", ["auto", "named"])
def test_it_generates_what_the_request_determines(program: str, tmp_path: Path, memory: str) -> None:
    flags = ("--blocks", "16", "--block-bytes", "16", "--max-tokens", "20", "--memory", memory, "--inject", "eio@33")
    with running_node(tmp_path, *flags) as node:
        for prompt in (PROMPT, [7], list(range(1, 20)), PROMPT):  # the last one's blocks have been others'
            result = run(program, node.path, *prompt)
            assert (result.returncode, result.stdout, result.stderr) == (0, expected(prompt), "")
        check_errors(program, node.path)


def check_errors(program: str, path: str) -> None:
    """Its 32 batches have gone well; the next one is to fail."""
    result = run(program, path, *PROMPT)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "step: the batch: Input/output error\nstep: the device says: injected\n"
    result = run(program, path, *range(21))
    assert (result.returncode, result.stderr) == (1, "step: the prompt: Argument list too long\n")


@needs_node
def test_it_says_what_the_device_says(program: str, tmp_path: Path) -> None:
    with running_node(tmp_path, "--blocks", "3", "--block-bytes", "16") as node:
        result = run(program, node.path, *PROMPT)
        assert result.returncode == 1
        assert result.stderr == (
            "step: CLAIM_BLOCKS: No space left on device\n"
            "step: the device says: 4 blocks in a row: the longest free run has 3\n"
        )


@pytest.mark.parametrize("path", ["/dev/null", "/etc/passwd"])
def test_what_is_no_device_is_refused(program: str, path: str) -> None:
    result = run(program, path, *PROMPT)
    assert result.returncode == 1
    if result.stderr != f"step: {path}: Permission denied\n":
        assert result.stderr == ("step: this is not an Ironbatch device of version 1: Inappropriate ioctl for device\n")


def test_a_node_that_is_not_there_is_named(program: str, tmp_path: Path) -> None:
    result = run(program, tmp_path / "device0", *PROMPT)
    assert (result.returncode, result.stderr) == (1, f"step: {tmp_path / 'device0'}: No such file or directory\n")


@pytest.mark.parametrize("arguments", [(), ("/dev/null",), ("/dev/null", *range(249))])
def test_wrong_use_is_said(program: str, arguments: tuple[object, ...]) -> None:
    result = run(program, *arguments)
    assert (result.returncode, result.stderr) == (2, "usage: step NODE TOKEN_ID... (at most 248)\n")


@pytest.mark.parametrize("text", ["x", "1.5", "-1", "99999999999", "2147483648", "", "1 "])
def test_what_is_no_token_id_is_said(program: str, text: str) -> None:
    result = run(program, "/dev/null", 1, text)
    assert (result.returncode, result.stderr) == (2, f"step: {text} is no token id\n")
