"""Checkpoints that others wrote, located: one description for every format.

Each format is one module with a function `find_…(storage, directory, file) -> Layout | None`; `file` is "" if
the place is the folder itself. It reads headers only, executes nothing, and returns None for what is of
another format. A load reads what it describes as it reads a checkpoint of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ckpt_core.sources._dcp_safetensors import find_dcp_safetensors
from ckpt_core.sources._deepspeed import find_deepspeed
from ckpt_core.sources._layout import OURS, Layout, LayoutLocator, Path, StoredChunk, StoredTensor
from ckpt_core.sources._megatron import Locator, MegatronLocator, find_common
from ckpt_core.sources._name_table import NameTable
from ckpt_core.sources._safetensors import (
    DTYPES,
    MAGNITUDE,
    StoredRange,
    find_safetensors,
    read_header,
    start_of,
)
from ckpt_core.sources._torch_save import find_torch_save
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

_FORMATS: Final[Sequence[Callable[[Storage, str, str], Layout | None]]] = (
    find_training_folder,  # first: it may have one of DeepSpeed in it
    find_deepspeed,
    find_dcp_safetensors,
    find_safetensors,
    find_torch_save,
)
"""In the order in which they are asked."""


def recognise(storage: Storage, directory: str, file: str = "") -> Layout | None:
    """Return what others wrote into a folder, or a file of it; None if it is unknown.

    Raises:
        CorruptCheckpointError: it is of a known format, and damaged or incomplete.
        IncompatibleCheckpointError: it is of a format that only another tool reads.
        UnsafeCheckpointError: only code in it could rebuild what it holds.
    """
    if file:  # many of them are zips, too
        refuse_unread(storage, directory, file)
    found = (find(storage, directory, file) for find in _FORMATS)
    if (layout := next((layout for layout in found if layout is not None), None)) is None:
        refuse_unread(storage, directory, file)
    return layout
