"""Takes what has been imported so far out of all later garbage collections.

Each full collection would look at some million objects of torch and the hosts, and in a rank, which is a
fork, copy the memory that they are in. The fork server of `tests/conftest.py` imports this module last.
"""

from __future__ import annotations

import gc


def freeze() -> None:
    gc.collect()
    gc.freeze()


freeze()
