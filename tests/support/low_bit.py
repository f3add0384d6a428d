"""Libraries of quantised states, in a directory of their own.

Where transformers finds them it imports them, which takes every process of the tests six seconds more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DIRECTORY = Path(sys.prefix) / "low-bit"


def is_installed() -> bool:
    """Whether `make setup` has installed them."""
    return _DIRECTORY.is_dir()


@contextmanager
def importable() -> Iterator[None]:
    """Let them be imported; for this process and those that it starts meanwhile."""
    sys.path.append(str(_DIRECTORY))
    try:
        yield
    finally:
        sys.path.remove(str(_DIRECTORY))
