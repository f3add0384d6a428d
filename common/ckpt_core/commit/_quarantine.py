"""How a damaged checkpoint makes way for a new one of its name, without being destroyed where possible."""

from __future__ import annotations

import secrets

from ckpt_core.names import MARKER, corrupt_name
from ckpt_core.storage import Storage


def quarantine(storage: Storage, name: str) -> str:
    """Take a damaged checkpoint out of the way; the caller owns the root and has seen it fail to verify.

    Returns:
        Where it is now: another name on POSIX; on an object store the same place, uncommitted, where the
        save that needs the name will clear it.
    """
    if not storage.supports_rename:
        storage.delete(f"{name}/{MARKER}")
        return name
    moved = corrupt_name(name, secrets.token_hex(4))
    storage.rename(name, moved)
    storage.sync_directory("")
    return moved
