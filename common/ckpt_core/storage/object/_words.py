"""Options in the words of fsspec's filesystems, refused by their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ckpt_core.disclosure import Redaction
from ckpt_core.errors import ConfigError


def refused(
    url: str, library: str, options: Iterable[str], *, error: Exception, redaction: Redaction
) -> ConfigError:
    """Build the error for arguments that a library refuses, with names only."""
    names = ", ".join(sorted(options))
    given = f", and storage_options ({names})" if names else ""
    text = redaction.text(f"{type(error).__name__}: {error}")
    return ConfigError(f"{url}: {library} cannot open this ({text}); check the URL{given}")


def refuse_others(
    url: str, options: Mapping[str, Any], known: Collection[str], library: str = "obstore"
) -> None:
    """Refuse options without a translation.

    Raises:
        ConfigError: it names them.
    """
    others = sorted(name for name in options if name not in known)
    if others:
        raise ConfigError(
            f"{url}: {library} has nothing like storage_options {', '.join(others)}; leave them out"
        )
