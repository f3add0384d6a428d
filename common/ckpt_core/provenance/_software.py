"""Versions of the libraries in use: of those that are imported already."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

_LIBRARIES: Final = (
    *("numpy", "lightning", "pytorch_lightning", "accelerate", "transformers"),
    *("peft", "torchao", "bitsandbytes", "torchdata"),
)


def software_versions() -> Mapping[str, str]:
    """Return library -> version; nothing is imported and no file is read."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return {name: str(version) for name, version in found.items() if isinstance(version, str)}
