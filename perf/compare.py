"""Compare the result files with others: `make bench-compare BASE=main`, or `python perf/compare.py FOLDER`.

BASE is a folder with result files, or whatever git knows as a commit, whose files are taken. pyperf does the
comparison, and leaves out what has not changed significantly.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import results


def files_of(base: str, scratch: Path) -> Path:
    """The folder with the result files of `base`."""
    if Path(base).is_dir():
        return Path(base)
    place = results.DIRECTORY.parent
    for name in results.NAMES:
        shown = subprocess.run(
            ["git", "show", f"{base}:./results/{name}.json"], cwd=place, capture_output=True, check=False
        )
        if shown.returncode == 0:
            (scratch / f"{name}.json").write_bytes(shown.stdout)
    if not any(scratch.iterdir()):
        raise SystemExit(f"error: BASE={base} is neither a folder nor a commit that has perf/results/*.json")
    return scratch


def main() -> None:
    """Compare each file that both have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a folder, or a commit")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = files_of(arguments.base, Path(scratch))
        for name in results.NAMES:
            before, after = base / f"{name}.json", results.DIRECTORY / f"{name}.json"
            if before.exists() and after.exists():
                print(f"== {name}", flush=True)
                for path in (before, after):
                    results.Figures(path.parent, name)  # says which file is damaged
                words = ["-m", "pyperf", "compare_to", "--table", "--table-format=md", str(before), str(after)]
                if subprocess.run([sys.executable, *words], check=False).returncode != 0:
                    raise SystemExit(f"error: pyperf cannot compare {before} with {after}")


if __name__ == "__main__":
    main()
