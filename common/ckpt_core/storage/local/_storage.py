"""Checkpoints in a directory of a local or shared POSIX filesystem."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import IO, Final, final

from ckpt_core.names import SPARES, draft_name
from ckpt_core.storage._base import (
    Lock,
    RangeReader,
    Space,
    Storage,
    StorageEntry,
    file_key,
    is_full,
    key_parts,
)
from ckpt_core.storage.local._direct import write_direct
from ckpt_core.storage.local._locks import holder_of, try_lock_file
from ckpt_core.storage.local._paths import (
    delete,
    exchange,
    make_directories,
    open_inside,
    open_local_ranges,
    open_regular,
    path_below,
    rename_exclusively,
    sync_directory,
)

_NO_ROOM: Final = (
    "no room for this small file: free some, as by `ckpt prune`, which needs none, then try again"
)
_SPARE_BYTES: Final = 4096


@final
class LocalStorage(Storage):
    """A directory of a filesystem.

    Symbolic links below it are renamed and unlinked as links. Files are never written, locked or deleted
    through them. Links are followed for reading only where they stay below the root, because a checkpoint
    from elsewhere may contain any link.

    Attributes:
        writers: how many threads write a large file.
    """

    supports_rename = True
    supports_append = True
    rereads_from_memory = True

    def __init__(self, root: str | Path) -> None:
        # Absolute now, because training scripts change directory.
        self._root = Path(root).expanduser().absolute()
        self.writers = 2

    @property
    def url(self) -> str:
        return str(self._root)

    def local_path(self, key: str) -> Path:
        return self._root.joinpath(*key_parts(key))

    def check_root(self) -> None:
        try:
            make_directories(self._root)
            for parent in self._root.resolve().parents:
                # The process that made it may have been killed before its fsync. A directory that this user
                # cannot read was not created by this user.
                with suppress(OSError):
                    sync_directory(parent)
            try:
                # Without a name where possible: a killed process would leave the file behind.
                with tempfile.TemporaryFile(prefix=".probe-", dir=self._root, buffering=0) as probe:
                    probe.write(b"probe")
            except OSError as error:
                if not is_full(error):
                    raise
        except NotADirectoryError as error:
            way = (self._root, *self._root.parents)
            if (
                link := next((each for each in way if each.is_symlink() and not each.exists()), None)
            ) is not None:
                target = f"a symbolic link to {link.readlink()}, which does not exist: create its target"
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
        with open(self._made(key), "xb") as stream:
            yield stream
            # Flush first: fsync does not cover Python's own buffer.
            stream.flush()
            os.fsync(stream.fileno())

    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        write_direct(self._made(key), pieces, self.writers)

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        with open_inside(self._root, key_parts(file_key(key))) as stream:
            yield stream

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        with open_local_ranges(self._root, key_parts(file_key(key))) as reader:
            yield reader

    def replace(self, key: str, content: bytes) -> None:
        """Write a small file atomically, durable on return.

        On a full disk a spare file with room for a few kB takes its place; another spare one is made of the
        room of the file before.
        """
        path = self._made(key)
        try:
            _replace(path, content)
        except OSError as error:
            if not is_full(error):
                raise
            if not _replace_by_spare(path, content):
                raise _explained(OSError, error, _NO_ROOM, at=path) from error
        sync_directory(path.parent)

    def append(self, key: str, content: bytes) -> None:
        descriptor = open_regular(self._path(key), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(descriptor, "ab", buffering=0) as stream:
            rest = memoryview(content)
            while rest:
                rest = rest[stream.write(rest) :]

    def list(self, key: str) -> list[StorageEntry]:
        try:
            with os.scandir(self.local_path(key)) as children:
                found = [_entry(child) for child in sorted(children, key=attrgetter("name"))]
        except FileNotFoundError:
            return []
        return [entry for entry in found if entry is not None]

    def directories(self, key: str) -> set[str]:
        try:
            with os.scandir(self.local_path(key)) as children:
                return {child.name for child in children if child.is_dir(follow_symlinks=False)}
        except FileNotFoundError:
            return set()

    def entry(self, key: str) -> StorageEntry | None:
        path = self.local_path(file_key(key))
        return _entry(path) if os.path.lexists(path) else None

    def size(self, key: str) -> int:
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
        delete(self._path(key))

    def make_directory(self, key: str) -> None:
        path = self._made(key)
        path.mkdir()
        sync_directory(path.parent)

    def sync_directory(self, key: str) -> None:
        sync_directory(self._path(key) if key else self._root)

    def rename(self, source: str, target: str) -> None:
        rename_exclusively(self._path(source), self._path(target))

    def exchange(self, first: str, second: str) -> None:
        exchange(self._path(first), self._path(second))

    def space(self) -> Space:
        """Return the room; free files are unknown where they are made as needed."""
        try:
            usage = os.statvfs(self._root)
        except FileNotFoundError:
            return Space()
        block = usage.f_frsize if usage.f_blocks else None
        return Space(
            None if block is None else usage.f_bavail * block,
            None if block is None else usage.f_blocks * block,
            usage.f_favail if usage.f_files else None,
        )

    def try_lock(self, key: str) -> Lock | None:
        """Lock the file `<key>.lock` next to `key`; it is never deleted."""
        path = self._path(f"{file_key(key)}.lock")
        if (lock := try_lock_file(path)) is not None:
            _make_spares(path)
        return lock

    def lock_holder(self, key: str) -> int | None:
        with suppress(OSError):
            return holder_of(self._path(f"{file_key(key)}.lock"))
        return None

    def other_owner(self, key: str) -> str | None:
        """Return the owner by user id, of a link itself, if it is another user."""
        try:
            owner = self._path(key).lstat().st_uid
        except FileNotFoundError:
            return None
        if owner == os.geteuid():
            return None
        # Some filesystems change the owner of new files: NFS from root to nobody, FUSE to the mounting user.
        with suppress(OSError), tempfile.TemporaryFile(prefix=".probe-", dir=self._root) as probe:
            if owner == os.fstat(probe.fileno()).st_uid:
                return None
        return f"user id {owner}"

    def _path(self, key: str) -> Path:
        return path_below(self._root, key_parts(file_key(key)))

    def _made(self, key: str) -> Path:
        """Return the path of a key whose parents exist now, durably."""
        path = self._path(key)
        make_directories(path.parent)
        return path


def _replace(path: Path, content: bytes, *, spare: Path | None = None) -> None:
    draft = path.with_name(draft_name(path.name, secrets.token_hex(4)))
    try:
        if spare is not None:
            status = spare.lstat()
            if not stat.S_ISREG(status.st_mode) or (status.st_nlink, status.st_size) != (1, _SPARE_BYTES):
                raise FileExistsError(errno.EEXIST, "not a file of ours, or one more name of it", str(spare))
            spare.replace(draft)  # nobody else has it then
        with open(draft, "xb" if spare is None else "r+b") as stream:
            stream.write(content)
            stream.flush()
            if spare is not None:
                stream.truncate()
            os.fsync(stream.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _replace_by_spare(path: Path, content: bytes) -> bool:
    for spare in map(path.with_name, SPARES if len(content) <= _SPARE_BYTES else ()):
        with suppress(OSError):
            _replace(path, content, spare=spare)
            _make_spares(path)
            return True
    return False


def _make_spares(beside: Path) -> None:
    for spare in map(beside.with_name, SPARES):
        with suppress(OSError):
            if not os.path.lexists(spare):
                _replace(spare, bytes(_SPARE_BYTES))


def _entry(child: os.DirEntry[str] | Path) -> StorageEntry | None:
    """Return the entry, or None if it vanished during the listing."""
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
        is_directory, size = False, 0  # a loop, or a target without permission
    return StorageEntry(child.name, is_directory, size, is_link)


def _explained(kind: type[OSError], error: OSError, hint: str, at: Path | None = None) -> OSError:
    where = error.filename if at is None else at
    return kind(error.errno, f"{hint} ({error.strerror})", str(where))
