"""`python -m ironbatch` is `ironbatch`."""

import sys

from ironbatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
