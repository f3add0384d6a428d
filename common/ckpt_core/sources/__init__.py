"""Checkpoints that others wrote, located: one description for every format.

Each format is one module with a function `find_…(storage, directory, files) -> Layout | None`, where `files`
are those of a folder, which is listed once, or with the one file that was named. It reads headers only,
executes nothing, and returns None for what is of another format. A load reads what it describes as it reads a
checkpoint of ours.
"""

from __future__ import annotations

from ckpt_core.sources._dcp_safetensors import find_dcp_safetensors
from ckpt_core.sources._deepspeed import find_deepspeed
from ckpt_core.sources._layout import (
    OURS,
    Layout,
    LayoutLocator,
    Locator,
    Path,
    StoredChunk,
    StoredTensor,
)
from ckpt_core.sources._megatron import MegatronLocator, find_common
from ckpt_core.sources._name_table import NameTable
from ckpt_core.sources._safetensors import (
    DTYPES,
    MAGNITUDE,
    StoredRange,
    find_safetensors,
    find_weights,
    read_header,
    start_of,
)
from ckpt_core.sources._torch_save import find_rank_files, find_torch_save
from ckpt_core.sources._training_folders import find_training_folder
from ckpt_core.sources._unread import refuse_unread
from ckpt_core.storage import Storage

__all__ = [
    "DTYPES",
    "MAGNITUDE",
    "OURS",
    "Layout",
    "LayoutLocator",
    "Locator",
    "MegatronLocator",
    "NameTable",
    "Path",
    "StoredChunk",
    "StoredRange",
    "StoredTensor",
    "find_common",
    "read_header",
    "recognise",
    "start_of",
]


def recognise(storage: Storage, directory: str, file: str = "") -> Layout | None:
    """Return what others wrote into a folder, or a file of it; None if it is unknown.

    Raises:
        CorruptCheckpointError: it is of a known format, and damaged or incomplete.
        IncompatibleCheckpointError: it is of a format that only another tool reads.
        UnsafeCheckpointError: only code in it could rebuild what it holds.
    """
    if file:
        refuse_unread(storage, directory, file, [file])  # first: many of them are zips, too
        return find_weights(storage, directory, file) or find_torch_save(storage, directory, file)
    files = [each.name for each in storage.list(directory) if not each.is_directory]
    found = (
        find_training_folder(storage, directory, files)  # first: it may have one of DeepSpeed in it
        or find_deepspeed(storage, directory, files)
        or find_dcp_safetensors(storage, directory, files)
        or find_rank_files(storage, directory, files)
        or find_safetensors(storage, directory, files)
    )
    if found is None:
        refuse_unread(storage, directory, "", files)
    return found
