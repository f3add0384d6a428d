"""Options of fsspec's filesystems that another client understands too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ckpt_core.errors import ConfigError


def refuse_others(url: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse options without a translation.

    Raises:
        ConfigError: it names them.
    """
    others = sorted(name for name in options if name not in known)
    if others:
        raise ConfigError(
            f"{url}: obstore has nothing like storage_options {', '.join(others)}; leave them out, or choose "
            "storage_options={'client': 'fsspec'}"
        )
