"""`python -m tests.reliability`: every kill and every fault, or a part of them."""

from __future__ import annotations

import os
import sys

from tests.reliability.command import main

# As under pytest: a search for a git commit would be one more process at every kill.
os.environ.setdefault("CKPT_SUITE_CODE_VERSION", "")

if __name__ == "__main__":
    sys.exit(main())
