"""Compare result files: `make bench-compare BASE=main`, or `python perf/compare.py BASE [NEW]`.

BASE and NEW are each a folder with result files, or whatever git knows as a commit, whose files are taken; NEW is
perf/results unless it is given. pyperf does the comparison: "2x faster" says that NEW takes half of BASE's time, and
what has not changed significantly is left out. It compares times; so look at the yardsticks first, which Ironbatch's
code does not touch: by as much as they differ, the machine does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import results


def files_of(name: str, scratch: Path) -> Path:
    """The folder with the result files of a folder or commit; those of a commit are put into `scratch`."""
    if Path(name).is_dir():
        found = Path(name)
    else:
        found = scratch / name.replace("/", "-")
        found.mkdir()
        for script in results.NAMES:
            shown = subprocess.run(
                ["git", "show", f"{name}:./results/{script}.json"],
                cwd=results.DIRECTORY.parent,
                capture_output=True,
                check=False,
            )
            if shown.returncode == 0:
                (found / f"{script}.json").write_bytes(shown.stdout)
    if not any((found / f"{script}.json").exists() for script in results.NAMES):
        raise SystemExit(f"error: {name} is neither a folder nor a commit that has result files, such as wake_up.json")
    return found


def compare(name: str, before: Path, after: Path) -> None:
    """Print pyperf's table for one result file, and what the yardsticks have to say."""
    old, new = (results.Figures(path.parent, name) for path in (before, after))
    print(f"== {name}")
    if before.read_bytes() == after.read_bytes():
        print("the same file; `make bench` measures anew\n", flush=True)
        return
    moved = [f"{key} {new[key] / old[key] - 1:+.0%}" for key in results.YARDSTICKS if key in old and key in new]
    if moved:
        print(f"yardsticks: {', '.join(moved)}; less than that is the machine", flush=True)
    words = ["-m", "pyperf", "compare_to", "--table", "--table-format=md", str(before), str(after)]
    if subprocess.run([sys.executable, *words], check=False).returncode != 0:
        raise SystemExit(f"error: pyperf cannot compare {before} with {after}")


def main() -> None:
    """Compare each file that both have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a folder, or a commit")
    parser.add_argument("new", nargs="?", default=str(results.DIRECTORY), help="likewise; perf/results unless given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base, new = (files_of(name, Path(scratch)) for name in (arguments.base, arguments.new))
        print(f"from {arguments.base} to {arguments.new}", flush=True)
        both = [name for name in results.NAMES if all((place / f"{name}.json").exists() for place in (base, new))]
        if not both:
            raise SystemExit("error: there is no result file that both have")
        for name in both:
            compare(name, base / f"{name}.json", new / f"{name}.json")


if __name__ == "__main__":
    main()
