"""``python -m kvprism`` is the command ``kvprism``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
