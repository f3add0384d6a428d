"""Signatures of manifests: proof of who wrote a checkpoint.

A manifest binds the content of every file only as firmly as its checksums do; those of a save with
`checksum="sha256"` are as firm as the signature. The user's functions sign and judge. Here the detached
signature is written as the last file before manifest and marker, and passed to the judging function before
any other file of the checkpoint is used.

The manifest cannot list its own signature. The signature is known by its name and belongs to the checkpoint:
it is moved, replaced and deleted together with the manifest.
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
from ckpt_core.names import MARKER, SIGNATURE, twin_name
from ckpt_core.options import VerifyManifest
from ckpt_core.storage import Storage, read_small

Sign: TypeAlias = Callable[[bytes], bytes]

MAX_SIGNATURE_BYTES: Final = 1 << 20
"""A larger file is no signature, and must not be read into memory."""


def write_signature(storage: Storage, working: str, manifest: Manifest, sign: Sign) -> bytes:
    """Sign a manifest as `commit` writes it; write and return the signature."""
    try:
        signature: Any = sign(manifest.to_bytes())
    except Exception as error:  # a user's function: its error is reported with the failed save
        raise _unsigned(storage, manifest, f"sign_manifest raised {type(error).__name__}: {error}") from error
    if not isinstance(signature, bytes) or not 0 < len(signature) <= MAX_SIGNATURE_BYTES:
        what = f"{len(signature)} bytes" if isinstance(signature, bytes) else type(signature).__name__
        problem = f"sign_manifest returned {what}: it must return 1 to {MAX_SIGNATURE_BYTES} bytes"
        raise _unsigned(storage, manifest, problem)
    storage.write_bytes(f"{working}/{SIGNATURE}", signature)
    return signature


def require_trusted(storage: Storage, name: str, verify: VerifyManifest | None) -> str | None:
    """Raise unless the user's function accepts the checkpoint's manifest.

    Called before any other file of the checkpoint is used. Returns the SHA-256 of the accepted manifest, so
    that later reads can require the same one; None without `verify`.

    Raises:
        UntrustedCheckpointError: it was refused, or has no manifest of ours.
        CheckpointNotFoundError: the directory does not exist.
        CorruptCheckpointError: the manifest is not the one that was committed.
        LoadError: the function could not decide.
    """
    if verify is None:
        return None
    place = f"{storage.url}/{name}"
    try:
        content = read_manifest(storage, name)
    except CheckpointNotFoundError:
        if not storage.list(name) and not storage.exists(name):
            raise
        raise _refused(place, f"it has no manifest to be judged, because there is no {MARKER}") from None
    try:
        _judge(verify, name, content, _signature(storage, name, place), place=place)
    except UntrustedCheckpointError:
        # A signature has no checksum: which of the two is damaged, only a second judgement shows.
        if Manifest.from_bytes(content).replicas == 1:
            raise
        _judge(verify, name, content, _signature(storage, name, place, twin_name(SIGNATURE)), place=place)
    return hashlib.sha256(content).hexdigest()


def _judge(verify: VerifyManifest, name: str, content: bytes, signature: bytes, *, place: str) -> None:
    try:
        accepted: Any = verify(name, content, signature)
    except OSError as error:
        raise LoadError(
            f"verify_manifest could not judge {place}: {type(error).__name__}: {error}. No other checkpoint "
            "was tried and nothing was loaded; fix what verify_manifest depends on, and try again"
        ) from error
    except Exception as error:  # a user's function: it refuses by any other error
        raise _refused(place, f"verify_manifest raised {type(error).__name__}: {error}") from error
    if accepted is not True:
        raise _refused(place, f"verify_manifest returned {accepted!r:.80}, and not True")


def _signature(storage: Storage, name: str, place: str, path: str = SIGNATURE) -> bytes:
    try:
        return read_small(storage, f"{name}/{path}", MAX_SIGNATURE_BYTES)
    except FileNotFoundError:
        return b""
    except CorruptCheckpointError as error:
        problem = "; ".join(map(str, error.failures))
        raise _refused(place, f"its signature file is too large, or no file of ours: {problem}") from error


def _refused(place: str, why: str) -> UntrustedCheckpointError:
    return UntrustedCheckpointError(
        f"{place} is not trusted: {why}. Nothing was loaded; find out who wrote it, or load another", why=why
    )


def _unsigned(storage: Storage, manifest: Manifest, why: str) -> SaveError:
    return SaveError(
        f"step {manifest.step} was not committed to {storage.url}: its manifest could not be signed: {why}. "
        "Earlier checkpoints are untouched; fix the signing, and save again",
        step=manifest.step,
        phase="commit",
    )
