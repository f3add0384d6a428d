"""Archives of tests, unpacked on every Python that is supported."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack as by `filter="data"`, which Python has from 3.11.4 on."""
    with tarfile.open(archive) as found:
        found.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
        found.extractall(folder)
