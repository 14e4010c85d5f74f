"""Run the benchmarks and renew their result files and BENCHMARKS.md: `make bench`, or `python perf/run.py`.

All of it takes half an hour on a machine that should do nothing else meanwhile. `--only` renews some;
`--fast` gives figures to look at, which are not for committing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import render
import results

HERE = Path(__file__).parent


def main() -> None:
    """Run, publish, render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=results.NAMES, default=results.NAMES, metavar="NAME")
    parser.add_argument("--fast", action="store_true", help="fewer values")
    parser.add_argument("--output", type=Path, default=results.DIRECTORY, metavar="FOLDER", help="of the result files")
    arguments = parser.parse_args()
    measured_commit = results.commit()
    for name in arguments.only:
        start_s = time.monotonic()
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            measured = Path(scratch) / f"{name}.json"
            words = [sys.executable, str(HERE / f"{name}.py"), "--output", str(measured)]
            if name not in results.OF_WHOLE_SERVERS:
                words.append("--quiet")
            code = subprocess.run(words + ["--fast"] * arguments.fast, check=False).returncode
            if code == results.CANNOT_RUN:
                continue
            if code != 0:
                raise SystemExit(f"error: {name}.py has failed; what ran before it is in {arguments.output}")
            results.publish(measured, name, measured_commit, arguments.output)
        print(f"   {time.monotonic() - start_s:.0f} s", flush=True)
    if arguments.output == results.DIRECTORY:
        render.write()


if __name__ == "__main__":
    main()
