"""The kernels' cache: what spoils it costs a compilation, and never a wrong answer or a start that fails.

Each run is a process of its own with a cache of its own, over a copy of the two modules that matter and a tiny kernel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ironbatch.kernels import jit

PACKAGE = Path(jit.__file__).parent.parent

HELPER = """
from ironbatch.kernels.jit import inline

@inline
def scale(x):
    return x * {factor}
"""

USER = """
from ironbatch.kernels.helper import scale
from ironbatch.kernels.jit import kernel

@kernel("int64(int64)")
def scaled(x):
    return scale(x) + 1
"""

RUN = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
from ironbatch.kernels import jit
jit.entry_point = lambda dispatcher: dispatcher  # which knows where its code is from
from ironbatch.kernels.user import scaled
print(scaled(10), len(scaled.overloads), sum(scaled.stats.cache_hits.values()))
"""

COMPILED, FROM_CACHE = 0, 1


class Tree:
    """A small package, and processes that import it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        kernels = root / "ironbatch" / "kernels"
        kernels.mkdir(parents=True)
        for name in ("layout.py", "limits.py", "kernels/jit.py", "kernels/__init__.py"):
            shutil.copy(PACKAGE / name, root / "ironbatch" / name)
        (root / "ironbatch" / "__init__.py").touch()
        (kernels / "user.py").write_text(USER)
        self.write_helper(2)

    def write_helper(self, factor: int) -> None:
        (self.root / "ironbatch" / "kernels" / "helper.py").write_text(HELPER.format(factor=factor))

    def run(self, **environ: str) -> tuple[int, int, str]:
        """The kernel's result for 10, whether it came from the cache, and what was logged."""
        environ = {**os.environ, "IRONBATCH_CACHE_DIR": str(self.cache), "NUMBA_BOUNDSCHECK": "0", **environ}
        environ["PYTHONDONTWRITEBYTECODE"] = "1"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", RUN],
            cwd=self.root,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        result, overloads, hits = map(int, done.stdout.split())
        assert overloads == 1
        return result, hits, done.stderr

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.root.rglob(pattern))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_second_start_compiles_nothing(tree: Tree) -> None:
    assert tree.run() == (21, COMPILED, "")
    assert tree.run() == (21, FROM_CACHE, "")
    assert all(path.is_relative_to(tree.cache) for path in tree.files("*.nb?"))


def test_change_of_an_imported_helper_alone_is_noticed(tree: Tree) -> None:
    """The index that numba keeps looks at the kernel's file only, and would answer 21."""
    assert tree.run() == (21, COMPILED, "")
    tree.write_helper(3)
    assert tree.run() == (31, COMPILED, "")
    tree.write_helper(2)
    assert tree.run() == (21, FROM_CACHE, "")  # each version keeps its own


@pytest.mark.parametrize(("pattern", "length"), [("*.nbi", 0), ("*.nbi", 20), ("*.nbc", 20)])
def test_truncated_file_is_thrown_away_and_made_anew(tree: Tree, pattern: str, length: int) -> None:
    tree.run()
    (path,) = tree.files(pattern)
    os.truncate(path, length)
    result, hits, log = tree.run()
    assert (result, hits) == (21, COMPILED)
    assert log.startswith("WARNING kernel scaled, cached: ")
    assert tree.run() == (21, FROM_CACHE, "")


def test_cache_that_cannot_be_written_costs_a_compilation_and_no_more(tree: Tree) -> None:
    tree.cache.write_text("a file where the directory should be")  # a mode would not stop root
    result, hits, log = tree.run()
    assert (result, hits) == (21, COMPILED)
    assert log.startswith("WARNING the kernels are compiled anew at each start")
    assert tree.files("*.nbi") == []  # above all not beside the sources, where nothing tells that it is stale


def test_code_without_bounds_checks_is_not_taken_for_code_with_them(tree: Tree) -> None:
    assert tree.run()[1] == COMPILED
    assert tree.run(NUMBA_BOUNDSCHECK="1")[1] == COMPILED
    assert tree.run(NUMBA_BOUNDSCHECK="1")[1] == FROM_CACHE
    assert tree.run()[1] == FROM_CACHE


def test_digest_depends_on_every_source_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "ironbatch"
    shutil.copytree(PACKAGE / "kernels", copy / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("layout.py", "limits.py"):
        shutil.copy(PACKAGE / name, copy / name)
    original = jit.source_digest()
    monkeypatch.setattr(jit, "__file__", str(copy / "kernels" / "jit.py"))
    assert jit.source_digest() == original
    sources = [*(copy / "kernels").glob("*.py"), copy / "layout.py", copy / "limits.py"]
    digests = {original}
    for source in sources:
        with source.open("a") as file:
            file.write("\n# changed\n")
        digests.add(jit.source_digest())
    assert len(digests) == 1 + len(sources)


@pytest.mark.parametrize(
    ("environ", "base"),
    [
        ({"IRONBATCH_CACHE_DIR": "/a", "CACHE_DIRECTORY": "/b", "XDG_CACHE_HOME": "/c"}, "/a"),
        ({"CACHE_DIRECTORY": "/b", "XDG_CACHE_HOME": "/c"}, "/b"),
        ({"IRONBATCH_CACHE_DIR": "", "XDG_CACHE_HOME": "/c"}, "/c/ironbatch"),
        ({"HOME": "/home/somebody"}, "/home/somebody/.cache/ironbatch"),
    ],
)
def test_place_of_the_cache(environ: dict[str, str], base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IRONBATCH_CACHE_DIR", "CACHE_DIRECTORY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert jit.cache_directory() == Path(base) / f"kernels-{jit.source_digest()}"
