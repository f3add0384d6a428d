"""The choice of a copy for each file of one checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, final

from ckpt_core.storage import LayeredStorage, Storage

_MOST_ATTEMPTS: Final = 8
"""Attempts with files from several copies, before the nearest copy is passed over as a whole."""


@final
class Reading:
    """Equal copies of one checkpoint, read as one without the files that are damaged.

    The first attempt reads the nearest copy alone, so that what is missing there is noticed. Later ones read
    each file from the nearest copy in which it is not known to be damaged. Where the nearest copy is only a
    part, so does the first.

    Args:
        directory: of the checkpoint, the same in every storage.
        storages: the nearest first.
        part: whether the nearest copy is a part of the checkpoint.
    """

    def __init__(self, directory: str, storages: Sequence[Storage], *, part: bool = False) -> None:
        self._directory = directory
        self._storages = storages
        self._passed_over: dict[str, int] = {}
        self._attempts = 1 if part else 0
        self.nearest = 0

    @property
    def storage(self) -> Storage:
        """What the next attempt reads."""
        storages = self._storages[self.nearest :]
        if not self._attempts or len(storages) == 1:
            return storages[0]
        passed_over = {f"{self._directory}/{path}": count for path, count in self._passed_over.items()}
        return LayeredStorage(*storages, passed_over=passed_over)

    def copy_of(self, path: str) -> int:
        """Return the position of the copy that a file was read from."""
        return self.nearest + self._passed_over.get(path, 0)

    def pass_over(self, paths: Collection[str]) -> bool:
        """Pass over files in the copies that they were read from; False if none is left.

        Args:
            paths: of the files; the whole nearest copy is passed over if there are none.
        """
        left = len(self._storages) - self.nearest
        self._attempts += 1
        if not paths or self._attempts > _MOST_ATTEMPTS:
            self.nearest += 1
            self._attempts, self._passed_over = 0, {}
            return left > 1
        for path in paths:
            self._passed_over[path] = self._passed_over.get(path, 0) + 1
        return all(count < left for count in self._passed_over.values())
