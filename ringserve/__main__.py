"""``python -m ringserve``."""

import sys

from ringserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
