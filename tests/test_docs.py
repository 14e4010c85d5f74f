"""What the documentation names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAILURE_MODES = ROOT / "docs" / "failure-modes.md"
COLUMNS = 5  # what fails, clients see, the operator sees, how long, test


def rows() -> list[list[str]]:
    """The cells of all rows of the page's tables, heads aside."""
    lines = [line for line in FAILURE_MODES.read_text().splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in found if row[0] not in {"what fails", "what happens"} and set(row[0]) != {"-"}]


def names_of_all_tests() -> set[str]:
    """The names of all test functions."""
    names = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                names.add(node.name)
    return names


def test_every_test_that_a_failure_mode_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", FAILURE_MODES.read_text()))
    assert len(named) > 20
    assert named - names_of_all_tests() == set()


def test_every_failure_mode_has_all_cells_and_a_test() -> None:
    assert len(rows()) > 30
    for row in rows():
        assert len(row) == COLUMNS, row
        assert all(row), row
        assert re.search(r"`test_\w+`", row[-1]), row


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    targets = re.findall(r"\]\((?!\w+://)([^)#]+)(?:#[^)]*)?\)", text)
    assert [target for target in targets if not (ROOT / "docs" / target).exists()] == []
