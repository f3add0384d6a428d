"""The signature of a manifest: who wrote a checkpoint, beside what was written.

A manifest binds the content of every file only as firmly as the checksums in it do: those of a save with
`checksum="sha256"` as firmly as the signature itself. How to sign is the user's affair; here a detached
signature is written as the last file before manifest and marker, and shown to whoever is to judge it before
anything else of the checkpoint is used.

The manifest cannot list its own signature. It is known by its name instead, and belongs to the checkpoint:
wherever a manifest is moved, replaced or deleted, so is its signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ckpt_core.commit._catalog import read_manifest
from ckpt_core.commit._manifest import Manifest
from ckpt_core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    SaveError,
    UntrustedCheckpointError,
)
from ckpt_core.names import MARKER, SIGNATURE
from ckpt_core.options import VerifyManifest
from ckpt_core.storage import Storage, read_small

Sign: TypeAlias = Callable[[bytes], bytes]

MAX_SIGNATURE_BYTES: Final = 1 << 20
"""More is no signature, and must not be read into memory."""


def write_signature(storage: Storage, working: str, manifest: Manifest, sign: Sign) -> None:
    """Sign a manifest that is about to be committed, and write the signature; on the coordinator.

    Args:
        storage: the root.
        working: the directory of the save.
        manifest: what is signed: its bytes, as `commit` writes them.
        sign: the user's function, given the bytes.

    Raises:
        SaveError: it raised, or returned no signature.
        OSError: storage failed.
    """
    try:
        signature: Any = sign(manifest.to_bytes())
    except Exception as error:  # a user's function: whatever it raises is told with the save that it failed
        raise _unsigned(storage, manifest, f"sign_manifest raised {type(error).__name__}: {error}") from error
    if not isinstance(signature, bytes) or not 0 < len(signature) <= MAX_SIGNATURE_BYTES:
        what = f"{len(signature)} bytes" if isinstance(signature, bytes) else type(signature).__name__
        told = f"sign_manifest returned {what}: it must return 1 to {MAX_SIGNATURE_BYTES} bytes"
        raise _unsigned(storage, manifest, told)
    storage.write_bytes(f"{working}/{SIGNATURE}", signature)


def require_trusted(storage: Storage, name: str, verify: VerifyManifest | None) -> str | None:
    """Refuse a checkpoint that the user's function does not accept, before anything of it is used.

    Args:
        storage: the root.
        name: of the checkpoint's directory.
        verify: the user's function; None to accept whatever there is.

    Returns:
        SHA-256 of the manifest that was accepted, for whoever reads it again; None if nobody judges.

    Raises:
        UntrustedCheckpointError: it was refused; so is what has no manifest of ours.
        CheckpointNotFoundError: there is nothing.
        CorruptCheckpointError: the manifest is not the one that was committed.
        LoadError: the function could not tell.
        OSError: storage is unwell.
    """
    if verify is None:
        return None
    place = f"{storage.url}/{name}"
    try:
        content = read_manifest(storage, name)
    except CheckpointNotFoundError:
        if not storage.list(name) and not storage.exists(name):
            raise
        raise _refused(place, f"it has no manifest to be judged, for there is no {MARKER}") from None
    signature = _signature(storage, name, place)
    try:
        accepted: Any = verify(name, content, signature)
    except OSError as error:
        raise LoadError(
            f"verify_manifest could not judge {place}: {type(error).__name__}: {error}. No other checkpoint "
            "was tried and nothing was loaded; see to what it asks, and try again"
        ) from error
    except Exception as error:  # a user's function: how it says that a signature is wrong is its own affair
        raise _refused(place, f"verify_manifest raised {type(error).__name__}: {error}") from error
    if accepted is not True:
        raise _refused(place, f"verify_manifest returned {accepted!r:.80}, and not True")
    return hashlib.sha256(content).hexdigest()


def _signature(storage: Storage, name: str, place: str) -> bytes:
    try:
        return read_small(storage, f"{name}/{SIGNATURE}", MAX_SIGNATURE_BYTES)
    except FileNotFoundError:
        return b""
    except CorruptCheckpointError as error:
        told = "; ".join(map(str, error.failures))
        raise _refused(
            place, f"what has the name of its signature is too large, or no file of ours: {told}"
        ) from error


def _refused(place: str, why: str) -> UntrustedCheckpointError:
    return UntrustedCheckpointError(
        f"{place} is not trusted: {why}. Nothing was loaded; find out who wrote it, or load another", why=why
    )


def _unsigned(storage: Storage, manifest: Manifest, why: str) -> SaveError:
    return SaveError(
        f"step {manifest.step} was not committed to {storage.url}: its manifest could not be signed: {why}. "
        "What was committed before is untouched; see to the key, and save again",
        step=manifest.step,
        phase="commit",
    )
