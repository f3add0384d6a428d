"""How what stands in the way of a new checkpoint makes way for it, without being destroyed where possible."""

from __future__ import annotations

import secrets

from ckpt_core.names import MARKER, corrupt_name, is_replaced, replaced_name
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
    return _rename(storage, name, corrupt_name(name, secrets.token_hex(4)))


def set_aside(storage: Storage, name: str) -> str:
    """Take what is not ours out of the way, as it is; POSIX only, and the caller owns the root.

    Returns:
        Where it is now.
    """
    return _rename(storage, name, replaced_name(name, secrets.token_hex(4)))


def replaced(storage: Storage) -> list[str]:
    """What was not ours and had the name of a checkpoint: set aside, and left for a person."""
    return [entry.name for entry in storage.list("") if is_replaced(entry.name)]


def _rename(storage: Storage, name: str, target: str) -> str:
    storage.rename(name, target)
    # Durable before anything else takes the name: a power cut that kept only the latter would lose this.
    storage.sync_directory("")
    return target
