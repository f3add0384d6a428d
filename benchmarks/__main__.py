"""`python -m benchmarks`: all benchmarks, with their default sizes."""

from __future__ import annotations

import sys

from benchmarks import save

if __name__ == "__main__":
    sys.exit(save.main())
