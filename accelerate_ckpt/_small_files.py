"""The small files of a checkpoint that belong to the host: compared with the manifest, then read by us.

What is in them cannot run code unless `allow_pickle` was given. What no manifest names is never seen: host
methods and hooks that insist on reading a directory get one with nothing else in it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from accelerate.utils.other import TORCH_SAFE_GLOBALS

from ckpt_core.commit import Catalog
from ckpt_core.dcp import checked_zip, load_value
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, IncompatibleCheckpointError
from ckpt_core.loading import CommittedFiles
from ckpt_core.storage import Storage

_logger = logger_of(__name__)

_SAFE: list[Any] = [*TORCH_SAFE_GLOBALS]
"""What Accelerate's own reader lets through besides what torch does, and the Trainer's does as well."""


@final
class Pickles:
    """Reads what `torch.save` wrote; whether that may execute pickles is decided here, once.

    Attributes:
        allowed: whether it may.
    """

    def __init__(self, *, allowed: bool) -> None:
        self.allowed = allowed
        self._looked_at: set[str] = set()

    def load(self, content: bytes, name: str) -> Any:
        """Read the content of a file.

        Args:
            content: as it was committed.
            name: path of the file and what it is of, for errors.

        Raises:
            UnsafeCheckpointError: only pickle can rebuild it, and that is not allowed.
            CorruptCheckpointError: it is nothing that `torch.save` writes.
            IncompatibleCheckpointError: this program cannot make what it holds, such as a class that is gone.
        """
        checked_zip(content, name, trusted=self.allowed)
        try:
            with torch.serialization.safe_globals(_SAFE):
                return load_value(content, name, allow_pickle=self.allowed)
        except CheckpointError:
            raise
        except Exception as error:  # a foreign pickle raises nearly anything; the caller is told what
            raise IncompatibleCheckpointError(f"{name} cannot be read here: {error!r:.500}") from error

    def tell(self, files: Mapping[str, bytes], owners: Mapping[str, str]) -> None:
        """Log which files of a save only pickle could read again; each file is looked at once.

        Args:
            files: what is to be saved, by path.
            owners: path -> whose state it is, for people.
        """
        if self.allowed:
            return
        new = (owners.keys() & files.keys()) - self._looked_at
        self._looked_at |= new
        odd = [f"{path} ({owners[path]})" for path in sorted(new) if not _is_plain(files[path])]
        if odd:
            _logger.warning(
                "%s can be read again only by pickle, which could run any code: load it with "
                "allow_pickle=True, or keep plain values and tensors instead",
                ", ".join(odd),
            )


def verified_files(storage: Storage, name: str, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Read some files of a committed checkpoint, by path, each one as it was committed.

    Args:
        storage: the root.
        name: the checkpoint's directory.
        wanted: whether a path of the manifest is to be read.

    Raises:
        CorruptCheckpointError: one of them is missing, or is not what was committed.
        CheckpointNotFoundError: there is no committed checkpoint of that name.
        OSError: storage is unwell.
    """
    manifest = Catalog(storage).manifest(name)
    files = CommittedFiles(storage, name, manifest)
    return {entry.path: files.read(entry.path) for entry in manifest.files if wanted(entry.path)}


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Put files into a directory, for host methods and hooks that read from one."""
    for path, content in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def link_files(paths: Iterable[str], source: Path, directory: Path) -> None:
    """Put links to files of `source` into a directory: what is large, and need not be copied."""
    for path in paths:
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source / path)


def _is_plain(content: bytes) -> bool:
    try:
        with torch.serialization.safe_globals(_SAFE):
            torch.load(io.BytesIO(content), map_location="meta", weights_only=True)  # no tensor is read
    except Exception:  # noqa: BLE001 - whatever it is, a load would meet it too; the caller tells the user
        return False
    return True
