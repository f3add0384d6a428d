"""`python -m tests.reliability`: every kill and every fault, or a part of them."""

from __future__ import annotations

import sys

from tests.reliability.command import main

if __name__ == "__main__":
    sys.exit(main())
