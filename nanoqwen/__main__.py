"""`python -m nanoqwen` is the same program as the `nanoqwen` command."""

from __future__ import annotations

import sys

from nanoqwen.cli import main

if __name__ == "__main__":
    sys.exit(main())
