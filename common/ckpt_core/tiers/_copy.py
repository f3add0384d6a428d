"""Verified, resumable copies of checkpoints from one root to another.

A copy is the same checkpoint: same save id, lineage, manifest, signature. It is committed at the target as a
save is, by its marker, after every byte was compared with the manifest. What the manifest does not list, such
as the user's files, is not copied. An interrupted copy is continued: whole files and parts are not sent
again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, Self, final

from ckpt_core.commit import (
    MAX_SIGNATURE_BYTES,
    Catalog,
    Manifest,
    Marker,
    commit_copy,
    read_manifest,
    working_name,
)
from ckpt_core.crew import run_all
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from ckpt_core.names import MANIFEST, SIGNATURE, twin_name, writer_rank
from ckpt_core.storage import ForeignFileError, Storage, read_small
from ckpt_core.tiers._checked_reader import CheckedReader, damaged
from ckpt_core.tiers._copy_terms import CopyTerms
from ckpt_core.tiers._landing import begin_copy, is_committed_as
from ckpt_core.types import CheckpointInfo, FileEntry

_THREADS: Final = 4


def _no_check() -> None:
    """Accept that this process owns the target."""


def files_by_rank(manifest: Manifest) -> Mapping[int, Sequence[FileEntry]]:
    """Return the files of each rank, by their names; files of no rank are rank 0's."""
    found: dict[int, list[FileEntry]] = {}
    for entry in manifest.files:
        found.setdefault(writer_rank(entry.path) or 0, []).append(entry)
    return found


@final
class CheckpointCopy:
    """The copy of one checkpoint to a root that the job owns.

    One process calls `begin`, then every process that takes part `copy_files` for its share, then the first
    one `finish`.

    Attributes:
        name: of the checkpoint at the target.
        source_name: of the checkpoint at the source.
        manifest: of the checkpoint.
        content: the bytes of the manifest, as committed.
        working: the directory at the target that it is written into.
        target_url: of the root to copy to.

    Args:
        source: the root to copy from.
        target: the root to copy to.
        name: of the checkpoint at the source.
        content: its manifest, as committed.
        as_name: its name at the target; None for the same.
    """

    def __init__(
        self, source: Storage, target: Storage, name: str, content: bytes, *, as_name: str | None = None
    ) -> None:
        self._source = source
        self._target = target
        self.source_name = name
        self.content = content
        self.target_url = target.url
        self.name = as_name or name
        self.manifest = Manifest.from_bytes(content)
        self.working = working_name(target, self.name, self.manifest.save_id)
        self._twins = {path: twin.path for path, twin in self.manifest.twins().items()}
        self._twins |= {twin: path for path, twin in self._twins.items()}

    @classmethod
    def of(cls, source: Storage, target: Storage, name: str, *, as_name: str | None = None) -> Self:
        """Read the manifest of a committed checkpoint that is to be copied.

        Args:
            source: the root to copy from.
            target: the root to copy to.
            name: of the checkpoint at the source.
            as_name: its name at the target, where the same name is taken there; see `run_name`.

        Raises:
            CheckpointNotFoundError: it is not committed.
            CorruptCheckpointError: marker or manifest are damaged.
            IncompatibleCheckpointError: they were written by a newer version.
        """
        return cls(source, target, name, read_manifest(source, name), as_name=as_name)

    def begin(self, *, repair: bool = False) -> bool:
        """Prepare the target; return False if the checkpoint is committed there already.

        With `repair` it is copied although it is committed there, for it is damaged.

        Raises:
            CheckpointExistsError: the name is taken at the target.
            CorruptCheckpointError: a small file of the source cannot be read.
        """
        if not repair and is_committed_as(self._target, self.name, self.manifest, self.content):
            return False
        begin_copy(self._target, self.name, self.manifest, self._beside(), repair=repair)
        return True

    def copy_files(self, entries: Sequence[FileEntry], terms: CopyTerms) -> None:
        """Copy files of the checkpoint, each verified before it is complete.

        They are durable on return.

        Raises:
            CorruptCheckpointError: a file of the source, and its twin if it has one, is damaged.
            CheckpointNotFoundError: the source was pruned meanwhile.
            CheckpointExistsError: something else is in the way at the target.
            OSError: a storage failed.
        """
        try:
            run_all(lambda entry: self._copy(entry, terms), entries, _THREADS, name="ckpt-send")
        except CorruptCheckpointError:
            self._require_source()
            raise

    def finish(self, *, check: Callable[[], None] = _no_check, repair: bool = False) -> CheckpointInfo:
        """Commit the copy at the target.

        Args:
            check: raises if another job has taken the target; see `Lease.check`.
            repair: whether to replace a damaged copy of the same save.

        Raises:
            SaveError: a file is missing at the target, or the outcome is in doubt; see `commit`.
            CheckpointExistsError: the name was taken meanwhile.
            RootBusyError: from `check`.
        """
        # Parts of an attempt that this one did not continue; an owner may lack the right to list them.
        with suppress(OSError):
            self._target.abandon_uploads(lambda key: key.startswith(f"{self.working}/"))
        return commit_copy(self._target, self.working, self.name, self.manifest, check=check, repair=repair)

    @property
    def info(self) -> CheckpointInfo:
        """The checkpoint, as a listing shows it."""
        return Marker.of(self.manifest, self.content).info(self.name)

    def _copy(self, entry: FileEntry, terms: CopyTerms) -> None:
        """Copy a file; where it is damaged, its twin in its place."""
        twin = self._twins.get(entry.path)
        try:
            self._copy_from(entry.path, entry, terms)
        except CorruptCheckpointError as damage:
            if twin is None:
                raise
            try:
                self._copy_from(twin, entry, terms)
            except CorruptCheckpointError:
                raise damage from None

    def _copy_from(self, path: str, entry: FileEntry, terms: CopyTerms) -> None:
        """Copy a file from `path`: its own, or that of its twin."""
        key = f"{self.working}/{entry.path}"
        with self._open(path, entry, terms) as reader:
            try:
                self._target.put_file(
                    key,
                    entry.size_bytes,
                    reader.read,
                    identity=f"{self.manifest.save_id}:{entry.checksum}",
                    pace=terms.pace,
                    progress=terms.progress,
                )
            except FileExistsError as error:
                raise CheckpointExistsError(
                    f"{self._target.url}/{key} is there and not what is copied; nothing there was touched: "
                    "inspect it, then move or delete it"
                ) from error
            try:
                reader.finish()
            except CorruptCheckpointError:
                self._target.delete(key)
                raise

    @contextmanager
    def _open(self, path: str, entry: FileEntry, terms: CopyTerms) -> Generator[CheckedReader]:
        """Open a file of the source for checked reads."""
        place = f"{self._source.url}/{self.source_name}"
        with ExitStack() as stack:
            try:
                ranges = stack.enter_context(self._source.open_ranges(f"{self.source_name}/{path}"))
            except FileNotFoundError:
                raise damaged(place, path, "missing") from None
            except (ForeignFileError, IsADirectoryError) as error:
                raise damaged(place, path, f"cannot be copied: {error}") from error
            yield CheckedReader(ranges, entry, place=place, path=path, stop=terms.stop)

    def _beside(self) -> dict[str, bytes]:
        """Return the small files that the manifest does not list; itself first."""
        found = {MANIFEST: self.content}
        names = [SIGNATURE]
        if self.manifest.replicas > 1:
            found[twin_name(MANIFEST)] = self.content
            names.append(twin_name(SIGNATURE))
        for path in names:
            try:
                found[path] = read_small(self._source, f"{self.source_name}/{path}", MAX_SIGNATURE_BYTES)
            except FileNotFoundError:
                continue
        return found

    def _require_source(self) -> None:
        """Raise if what looks like damage is a source that was pruned or replaced."""
        try:
            there = Catalog(self._source).marker(self.source_name).matches(self.content)
        except CheckpointNotFoundError:
            there = False
        except CheckpointError:
            return
        if not there:
            raise CheckpointNotFoundError(
                f"{self._source.url}/{self.source_name} was pruned or replaced while it was copied"
            )


def copy_checkpoint(
    source: Storage,
    target: Storage,
    name: str,
    terms: CopyTerms,
    *,
    check: Callable[[], None] = _no_check,
    otherwise: str = "",
) -> CheckpointInfo:
    """Copy a committed checkpoint to another root, which the caller owns.

    Where the target has it already, nothing is done; `otherwise` is its name where its own is taken. Raises
    what `CheckpointCopy` raises.
    """
    copy = CheckpointCopy.of(source, target, name)
    try:
        begun = copy.begin()
    except CheckpointExistsError:
        if otherwise in {"", name}:
            raise
        copy = CheckpointCopy.of(source, target, name, as_name=otherwise)
        begun = copy.begin()
    if not begun:
        terms.progress(copy.manifest.size_bytes)
        return copy.info
    copy.copy_files(copy.manifest.files, terms)
    return copy.finish(check=check)
