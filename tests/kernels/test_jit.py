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
        self.prefix: list[str] = []
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
            [*self.prefix, sys.executable, "-W", "error", "-c", RUN],
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


DAMAGES = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:20],
    "cut in half": lambda data: data[: len(data) // 2],
    "garbage": lambda data: bytes((byte * 7 + 3) % 256 for byte in data),
    "zeros": lambda data: bytes(len(data)),  # as some file systems have it after a power cut
    "text": lambda data: b"not at all what belongs here\n",
}


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("*.nbi", "empty"),
        ("*.nbi", "truncated"),
        ("*.nbi", "garbage"),
        ("*.nbc", "cut in half"),
        ("*.nbc", "zeros"),
        ("*.nbc", "text"),
    ],
)
def test_damaged_file_is_thrown_away_and_made_anew(tree: Tree, pattern: str, damage: str) -> None:
    tree.run()
    (path,) = tree.files(pattern)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    result, hits, log = tree.run()
    assert (result, hits) == (21, COMPILED)
    assert log.startswith(f"WARNING the cache {tree.cache}")
    assert "is damaged (scaled: " in log
    assert log.count("\n") == 1
    assert tree.run() == (21, FROM_CACHE, "")


def test_only_what_is_damaged_is_thrown_away(tree: Tree) -> None:
    """Two processes that start together may both find it; neither must take what the other has made."""
    tree.run()
    (path,) = tree.files("*.nbc")
    other = path.with_name("plan.plan_step-1.py311.1.nbc")
    other.write_bytes(b"another kernel's")
    path.write_bytes(b"")
    tree.run()
    assert other.read_bytes() == b"another kernel's"


def assert_goes_without(tree: Tree, *reasons: str) -> None:
    """Compiled, in no more than a warning, and nothing is kept."""
    result, hits, log = tree.run()
    assert (result, hits) == (21, COMPILED)
    assert log.startswith("WARNING the kernels are compiled anew at each start: their cache ")
    assert log.count("\n") == 1
    for reason in reasons:
        assert reason in log
    assert tree.files("*.nbi") == []  # above all not beside the sources, where nothing tells that it is stale


def test_cache_that_cannot_be_made_costs_a_compilation_and_no_more(tree: Tree) -> None:
    tree.cache.write_text("a file where the directory should be")  # a mode would not stop root
    assert_goes_without(tree, str(tree.cache))


@pytest.mark.parametrize(
    ("options", "reason"), [("ro", "Read-only file system"), ("size=4k", "No space left on device")]
)
def test_cache_on_a_disk_that_takes_nothing(tree: Tree, options: str, reason: str) -> None:
    tree.cache.mkdir()
    command = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs {tree.cache} && exec "$@"', "sh"]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no private mounts here: {probe.stderr.strip()}")
    tree.prefix = command
    assert_goes_without(tree, reason)


def made_directory(tree: Tree) -> Path:
    """The directory with the compiled code, and the control: it is used."""
    tree.run()
    assert tree.run() == (21, FROM_CACHE, "")
    (directory,) = tree.cache.iterdir()
    return directory


def test_cache_is_the_users_alone(tree: Tree) -> None:
    directory = made_directory(tree)
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)  # as earlier versions have made it
    assert tree.run() == (21, FROM_CACHE, "")
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o1777, 0o770])
def test_cache_that_others_may_write_is_not_loaded(tree: Tree, mode: int) -> None:
    directory = made_directory(tree)
    directory.chmod(mode)
    result, hits, log = tree.run()
    assert (result, hits) == (21, COMPILED)
    assert f"others may write there (mode {mode:o})" in log
    assert "IRONBATCH_CACHE_DIR" in log


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory away")
def test_cache_of_another_user_is_not_loaded(tree: Tree) -> None:
    directory = made_directory(tree)
    os.chown(directory, 65534, 65534)
    result, hits, log = tree.run()
    assert (result, hits) == (21, COMPILED)
    assert "it belongs to user 65534, and this process is user 0" in log


def test_link_in_the_place_of_the_cache_is_not_followed(tree: Tree) -> None:
    directory = made_directory(tree)
    elsewhere = directory.rename(tree.root / "elsewhere")
    directory.symlink_to(elsewhere)
    result, hits, log = tree.run()
    assert (result, hits) == (21, COMPILED)
    assert "their cache" in log


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
