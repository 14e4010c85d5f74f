"""Finding a backend by its name, and what an operator reads when that fails."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ironbatch.backends.mock import MockBackend
from ironbatch.backends.mock_kv import MockKVBackend
from ironbatch.backends.registry import create_backend, prepare_backend
from ironbatch.config import Config
from ironbatch.errors import ConfigError, StartError
from tests.support import ScriptedBackend, small_config

Install = Callable[[str, str], str]

_numbers = itertools.count()  # a module that was imported once is not read again

GOOD = "from tests.support import ScriptedBackend"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution of one module, whose `target` becomes a backend. Returns the backend's name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def installed(source: str, target: str) -> str:
        name = f"plugin{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[ironbatch.backends]\n{name} = {name}{target}\n")
        return name

    return installed


def start_error(config: Config) -> str:
    with pytest.raises(StartError) as caught:
        create_backend(config)
    return str(caught.value)


def test_mock_needs_no_entry_point() -> None:
    assert type(create_backend(small_config())) is MockBackend


def test_mock_with_kv_is_another_one() -> None:
    assert type(create_backend(small_config(mock_kv=True))) is MockKVBackend


KERNELS = """
import sys
from ironbatch.backends.registry import prepare_backend
from ironbatch.config import Config
for mock_kv in (False, True):
    prepare_backend(Config(mock_kv=mock_kv))
    print("ironbatch.kernels.mock_kv" in sys.modules)
"""


def test_kernels_of_the_mocks_kv_are_compiled_for_whom_they_are() -> None:
    done = subprocess.run([sys.executable, "-c", KERNELS], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True"]


def test_plug_in_is_not_loaded_before_it_is_created(install: Install) -> None:
    prepare_backend(small_config(backend=install("raise SystemExit(1)", ":Mine")))


@pytest.mark.parametrize("source", [GOOD, f"{GOOD} as Other\ndef ScriptedBackend(config): return Other(config)"])
def test_entry_point_is_a_class_or_a_function(install: Install, source: str) -> None:
    backend = create_backend(small_config(backend=install(source, ":ScriptedBackend")))
    assert type(backend) is ScriptedBackend
    assert backend.starts == 0


def test_it_is_made_from_the_configuration(install: Install) -> None:
    source = f"{GOOD}\nclass Mine(ScriptedBackend):\n    def __init__(self, config): self.mine = config"
    config = small_config(backend=install(source, ":Mine"), backend_url="http://elsewhere:1")
    assert create_backend(config).mine is config  # type: ignore[attr-defined]


FAULTS = {
    "module does not load": ("import no_such_module", ":Mine", "ModuleNotFoundError: No module named 'no_such_module'"),
    "no such name": ("", ":Mine", "AttributeError: module '{name}' has no attribute 'Mine'"),
    "cannot be made": ("def Mine(config): raise OSError('no device')", ":Mine", "OSError: no device"),
    "takes no configuration": ("def Mine(): pass", ":Mine", "TypeError: Mine() takes 0 positional arguments but 1 was"),
    "a module": ("", "", "TypeError: 'module' object is not callable"),
    "speaks in paragraphs": ("def Mine(config): raise OSError('no\\n\\n  device')", ":Mine", "OSError: no device"),
}


@pytest.mark.parametrize(("source", "target", "reason"), FAULTS.values(), ids=FAULTS)
def test_fault_of_a_plug_in_is_one_line_with_its_name(install: Install, source: str, target: str, reason: str) -> None:
    name = install(source, target)
    message = start_error(small_config(backend=name))
    assert message.startswith(f"backend {name} ({name}{target}): {reason.format(name=name)}")
    assert "\n" not in message


def test_what_is_no_backend_is_refused(install: Install) -> None:
    name = install("def Mine(config): return object()", ":Mine")
    expected = f"backend {name} ({name}:Mine) is not an ironbatch.backends.base.Backend"
    assert start_error(small_config(backend=name)) == expected


def test_abstract_backend_is_refused(install: Install) -> None:
    source = "from ironbatch.backends.base import Backend\nclass Mine(Backend):\n    def __init__(self, config): pass"
    message = start_error(small_config(backend=install(source, ":Mine")))
    assert "abstract" in message
    assert "execute" in message
    assert "\n" not in message


def test_plug_in_that_has_gone_since_the_configuration_was_read(install: Install, tmp_path: Path) -> None:
    name = install(GOOD, ":ScriptedBackend")
    config = small_config(backend=name)
    shutil.rmtree(tmp_path / f"{name}-1.dist-info")
    assert start_error(config) == f"no backend is named {name}"


def test_configuration_knows_what_is_installed(install: Install) -> None:
    with pytest.raises(ConfigError, match="'nothing' is not a backend of this installation; use mock"):
        small_config(backend="nothing")
    assert small_config(backend=install(GOOD, ":ScriptedBackend")).backend.startswith("plugin")
