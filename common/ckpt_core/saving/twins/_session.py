"""The twins of one save, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Self, final

from ckpt_core.names import twin_name
from ckpt_core.saving.twins._incoming import Incoming
from ckpt_core.saving.twins._outgoing import Outgoing
from ckpt_core.types import FileEntry


def _ignore(_: str) -> None:
    """Ignore progress."""


@final
class TwinSession:
    """The twins of one save, while it is written and committed.

    Concurrency: on the save thread.
    """

    def __init__(self, save_id: str, outgoing: Outgoing, incoming: Incoming | None) -> None:
        self._save_id = save_id
        self._outgoing = outgoing
        self._incoming = incoming

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        if self._incoming is not None:
            self._incoming.end(self._save_id)

    def follow(self, path: str, pieces: Iterable[memoryview]) -> Iterable[memoryview]:
        """Pass on the pieces of a file of this rank, whose twin is written meanwhile."""
        return self._outgoing.follow(path, pieces)

    def add(self, path: str, content: bytes) -> None:
        """Have the twin of a small file of this rank written."""
        self._outgoing.add(path, content)

    def finish(
        self, files: Sequence[FileEntry] = (), progress: Callable[[str], None] = _ignore
    ) -> list[FileEntry]:
        """Wait until the twins of these files are durable; return their entries.

        Raises:
            SaveError: the partner was lost, or could not write.
        """
        self._outgoing.finish(progress)
        return [replace(entry, path=twin_name(entry.path)) for entry in files]

    def stop(self) -> None:
        """Write no more twins of this rank's files; harmless when repeated."""
        self._outgoing.stop()
