"""`python -m benchmarks`: saves and loads, with the default sizes."""

from __future__ import annotations

import sys

from benchmarks import load, save

if __name__ == "__main__":
    sys.exit(save.main([]) or load.main([]))
