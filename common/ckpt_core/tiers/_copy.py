"""Verified, resumable copies of checkpoints from one root to another.

A copy is the same checkpoint: same save id, lineage, manifest, signature; the manifest of a compressed one
names that of the plain one. It is committed at the target as a save is, by its marker, after every byte was
compared with the manifest. What the manifest does not list, such as the user's files, is not copied. An
interrupted copy is continued: whole files and parts are not sent again. The manifest comes first at the
target, unlike that of a save: it tells whose unfinished copy this is. Without a marker it counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self, final

from ckpt_core.commit import (
    MAX_SIGNATURE_BYTES,
    Catalog,
    Manifest,
    Marker,
    Occupant,
    abandon,
    commit_copy,
    plain_storage,
    read_entry,
    read_manifest,
    require_free,
    settle_asides,
    working_name,
)
from ckpt_core.crew import run_all
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    damaged,
)
from ckpt_core.formats.checksums import Checksum
from ckpt_core.formats.chunks import FileChunks
from ckpt_core.formats.frames import compressor, encode_plain
from ckpt_core.names import MANIFEST, METADATA, PLAIN, SIGNATURE, is_incomplete, twin_name
from ckpt_core.reading import CheckedReader
from ckpt_core.storage import ForeignFileError, Pace, RangeReader, Storage, read_small
from ckpt_core.tiers._compressing import (
    Choices,
    Rows,
    auto,
    begun_choices,
    chunk_tables,
    compressed,
    compressed_manifest,
    cut,
    write_rate,
)
from ckpt_core.types import CheckpointInfo, FileEntry

_THREADS: Final = 4
_COMPRESSED_AT_ONCE: Final = 2
"""Files; the blocks of each are compressed on threads of their own."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTerms:
    """How a copy is made; all of it may be called on several threads.

    Attributes:
        pace: limits the rate of what is sent; None for no limit.
        bytes_per_second: that rate; None for no limit.
        compress: the codec of `copy_checkpoint`; None to copy what is stored.
        sign: signs the manifest of a compressed copy.
        progress: called with bytes done, those that were there already included.
        stop: called before every read; raises to end the copy, which a later one continues.
    """

    pace: Pace | None = None
    bytes_per_second: int | None = None
    compress: str | None = None
    sign: Callable[[bytes], bytes] | None = None
    progress: Callable[[int], None] = lambda _: None
    stop: Callable[[], None] = lambda: None


@final
class CheckpointCopy:
    """The copy of one checkpoint to a root that the job owns.

    One process calls `begin`, then every process that takes part `copy_files` for its share, then the first
    one `finish`. At the source it is called `source_name`, and `content` is its manifest, as committed there;
    at the target it is called `name`, and is written into the directory `working`. Where there are `choices`
    it is compressed, and the source has it plain.
    """

    def __init__(
        self,
        source: Storage,
        target: Storage,
        name: str,
        content: bytes,
        *,
        as_name: str | None = None,
        choices: Choices | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self.source_name = name
        self.content = content
        self.choices = choices or {}
        self.target_url = target.url
        self.manifest = Manifest.from_bytes(content)
        self._call(as_name or name)
        self._twins = {path: twin.path for path, twin in self.manifest.twins().items()}
        self._twins |= {twin: path for path, twin in self._twins.items()}

    @classmethod
    def of(
        cls,
        source: Storage,
        target: Storage,
        name: str,
        *,
        as_name: str | None = None,
    ) -> Self:
        """Read the manifest of a committed checkpoint that is to be copied.

        Raises:
            CheckpointNotFoundError: it is not committed.
            CorruptCheckpointError: marker or manifest are damaged.
            IncompatibleCheckpointError: they were written by a newer version.
        """
        return cls(source, target, name, read_manifest(source, name), as_name=as_name)

    @classmethod
    def again(
        cls,
        source: Storage,
        target: Storage,
        name: str,
        content: bytes,
        *,
        as_name: str,
        choices: Choices,
    ) -> Self:
        """Return a copy whose manifest another process has read."""
        if not Manifest.from_bytes(content, with_files=False).plain_sha256:
            source = plain_storage(source, name)
        return cls(source, target, name, content, as_name=as_name, choices=choices)

    @property
    def entries(self) -> Sequence[FileEntry]:
        """The files to be copied, without twins and what is made at the end."""
        if not self.choices:
            return self.manifest.files
        return [each for each in self.manifest.originals if not _is_metadata(each.path)]

    def chosen(self, share: Sequence[FileEntry], terms: CopyTerms) -> Self:
        """Return the copy as `terms.compress` has it, or as it was begun.

        `share` are the files that this process reads, on which `auto` tries codecs.

        Raises:
            ConfigError: the checkpoint is signed, and `terms.sign` is None.
            CorruptCheckpointError: the checkpoint is damaged.
            OSError: a storage failed.
        """
        codec = terms.compress
        if codec is None:
            return self
        source, name = plain_storage(self._source, self.source_name), self.source_name
        content, choices = read_manifest(source, name), {} if codec == "none" else {"": codec}
        if codec == "auto":
            begun = begun_choices(self._target, self.working, content)
            if begun is None or not {"zstd", "planes"}.issuperset(begun.values()):
                rate, sending = write_rate(self._target, sum(entry.size_bytes for entry in share))
                rate, tables = min(rate, terms.bytes_per_second or rate), chunk_tables(source, name, share)
                begun = auto(source, name, tables, write_rate=rate, sending=sending, stop=terms.stop)
            choices = dict(begun)
        if choices and terms.sign is None and source.exists(f"{name}/{SIGNATURE}"):
            raise ConfigError(
                f"{source.url}/{name} is signed, and a compressed copy has a manifest of its own, which is "
                "not: nothing was written; copy it as it is, or compress where it is signed (sign_manifest=)"
            )
        return type(self)(source, self._target, name, content, as_name=self.name, choices=choices)

    def begin(self, *, repair: bool = False, otherwise: str = "") -> bool:
        """Prepare the target; return False if the checkpoint is committed there already.

        With `repair` it is copied nevertheless, for it is damaged there. `otherwise` is its name where its
        own is taken, as after training went back; "" for none.

        Raises:
            CheckpointExistsError: the name is taken at the target.
            CorruptCheckpointError: a small file of the source cannot be read.
        """
        try:
            if not repair and is_committed_as(self._target, self.name, self.manifest, self.content):
                return False
            begin_copy(
                self._target, self.name, self.manifest, self._beside(), repair=repair, choices=self.choices
            )
        except CheckpointExistsError:
            if otherwise in {"", self.name}:
                raise
            self._call(otherwise)
            return self.begin(repair=repair)
        return True

    def copy_files(self, entries: Sequence[FileEntry], terms: CopyTerms) -> Rows:
        """Copy files of the checkpoint, each verified before it is complete.

        They are durable on return. Returns what `finish` needs of those that were compressed.

        Raises:
            CorruptCheckpointError: a file of the source, and its twin if it has one, is damaged.
            CheckpointNotFoundError: the source was pruned meanwhile.
            CheckpointExistsError: something else is in the way at the target.
            OSError: a storage failed.
        """
        rows, tables = dict[str, Sequence[Any]](), dict[str, FileChunks]()

        def copy(entry: FileEntry) -> None:
            row = self._copy(entry, tables.get(entry.path), terms)
            if row and any(row[2]):
                rows[entry.path] = row

        try:
            if self.choices:
                tables = chunk_tables(self._source, self.source_name, self.manifest.originals)
            run_all(copy, entries, _COMPRESSED_AT_ONCE if tables else _THREADS, name="ckpt-send")
        except CorruptCheckpointError:
            self._require_source()
            raise
        return rows

    def finish(
        self,
        rows: Rows | None = None,
        *,
        sign: Callable[[bytes], bytes] | None = None,
        check: Callable[[], None] = lambda: None,
        repair: bool = False,
    ) -> CheckpointInfo:
        """Commit the copy at the target.

        `rows` are from `copy_files`, of all files. `sign` signs the manifest of a compressed copy. `check`
        raises if another job has taken the target. With `repair` a damaged copy of the same save is replaced.

        Raises:
            SaveError: a file is missing at the target, or the outcome is in doubt; see `commit`.
            CheckpointExistsError: the name was taken meanwhile.
            RootBusyError: from `check`.
        """
        manifest = self._complete(rows or {}, sign) if self.choices else self.manifest
        # Parts of an attempt that this one did not continue; an owner may lack the right to list them.
        with suppress(OSError):
            self._target.abandon_uploads(lambda key: key.startswith(f"{self.working}/"))
        return commit_copy(self._target, self.working, self.name, manifest, check=check, repair=repair)

    def _complete(self, rows: Rows, sign: Callable[[bytes], bytes] | None) -> Manifest:
        """Write the small files of a compressed copy, of which every data file is there."""
        if not rows:  # nothing became smaller
            rest = [entry for entry in self.manifest.files if entry not in self.entries]
            self.choices = {}
            self.copy_files(rest, CopyTerms())
            self._target.delete(f"{self.working}/{PLAIN}")
            return self.manifest
        entries = [entry for entry in self.manifest.originals if _is_metadata(entry.path)]
        small = {entry.path: read_entry(self._source, self.source_name, entry) for entry in entries}
        with suppress(FileNotFoundError):
            small[SIGNATURE] = self._small(SIGNATURE)
        manifest = compressed_manifest(self.manifest, self.content, rows, self.choices, small=small)
        small[MANIFEST] = manifest.to_bytes()
        if sign is not None:
            small[SIGNATURE] = sign(small[MANIFEST])
        for path, content in small.items():
            key = f"{self.working}/{path}"
            if self._target.supports_rename:
                self._target.delete(key)
                self._target.write_bytes(key, content)
            else:
                self._target.replace(key, content)
        return manifest

    @property
    def info(self) -> CheckpointInfo:
        """The checkpoint, as a listing shows it."""
        return Marker.of(self.manifest, self.content).info(self.name)

    def _call(self, name: str) -> None:
        self.name = name
        self.working = working_name(self._target, name, self.manifest.save_id)

    def _copy(self, entry: FileEntry, chunks: FileChunks | None, terms: CopyTerms) -> Sequence[Any]:
        """Copy a file, or its twin where it is damaged; return a compressed one's row."""
        twin = self._twins.get(entry.path)
        try:
            return self._copy_from(entry.path, entry, chunks, terms)
        except CorruptCheckpointError as damage:
            if twin is None:
                raise
            try:
                return self._copy_from(twin, entry, chunks, terms)
            except CorruptCheckpointError:
                raise damage from None

    def _copy_from(
        self, path: str, entry: FileEntry, chunks: FileChunks | None, terms: CopyTerms
    ) -> Sequence[Any]:
        """Copy a file from `path`: its own, or that of its twin."""
        key, row, done = f"{self.working}/{entry.path}", list[Any](), list[int]()
        identity = f"{self.manifest.save_id}:{entry.checksum}"
        with self._open(path, entry, terms) as (ranges, reader):

            def progress(more: int) -> None:
                done.append(more)
                terms.progress(more)

            def pieces() -> Iterable[memoryview]:
                if sum(done):
                    progress(-sum(done))
                return compressed(
                    reader, frames, row, running=Checksum.like(entry.checksum), progress=progress
                )

            try:
                if chunks is None:
                    self._target.put_file(
                        key,
                        entry.size_bytes,
                        reader.read,
                        identity=identity,
                        pace=terms.pace,
                        progress=progress,
                    )
                else:
                    frames = cut(ranges, chunks, self.choices, f"{self._source.url}/{self.source_name}")
                    identity += f":{compressor()}:{frames}"
                    self._target.put_pieces(key, pieces, identity=identity, pace=terms.pace or iter)
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
        return row

    @contextmanager
    def _open(
        self, path: str, entry: FileEntry, terms: CopyTerms
    ) -> Generator[tuple[RangeReader, CheckedReader]]:
        """Open a file of the source, also for checked reads."""
        place = f"{self._source.url}/{self.source_name}"
        with ExitStack() as stack:
            try:
                ranges = stack.enter_context(self._source.open_ranges(f"{self.source_name}/{path}"))
            except FileNotFoundError:
                raise damaged(place, path, "missing") from None
            except (ForeignFileError, IsADirectoryError) as error:
                raise damaged(place, path, f"cannot be copied: {error}") from error
            yield ranges, CheckedReader(ranges, entry, place=place, path=path, stop=terms.stop)

    def _beside(self) -> dict[str, bytes]:
        """Return the small files that the manifest does not list; itself first."""
        found = {MANIFEST: self.content}
        names = [SIGNATURE]
        if self.manifest.replicas > 1 and not self.choices:
            found[twin_name(MANIFEST)] = self.content
            names.append(twin_name(SIGNATURE))
        for path in names:
            try:
                found[path] = self._small(path)
            except FileNotFoundError:
                continue
        if self.choices:
            found[PLAIN] = encode_plain(self.content, {}, {}, self.choices)
        return found

    def _small(self, path: str) -> bytes:
        return read_small(self._source, f"{self.source_name}/{path}", MAX_SIGNATURE_BYTES)

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
    check: Callable[[], None] = lambda: None,
    otherwise: str = "",
) -> CheckpointInfo:
    """Copy a committed checkpoint to another root, which the caller owns.

    Where the target has it already, nothing is done; `otherwise` is its name where its own is taken. Raises
    what `CheckpointCopy` raises.
    """
    copy = CheckpointCopy.of(source, target, name)
    copy = copy.chosen(copy.entries, terms)
    if not copy.begin(otherwise=otherwise):
        terms.progress(copy.manifest.size_bytes)
        return copy.info
    return copy.finish(copy.copy_files(copy.entries, terms), sign=terms.sign, check=check)


def _is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] == METADATA


def is_committed_as(storage: Storage, name: str, manifest: Manifest, content: bytes) -> bool:
    """Return whether a root holds that very checkpoint under `name`.

    A commit of a copy that was interrupted is completed first.

    Raises:
        CheckpointExistsError: it holds another checkpoint, or a damaged marker, under that name.
    """
    working = working_name(storage, name, manifest.save_id)
    for aside in settle_asides(storage, name):
        abandon(storage, aside)
    try:
        marker = Catalog(storage).marker(name)
    except (CheckpointNotFoundError, NotADirectoryError):
        return False  # a file of the user's is moved aside by the commit
    except (CorruptCheckpointError, IncompatibleCheckpointError) as error:
        raise CheckpointExistsError(
            f"{storage.url}/{name} is a checkpoint whose marker cannot be read ({error}); nothing there was "
            "touched: move or delete it, then copy again"
        ) from error
    if marker.is_same(manifest, content):
        if storage.supports_rename and storage.entry(working) is not None:
            abandon(storage, working)  # what is left after an interrupted commit into a user's directory
        return True
    raise CheckpointExistsError(
        f"{storage.url}/{name} is another checkpoint: step {marker.step} of save {marker.save_id}, not step "
        f"{manifest.step} of save {manifest.save_id}. Checkpoints are never overwritten: copy to another root"
    )


def begin_copy(
    storage: Storage,
    name: str,
    manifest: Manifest,
    beside: Mapping[str, bytes],
    *,
    repair: bool = False,
    choices: Choices | None = None,
) -> None:
    """Prepare the directory of a copy in a root that the caller owns.

    Files that an earlier copy of the same save has left there stay, if it was compressed as this one is.
    `beside` is path -> content of the manifest, which comes first, and of files that it does not list. With
    `repair`, a damaged copy may have the name.

    Raises:
        CheckpointExistsError: the name is taken, or on an object store belongs to another torn save.
        ConfigError: it cannot be the name of a checkpoint.
    """
    found = require_free(storage, name, replace=repair)
    working = working_name(storage, name, manifest.save_id)
    if storage.supports_rename and not is_incomplete(working):
        raise ConfigError(f"save id {manifest.save_id!r} is not 8 to 32 lower-case hex digits")
    begun = begun_choices(storage, working, beside[MANIFEST])
    if begun not in (None, choices or {}):
        abandon(storage, working)
    if storage.supports_rename:
        with suppress(FileExistsError):
            storage.make_directory(working)
    elif found is Occupant.TORN and begun is None and not storage.exists(f"{name}/{MANIFEST}"):
        _refuse_torn(storage, name)
    try:
        for path, content in beside.items():
            _write_small(storage, working, path, content, goes_on=begun is not None)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not storage.exists(working):
            raise
        raise CheckpointExistsError(
            f"{storage.url}/{working} is a file, where the directory of a copy must be; it was not touched: "
            "move or delete it"
        ) from error


def _write_small(storage: Storage, working: str, path: str, content: bytes, *, goes_on: bool) -> None:
    """Write a small file over that of an earlier attempt; a bucket keeps it."""
    key = f"{working}/{path}"
    if storage.supports_rename:  # also if it is the same: a killed process may not have synced it
        storage.delete(key)
        storage.write_bytes(key, content)
        return
    try:
        storage.write_bytes(key, content)
    except FileExistsError:
        if not goes_on and read_small(storage, key) != content:
            _refuse_torn(storage, working)


def _refuse_torn(storage: Storage, name: str) -> NoReturn:
    raise CheckpointExistsError(
        f"{storage.url}/{name} holds what another save or copy has left unfinished; nothing there was "
        "touched: if no job writes there, `ckpt prune` collects it"
    )
