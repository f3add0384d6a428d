"""Checkpoints in a directory of a local or shared POSIX filesystem."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import IO, final

from ckpt_core.names import draft_name
from ckpt_core.storage._base import Lock, RangeReader, Storage, StorageEntry
from ckpt_core.storage._keys import file_key, key_parts
from ckpt_core.storage.local._direct import write_direct
from ckpt_core.storage.local._locks import holder_of, try_lock_file
from ckpt_core.storage.local._paths import Place, place_below
from ckpt_core.storage.local._posix import make_directories, sync_directory, sync_parents
from ckpt_core.storage.local._reader import open_inside, open_local_ranges
from ckpt_core.storage.local._rename import exchange, rename_exclusively


@final
class LocalStorage(Storage):
    """A directory.

    Symbolic links below it are renamed and unlinked as links. Nothing is written, locked or deleted through
    them, whatever others do in directories of theirs meanwhile. They are read through only where they stay
    below the root, because a checkpoint from elsewhere may hold any link.
    """

    supports_rename = True
    rereads_from_memory = True

    def __init__(self, root: str | Path) -> None:
        # Absolute now, because training scripts change directory.
        self._root = Path(root).expanduser().absolute()

    @property
    def url(self) -> str:
        """The absolute path."""
        return str(self._root)

    def local_path(self, key: str) -> Path:
        """Where `key` is in the filesystem, for writers that need more than a stream.

        Raises:
            ValueError: the key leads out of the root.
        """
        return self._root.joinpath(*key_parts(key))

    def check_root(self) -> None:
        """Create the root if need be and prove that a file can be written there."""
        try:
            make_directories(self._root)
            sync_parents(self._root)
            # Without a name where possible: a kill would leave a file behind.
            with tempfile.TemporaryFile(prefix=".probe-", dir=self._root) as probe:
                probe.write(b"probe")
                probe.flush()
        except NotADirectoryError as error:
            if (link := _dangling(self._root)) is not None:
                target = f"a symbolic link to {link.readlink()}, which does not exist: make what it leads to"
                raise NotADirectoryError(errno.ENOTDIR, target, str(link)) from error
            raise _explained(
                NotADirectoryError, error, "a file is where the checkpoint root should be"
            ) from error
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
                hint = "cannot create files in the checkpoint root; check owner, mode and mount"
                raise _explained(PermissionError, error, hint, at=self._root) from error
            raise _explained(OSError, error, "cannot use the checkpoint root", at=self._root) from error

    @contextmanager
    def create(self, key: str) -> Generator[IO[bytes]]:
        """Open a new file for streaming writes; durable on a clean exit, left partial on an error."""
        with self._place(key, make=True) as place:
            stream = place.create_stream()
        with stream:
            yield stream
            # Flush first: fsync alone would leave what is still in Python's buffer to luck.
            stream.flush()
            os.fsync(stream.fileno())

    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        """Create a large file by direct writes on several threads; left partial on an error."""
        with self._place(key, make=True) as place:
            write_direct(place, pieces)

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        """Open a file for reading.

        Raises:
            FileNotFoundError: no such file.
            PermissionError: also if a symbolic link on the way leads out of the root.
        """
        with open_inside(self._root, key_parts(file_key(key))) as stream:
            yield stream

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        """Open a file for reading by ranges; same errors as `open`."""
        with open_local_ranges(self._root, key_parts(file_key(key))) as reader:
            yield reader

    def replace(self, key: str, content: bytes) -> None:
        """Write a small file atomically, durable on return."""
        with self._place(key, make=True) as place:
            draft = place.beside(draft_name(place.name, secrets.token_hex(4)))
            try:
                with draft.create_stream() as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                place.replace_by(draft)
            except BaseException:
                draft.delete()
                raise
            place.sync()

    def list(self, key: str) -> list[StorageEntry]:
        """Children of a directory, sorted by name; [] if it does not exist."""
        try:
            with os.scandir(self.local_path(key)) as children:
                found = [_entry(child) for child in sorted(children, key=attrgetter("name"))]
        except FileNotFoundError:
            return []
        return [entry for entry in found if entry is not None]

    def entry(self, key: str) -> StorageEntry | None:
        """What `list` of its directory says of one child, without looking at the others."""
        path = self.local_path(file_key(key))
        return _entry(path) if os.path.lexists(path) else None

    def size(self, key: str) -> int:
        """Size of a file in bytes."""
        path = self.local_path(file_key(key))
        try:
            size = path.stat().st_size
        except OSError as error:
            if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(error.errno), str(path)) from error
        if path.is_dir():
            raise FileNotFoundError(errno.ENOENT, "a directory, not a file", str(path))
        return size

    def delete(self, key: str) -> None:
        """Delete a file, a link, or a directory with all it holds."""
        # NotADirectoryError: a file is where a parent should be, so that there is nothing of this name.
        with suppress(FileNotFoundError, NotADirectoryError), self._place(key) as place:
            try:
                place.delete()
            except RecursionError:
                message = "directories are nested too deeply in it; delete it with `rm -r`"
                raise OSError(errno.ENAMETOOLONG, message, str(place.path)) from None

    def make_directory(self, key: str) -> None:
        """Create a directory and its parents durably."""
        with self._place(key, make=True) as place:
            place.make_directory()
            place.sync()

    def sync_directory(self, key: str) -> None:
        """Fsync a directory."""
        if not key:
            sync_directory(self._root)
            return
        with self._place(key) as place:
            place.sync_as_directory()

    def rename(self, source: str, target: str) -> None:
        """Rename atomically, onto unoccupied space only; durable after `sync_directory` of the parent."""
        with self._place(source) as old, self._place(target) as new:
            rename_exclusively(old, new)

    def exchange(self, first: str, second: str) -> None:
        """Exchange two directories; durable after `sync_directory` of the parent."""
        with self._place(first) as one, self._place(second) as other:
            exchange(one, other)

    def free_bytes(self) -> int | None:
        """Free space for this user as the filesystem tells it; quotas are not visible to it."""
        usage = self._usage()
        return usage.f_bavail * usage.f_frsize if usage is not None and usage.f_blocks else None

    def total_bytes(self) -> int | None:
        """Size of the filesystem as it tells it."""
        usage = self._usage()
        return usage.f_blocks * usage.f_frsize if usage is not None and usage.f_blocks else None

    def free_files(self) -> int | None:
        """Free inodes for this user; None on filesystems that make them as they are needed."""
        usage = self._usage()
        return usage.f_favail if usage is not None and usage.f_files else None

    def try_lock(self, key: str) -> Lock | None:
        """Claim `key` by a lock on the file `<key>.lock` next to it, which stays behind."""
        with self._place(f"{file_key(key)}.lock", make=True) as place:
            return try_lock_file(place)

    def lock_holder(self, key: str) -> int | None:
        """Ask the kernel which process holds the lock; it knows those of this machine."""
        try:
            with self._place(f"{file_key(key)}.lock") as place:
                return holder_of(place)
        except OSError:
            return None

    def other_owner(self, key: str) -> str | None:
        """Tell whose it is by the user id that it has, a link as a link."""
        try:
            with self._place(key) as place:
                owner = place.status().st_uid
        except FileNotFoundError:
            return None
        # Some filesystems give what this user makes to another: NFS root's to nobody, FUSE to who mounted it.
        return None if owner == os.geteuid() or owner == self._maker() else f"user id {owner}"

    def _place(self, key: str, *, make: bool = False) -> AbstractContextManager[Place]:
        return place_below(self._root, key_parts(file_key(key)), make=make)

    def _maker(self) -> int | None:
        """Who owns what this process makes in the root."""
        try:
            with tempfile.TemporaryFile(prefix=".probe-", dir=self._root) as probe:
                return os.fstat(probe.fileno()).st_uid
        except OSError:
            return None

    def _usage(self) -> os.statvfs_result | None:
        try:
            return os.statvfs(self._root)
        except FileNotFoundError:
            return None


def _entry(child: os.DirEntry[str] | Path) -> StorageEntry | None:
    """The child, or None if it vanished during the listing."""
    is_link = child.is_symlink()
    try:
        is_directory = child.is_dir()
        size = 0 if is_directory else child.stat().st_size
    except FileNotFoundError:
        if not is_link:
            return None
        is_directory, size = False, 0
    except OSError:
        if not is_link:
            raise
        is_directory, size = False, 0  # it leads in a circle, or where this user may not look
    return StorageEntry(child.name, is_directory, size, is_link)


def _dangling(path: Path) -> Path | None:
    """The symbolic link on the way to `path` that leads nowhere."""
    return next((each for each in (path, *path.parents) if each.is_symlink() and not each.exists()), None)


def _explained(kind: type[OSError], error: OSError, hint: str, at: Path | None = None) -> OSError:
    """The same error with a sentence for the person on call."""
    where = error.filename if at is None else at
    return kind(error.errno, f"{hint} ({error.strerror})", str(where))
