"""What we ship and how it is installed: pins, version, wheel, floors, interpreters."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import ironbatch

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PYTHONS = ("3.11", "3.12", "3.13")
BUILD_TOOLS = {"pip", "setuptools"}  # installed by the Makefile, not required by the package


def direct_requirements() -> list[Requirement]:
    """What pyproject.toml asks for, the developer's tools included."""
    return [Requirement(text) for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]]


def pins() -> dict[str, str]:
    """constraints.txt: canonical name -> version."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    split = [line.partition("==") for line in lines]
    assert all(equals and re.fullmatch(r"[0-9][0-9A-Za-z.]*", version) for _, equals, version in split), lines
    names = [canonicalize_name(name) for name, _, _ in split]
    assert len(set(names)) == len(names), "a package is pinned twice"
    return dict(zip(names, (version for _, _, version in split), strict=True))


def required_by(requirement: Requirement, python: str) -> list[Requirement]:
    """What an installed package itself requires, under another Python than the one that runs this."""
    found = []
    for text in importlib.metadata.requires(requirement.name) or []:
        needed = Requirement(text)
        environments = [
            {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
            for extra in ("", *requirement.extras)
        ]
        if needed.marker is None or any(needed.marker.evaluate(environment) for environment in environments):
            found.append(needed)
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_every_package_that_is_installed_is_pinned(python: str) -> None:
    pinned = pins()
    seen: set[str] = set()
    pending = direct_requirements()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{requirement} is not pinned in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"the pin {name}=={pinned[name]} is not {requirement}"
        if name not in seen:
            seen.add(name)
            pending += required_by(requirement, python)
    assert seen | BUILD_TOOLS >= pinned.keys(), f"pinned, but nothing needs it: {pinned.keys() - seen - BUILD_TOOLS}"


def test_the_pinned_build_backend_is_one_that_pyproject_accepts() -> None:
    (backend,) = (Requirement(text) for text in PYPROJECT["build-system"]["requires"])
    assert backend.specifier.contains(pins()[canonicalize_name(backend.name)])


@pytest.mark.parametrize(
    "name", ["constraints.txt", "constraints-real.txt", "pyproject.toml", "Makefile", ".pre-commit-config.yaml"]
)
def test_no_file_says_where_packages_are_downloaded_from(name: str) -> None:
    text = (ROOT / name).read_text()
    address = (
        r"\w+://\S*|git\+\S*|^[\w.-]+(?:\[.*\])? @ .*|--(?:extra-)?index-url|--find-links|/(?:home|opt|root|tmp)/\S*"
    )
    assert re.findall(address, text, re.MULTILINE) == []


def test_the_supported_pythons_are_the_same_everywhere() -> None:
    classified = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert classified == list(PYTHONS)
    required = SpecifierSet(PROJECT["requires-python"])
    minors = [f"3.{minor}" for minor in range(5, 30)]
    assert [minor for minor in minors if required.contains(f"{minor}.0")] == list(PYTHONS)
    candidates = re.search(r"^CANDIDATES := \$\(or \$\(PYTHON\),(.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert candidates is not None
    assert candidates.group(1).split() == [*(f"python{version}" for version in reversed(PYTHONS)), "python3"]


def test_the_metadata_has_the_code_s_version() -> None:
    assert str(Version(ironbatch.__version__)) == ironbatch.__version__
    try:
        installed = importlib.metadata.version("ironbatch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("ironbatch is not installed in this environment")
    assert installed == ironbatch.__version__


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files in a wheel that is built, offline, from a copy of the tree."""
    if Version(importlib.metadata.version("setuptools")) < Version("77"):
        pytest.skip("the setuptools of this environment is older than pyproject.toml allows")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("ironbatch", "tests"):  # a package that must not be taken for one of ours
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as backend; backend.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel_names: set[str]) -> None:
    shipped = {".py", ".c", ".h", ".typed"}
    expected = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "ironbatch").rglob("*") if path.suffix in shipped
    } | {"ironbatch/py.typed"}
    found = {name for name in wheel_names if not name.partition("/")[0].endswith(".dist-info")}
    assert found == expected


def test_the_wheel_carries_the_licence_and_the_command(wheel_names: set[str]) -> None:
    info = f"ironbatch-{ironbatch.__version__}.dist-info"
    assert wheel_names >= {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"}


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    # PYTHONPATH: an editable install must not lead it to another copy of the package.
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_the_floors_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_import_that_goes_up_is_found(tmp_path: Path) -> None:
    """The control: the test above can fail."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "ironbatch", tmp_path / "ironbatch", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "ironbatch/limits.py").open("a") as module:
        module.write("\nimport ironbatch.config\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert "ironbatch.limits is not allowed to import ironbatch.config" in result.stdout


def test_make_says_which_python_it_needs(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "env", f"PYTHON={old}", f"VENV={tmp_path}/venv"]
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"none of these is Python 3.11, 3.12 or 3.13 with its venv module: {old}" in result.stderr
    assert not (tmp_path / "venv").exists()
