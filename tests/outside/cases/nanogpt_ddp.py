"""nanoGPT's `train.py` on two ranks."""

import tests.outside.cases.nanogpt  # noqa: F401
